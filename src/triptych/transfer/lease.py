"""`LeaseTable`: until when published pages must not be recycled.

A lease is granted when a ticket is made, may be renewed (it never gets shorter), and ends in one of two ways: it is released, because
everybody who could read the pages is done, or it expires, since nobody may be left to release it.
"""

from collections.abc import Callable


class LeaseTable:
    """Leases by id, in seconds of `clock`, which is monotonic. No I/O and no thread: its owner asks for what has expired."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadlines: dict[str, float] = {}  # looked through in each step: 0.1 ms for a thousand
        self.num_expired = 0  # since the start: nobody released them

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, id: str, lease_s: float) -> None:
        """Lease `id` for at least `lease_s` from now on; granting again renews, and never shortens."""
        self._deadlines[id] = max(self._clock() + lease_s, self._deadlines.get(id, float("-inf")))

    def release(self, id: str) -> None:
        """End the lease of `id` now. An id without one is ignored: it may have expired a moment ago."""
        self._deadlines.pop(id, None)

    def expired(self) -> list[str]:
        """The ids whose leases have ended by time, earliest first; they are forgotten."""
        now = self._clock()
        ended = sorted((deadline, id) for id, deadline in self._deadlines.items() if deadline <= now)
        for _, id in ended:
            del self._deadlines[id]
        self.num_expired += len(ended)
        return [id for _, id in ended]

    def next_deadline(self) -> float | None:
        """When `expired` will next have something to say, in the clock's time; None without leases."""
        return min(self._deadlines.values(), default=None)
