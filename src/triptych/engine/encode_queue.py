"""`EncodeQueue`: the items that this worker's tower is asked for.

    submit -> PREPARING (bytes become tower inputs, beside the engine thread) -> READY -> ENCODING (one step) -> gone

One job per key, however many ask for it: later ones join. A job goes on until the last who asked has left; one that nobody waits for any more
is not started.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from triptych.engine.encoder_cache_manager import EncoderCacheManager, Rank
from triptych.output import EncodeInput


class EncodeState(Enum):
    PREPARING = auto()
    READY = auto()
    ENCODING = auto()


@dataclass(frozen=True, slots=True)
class EncodeSpec:
    """One call for one item. `will_stay`: the caller needs no ticket, as this worker prefills it as well."""

    encode_id: str
    key: str
    modality: str
    num_rows: int
    grid: tuple[int, ...] = ()
    will_stay: bool = False


@dataclass(slots=True)
class EncodeJob:
    spec: EncodeSpec  # the first call's
    callers: dict[str, tuple[EncodeSpec, float]] = field(
        default_factory=dict[str, tuple[EncodeSpec, float]]
    )  # id -> (spec, arrival)
    state: EncodeState = EncodeState.PREPARING
    inputs: object = None
    preprocess_s: float = 0.0
    started_at: float = 0.0

    @property
    def needs_ticket(self) -> bool:
        return any(not spec.will_stay for spec, _ in self.callers.values())


class EncodeQueue:
    def __init__(self, cache: EncoderCacheManager, max_rows_per_step: int) -> None:
        self._cache = cache
        self._max_rows_per_step = max_rows_per_step
        self._jobs: dict[str, EncodeJob] = {}  # by key, in order of arrival

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, spec: EncodeSpec, now: float) -> bool:
        """Join or start the key's job; True if its bytes must be prepared."""
        job = self._jobs.get(spec.key)
        is_new = job is None
        if job is None:
            job = self._jobs[spec.key] = EncodeJob(spec)
        job.callers[spec.encode_id] = (spec, now)
        return is_new

    def prepared(self, key: str, inputs: object, preprocess_s: float) -> None:
        """Ignored if everybody has left meanwhile."""
        job = self._jobs.get(key)
        if job is not None and job.state == EncodeState.PREPARING:
            job.inputs, job.preprocess_s, job.state = inputs, preprocess_s, EncodeState.READY

    def abort(self, encode_id: str) -> None:
        for job in list(self._jobs.values()):
            if job.callers.pop(encode_id, None) is not None and not job.callers and job.state != EncodeState.ENCODING:
                del self._jobs[job.spec.key]

    def schedule(self, now: float, rank_of: Callable[[str], Rank]) -> list[EncodeInput]:
        """Start ready jobs within the row budget and the cache's space; an item over the budget goes alone.

        `rank_of(key)` is that of the first request here which waits for the item, or LAST: those in line here come first, so that what they hold
        cannot keep their own next item out; the others follow in order of arrival.
        """
        inputs: list[EncodeInput] = []
        budget = self._max_rows_per_step
        # What is known to the cache is on its way in from a peer: the job ends with the load, or goes on if that fails.
        ready = [
            (rank_of(key), job)
            for key, job in self._jobs.items()
            if job.state == EncodeState.READY and not self._cache.is_known(key)
        ]
        for rank, job in sorted(ready, key=lambda each: each[0]):
            spec = job.spec
            if inputs and spec.num_rows > budget:
                break
            pages = self._cache.allocate(spec.key, spec.num_rows, rank)
            if pages is None:
                break
            job.state, job.started_at = EncodeState.ENCODING, now
            inputs.append(EncodeInput(spec.key, spec.modality, spec.num_rows, spec.grid, pages, job.inputs))
            budget -= spec.num_rows
        return inputs

    def needs_ticket(self, key: str) -> bool:
        return self._jobs[key].needs_ticket

    def take(self, key: str) -> EncodeJob | None:
        """The job is over, well or not: forget it."""
        return self._jobs.pop(key, None)

    def check_invariants(self) -> None:
        for job in self._jobs.values():
            assert job.callers or job.state == EncodeState.ENCODING, "an encode is queued for nobody"
            assert not self._cache.is_resident(job.spec.key), "an item is to be encoded again while it is here"
            assert job.state != EncodeState.ENCODING or self._cache.is_known(job.spec.key), "an encode has no pages"
