"""Every sequence of a machine's events up to a depth, followed from copies of the machine.

Two sequences that lead to the same machine, down to its last byte, have the same future: it is followed once.
"""

import pickle
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar


class Machine(Protocol):
    def check(self) -> None:
        """Raise `AssertionError` if what the machine shows is not what its little model says."""
        ...


MachineT = TypeVar("MachineT", bound=Machine)


def follow_every_sequence(start: MachineT, events: Mapping[str, Callable[[MachineT], None]], depth: int) -> int:
    """The number of events that were tried; raises `AssertionError` with the sequence that led to the failure."""
    num_tried = 0
    seen: set[bytes] = set()
    frontier: list[tuple[bytes, tuple[str, ...]]] = [(pickle.dumps(start), ())]
    for _ in range(depth):
        reached: list[tuple[bytes, tuple[str, ...]]] = []
        for before, path in frontier:
            for name, happen in events.items():
                num_tried += 1
                machine: MachineT = pickle.loads(before)
                try:
                    happen(machine)
                    after = pickle.dumps(machine)
                    if after not in seen:
                        machine.check()
                except AssertionError as error:
                    raise AssertionError(f"{' > '.join((*path, name))}: {error}") from error
                if after not in seen:
                    seen.add(after)
                    reached.append((after, (*path, name)))
        frontier = reached
    return num_tried
