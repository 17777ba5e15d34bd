"""Where a request's time went: each answer's `timing`, in milliseconds, whose parts sum to the time that the router measured;
and how often something had to be done again.

Durations only: a worker reports how long it took (`StageTimings`), the router how long the whole took by its own clock, and two
clocks are never compared. Stages that ran beside each other are counted along the critical path: of an encode, only what prefill
had to wait for.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from triptych.engine.events import StageTimings

NO_TIMINGS = StageTimings()
STAGES: tuple[str, ...] = (
    "preprocess", "encode_queue", "encode", "ec_transfer", "prefill_queue", "prefill", "kv_transfer", "decode",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds, and counts. `router` is the rest: HTTP, rendering, detokenising, and workers that died before they could report."""

    preprocess: float = 0.0
    encode_queue: float = 0.0
    encode: float = 0.0
    ec_transfer: float = 0.0
    prefill_queue: float = 0.0
    prefill: float = 0.0
    kv_transfer: float = 0.0
    decode: float = 0.0
    router: float = 0.0
    encode_retries: int = 0  # items of this request that were encoded again
    replays: int = 0  # times that it was prefilled again

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class EncodeTimes:
    """`is_local`: at the worker that prefills, whose one engine thread runs tower and language model in turn. `transfer_s`: from
    the encode's answer to its delivery, as the router saw it."""

    timings: StageTimings = NO_TIMINGS
    is_local: bool = False
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.timings.preprocess_s + self.timings.encode_queue_s + self.timings.encode_s


@dataclass(slots=True)
class Stay:
    """A request's time at one prefill or decode worker. Instants are the router's. `encodes` in the order in which they answered."""

    is_prefill: bool
    started_at: float
    first_token_at: float | None = None
    ended_at: float | None = None
    reported: StageTimings | None = None
    encodes: list[EncodeTimes] = field(default_factory=list[EncodeTimes])

    def timings(self, now: float) -> StageTimings:
        """The worker's own report; without one (it died, or a stop string ended the request) what the router saw."""
        if self.reported is not None:
            return self.reported
        elapsed = (self.ended_at if self.ended_at is not None else now) - self.started_at
        if not self.is_prefill:
            return StageTimings(decode_s=elapsed)
        to_first = self.first_token_at - self.started_at if self.first_token_at is not None else elapsed
        waited = min(to_first, self.critical_encode.total_s)
        return StageTimings(ec_wait_s=waited, prefill_s=to_first - waited, decode_s=elapsed - to_first)

    @property
    def critical_encode(self) -> EncodeTimes:
        """Prefill ends no sooner than its last item arrives."""
        return self.encodes[-1] if self.encodes else EncodeTimes()


class Stopwatch:
    """Of one request, from its arrival. The loop's own clock will not do: uvloop's counts whole milliseconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started_at = clock()
        self._first_token_at: float | None = None
        self._stays: list[Stay] = []
        self.num_encode_retries = 0
        self.num_replays = 0

    def fork(self) -> "Stopwatch":
        """For another answer to the same request."""
        other = Stopwatch(self._clock)
        other._started_at = self._started_at
        return other

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_at

    @property
    def to_first_token_s(self) -> float | None:
        return None if self._first_token_at is None else self._first_token_at - self._started_at

    def begin(self, *, is_prefill: bool) -> Stay:
        self._stays.append(Stay(is_prefill, self._clock()))
        return self._stays[-1]

    def end(self, stay: Stay) -> None:
        stay.ended_at = self._clock()

    def add_encode(self, encode: EncodeTimes) -> None:
        """An encode for the present stay was answered and delivered."""
        if self._stays:
            self._stays[-1].encodes.append(encode)

    def see_token(self) -> None:
        now = self._clock()
        if self._first_token_at is None:
            self._first_token_at = now
        if self._stays[-1].first_token_at is None:
            self._stays[-1].first_token_at = now

    def timing(self) -> Timing:
        """From arrival to now."""
        now = self._clock()
        stays = [(stay.timings(now), stay.critical_encode) for stay in self._stays]
        return break_down(now - self._started_at, stays, encode_retries=self.num_encode_retries, replays=self.num_replays)


def break_down(
    total_s: float, stays: Iterable[tuple[StageTimings, EncodeTimes]], *, encode_retries: int = 0, replays: int = 0
) -> Timing:
    """`stays` has a worker's timings and its last item's encode, in order. Parts that exceed the total (they were rounded, or
    a clock ran fast) are cut from the end, so that `router` is never negative."""
    sums = dict.fromkeys(STAGES, 0.0)
    for timings, encode in stays:
        for name, seconds in _split(timings, encode).items():
            sums[name] += seconds
    left = total_s
    for name, seconds in sums.items():
        sums[name] = min(max(seconds, 0.0), left)
        left -= sums[name]
    parts = {name: round(seconds * 1000, 3) for name, seconds in sums.items()}
    router = max(0.0, round(total_s * 1000 - sum(parts.values()), 3))
    return Timing(**parts, router=router, encode_retries=encode_retries, replays=replays)


def _split(timings: StageTimings, encode: EncodeTimes) -> dict[str, float]:
    """The wait for an item ended when it arrived, so it is filled from its end: first the transfer, then the encode. An encode longer than
    what is left began while prefill was busy with what stood before the item: as prefill had to wait all the same, that time is the
    encode's and not prefill's. What began still earlier was before the request came, and is cut. What neither explains is transfer, too.
    But where the tower ran in a step that prefilled this request, its time is part of `prefill_s` and not of the wait."""
    is_in_prefill = encode.is_local and timings.ec_wait_s < encode.total_s
    in_prefill_s = min(encode.timings.encode_s, timings.prefill_s) if is_in_prefill else 0.0
    waited_for_s = encode.total_s - in_prefill_s
    transfer_s = 0.0 if encode.is_local else min(timings.ec_wait_s, encode.transfer_s + timings.ec_load_s)
    hidden_s = max(0.0, waited_for_s - (timings.ec_wait_s - transfer_s))
    has_waited = timings.ec_wait_s > 0 and not encode.is_local
    overlap_s = min(hidden_s, timings.prefill_before_wait_s) if has_waited else 0.0
    hidden_s -= overlap_s
    preprocess_s, hidden_s = _cut(encode.timings.preprocess_s, hidden_s)
    encode_queue_s, hidden_s = _cut(encode.timings.encode_queue_s, hidden_s)
    return {
        "preprocess": preprocess_s,
        "encode_queue": encode_queue_s,
        "encode": encode.timings.encode_s - hidden_s,
        "ec_transfer": max(transfer_s, timings.ec_wait_s - waited_for_s),
        "prefill_queue": timings.prefill_queue_s,
        "prefill": timings.prefill_s - in_prefill_s - overlap_s,
        "kv_transfer": timings.kv_transfer_s,
        "decode": timings.decode_queue_s + timings.decode_s,
    }


def _cut(seconds: float, by: float) -> tuple[float, float]:
    """What is left of `seconds`, and what is still to be cut."""
    cut = min(seconds, by)
    return seconds - cut, by - cut
