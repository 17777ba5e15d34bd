"""What a chaos run will do, drawn from its seed before it starts: the questions, who asks what, and which worker is hurt how."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from random import Random

from chat_load import ChatCase, picture_url
from chat_parts import user

STAGES = ("encode", "prefill", "decode")
SIZES = ((112, 112), (168, 112), (168, 224), (280, 280), (448, 448))  # 16 to 256 rows


class FaultKind(StrEnum):
    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    kind: FaultKind
    worker: str  # encode-0, prefill-1 ...
    pause_s: float  # since the worker that was hurt before in this stage is back

    @property
    def stage(self) -> str:
        return self.worker.partition("-")[0]


def plan_faults(seed: int, num_faults: int) -> dict[str, list[PlannedFault]]:
    """Equally many of each kind, spread over two workers of each stage; in each stage one after the other."""
    rng = Random(f"faults {seed}")
    workers = [f"{stage}-{number}" for stage in STAGES for number in (0, 1)]
    rng.shuffle(workers)
    kinds = list(FaultKind) * (num_faults // len(FaultKind))
    # Dealt kind by kind, each kind from another worker on: neither a kind nor a worker gets more than its share.
    dealt = sorted(kinds)
    faults = [PlannedFault(kind, workers[place % len(workers)], rng.uniform(0.0, 0.5)) for place, kind in enumerate(dealt)]
    rng.shuffle(faults)
    return {stage: [fault for fault in faults if fault.stage == stage] for stage in STAGES}


def chaos_cases(seed: int, num_cases: int = 48, num_pictures: int = 24) -> list[ChatCase]:
    """Text only, one picture, or two or three; from a common stock, so that requests share pictures and caches overflow."""
    rng = Random(f"cases {seed}")
    stock = [picture_url(f"chaos {seed} {number}", rng.choice(SIZES)) for number in range(num_pictures)]
    return [_case(rng, f"case {number}", stock) for number in range(num_cases)]


def _case(rng: Random, name: str, stock: Sequence[str]) -> ChatCase:
    pictures = rng.sample(stock, rng.choices((0, 1, 2, 3), (2, 6, 2, 1))[0])
    where = "" if len(pictures) < 2 else f"in picture {rng.choice(('one', 'two'))}, "
    question = rng.choice(
        ("what shape is red?", "what colour is the circle?", "how many shapes are there?", "describe the picture.")
    )
    is_long = rng.random() < 0.5
    return ChatCase(
        name, user(f"{where}{question}", *pictures), max_tokens=rng.randint(40, 120) if is_long else 24, ignore_eos=is_long
    )


def cases_of_client(seed: int, client: int, cases: Sequence[ChatCase]) -> Iterator[tuple[ChatCase, bool]]:
    """Without end: what this client asks next, and whether it takes the answer as a stream."""
    rng = Random(f"client {seed} {client}")
    for _ in count():
        yield rng.choice(cases), rng.random() < 0.5
