"""`EncodeQueue`: the items that this worker's tower is asked for.

               submit             prepared          pages, row budget         the step ends
    absent -----------> PREPARING ---------> READY ------------------> ENCODING -------------> absent
                            | cannot be prepared, or nobody waits any more, or the deadline
                            +-------------------+------------------------------------------> absent

PREPARING: its bytes become tower inputs, beside the engine thread. READY: it waits for room in the encoder cache, for its turn, or for a load that
brings the item from a peer. ENCODING lasts one step, and ends with it whatever happens.

One job per key, however many ask for it: later ones join. A job goes on until the last who asked has left. Its deadline is the first caller's,
so that a preparation that hangs is not handed on from caller to caller for ever.
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


LEGAL_ENCODE_CHANGES = {
    EncodeState.PREPARING: {EncodeState.READY},
    EncodeState.READY: {EncodeState.ENCODING},
    EncodeState.ENCODING: set[EncodeState](),
}


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
    deadline: float
    # encode id -> (spec, arrival)
    callers: dict[str, tuple[EncodeSpec, float]] = field(default_factory=dict[str, tuple[EncodeSpec, float]])
    state: EncodeState = EncodeState.PREPARING
    inputs: object = None
    preprocess_s: float = 0.0
    started_at: float = 0.0

    def change_state(self, state: EncodeState) -> None:
        assert state in LEGAL_ENCODE_CHANGES[self.state], f"encode of {self.spec.key[:12]}: {self.state} -> {state}"
        self.state = state

    @property
    def needs_ticket(self) -> bool:
        return any(not spec.will_stay for spec, _ in self.callers.values())


class EncodeQueue:
    def __init__(self, cache: EncoderCacheManager, max_rows_per_step: int, timeout_s: float) -> None:
        self._cache = cache
        self._max_rows_per_step = max_rows_per_step
        self._timeout_s = timeout_s
        self._jobs: dict[str, EncodeJob] = {}  # by key, in order of arrival

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: str) -> EncodeJob | None:
        return self._jobs.get(key)

    def submit(self, spec: EncodeSpec, now: float) -> bool:
        """Join or start the key's job; True if its bytes must be prepared."""
        job = self._jobs.get(spec.key)
        is_new = job is None
        if job is None:
            job = self._jobs[spec.key] = EncodeJob(spec, now + self._timeout_s)
        job.callers[spec.encode_id] = (spec, now)
        return is_new

    def prepared(self, key: str, inputs: object, preprocess_s: float) -> None:
        """Ignored if everybody has left meanwhile."""
        job = self._jobs.get(key)
        if job is not None and job.state == EncodeState.PREPARING:
            job.inputs, job.preprocess_s = inputs, preprocess_s
            job.change_state(EncodeState.READY)

    def leave(self, encode_id: str) -> list[str]:
        """The keys of the jobs that it waited for: one, unless the id was used twice."""
        left = [job for job in self._jobs.values() if job.callers.pop(encode_id, None) is not None]
        for job in left:
            if not job.callers and job.state != EncodeState.ENCODING:
                del self._jobs[job.spec.key]
        return [job.spec.key for job in left]

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
            job.change_state(EncodeState.ENCODING)
            job.started_at = now
            inputs.append(EncodeInput(spec.key, spec.modality, spec.num_rows, spec.grid, pages, job.inputs))
            budget -= spec.num_rows
        return inputs

    def expired(self, now: float) -> list[EncodeJob]:
        """The jobs whose time is up before their step has come. The caller takes them."""
        return [job for job in self._jobs.values() if job.state != EncodeState.ENCODING and job.deadline <= now]

    def next_deadline(self) -> float | None:
        return min((job.deadline for job in self._jobs.values() if job.state != EncodeState.ENCODING), default=None)

    def take(self, key: str) -> EncodeJob | None:
        """The job is over, well or not: forget it."""
        return self._jobs.pop(key, None)

    def keys_encoding(self) -> set[str]:
        return {key for key, job in self._jobs.items() if job.state == EncodeState.ENCODING}

    def check_invariants(self) -> None:
        for job in self._jobs.values():
            assert job.callers or job.state == EncodeState.ENCODING, "an encode is queued for nobody"
            assert not self._cache.is_resident(job.spec.key), "an item is to be encoded again while it is here"
            assert job.state != EncodeState.ENCODING or self._cache.is_known(job.spec.key), "an encode has no pages"
