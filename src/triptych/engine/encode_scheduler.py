"""`EncodeScheduler`: calls to encode an item, from admission to the one terminal event of each.

What is resident already is answered at once, or, if a ticket is wanted, by the next step, which publishes it again (producer_item.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

from triptych.engine.encode_queue import EncodeJob, EncodeQueue, EncodeSpec, EncodeState
from triptych.engine.encoder_cache_manager import EncoderCacheManager, Rank
from triptych.engine.events import Encoded, EncodeEvent, EncodeFailed, PreparationNeeded, StageTimings
from triptych.engine.producer_item import ProducerItems
from triptych.errors import FailureReason
from triptych.output import (
    NO_EC_OUTPUT,
    ECConnectorMetadata,
    ECConnectorOutput,
    EncodeInput,
    ModelRunnerOutput,
    SchedulerOutput,
)


@dataclass(frozen=True, slots=True)
class PlannedEncodes:
    inputs: tuple[EncodeInput, ...] = ()
    saves: tuple[str, ...] = ()
    republish: tuple[str, ...] = ()


class EncodeScheduler:
    """`gives_tickets`: peers may take items from this worker; else every item stays."""

    def __init__(
        self, cache: EncoderCacheManager, kept: ProducerItems, gives_tickets: bool, max_rows_per_step: int, timeout_s: float
    ) -> None:
        self._cache = cache
        self._kept = kept
        self._gives_tickets = gives_tickets
        self._timeout_s = timeout_s
        self._queue = EncodeQueue(cache, max_rows_per_step, timeout_s)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def add(self, spec: EncodeSpec, now: float) -> list[EncodeEvent | PreparationNeeded]:
        if self._cache.is_resident(spec.key):
            return self._answer_resident(spec)
        job = self._queue.get(spec.key)
        if job is not None and job.spec.num_rows != spec.num_rows:
            return [_misfit(spec)]
        if self._queue.submit(spec, now):
            return [PreparationNeeded(spec.key)]
        return []

    def prepared(self, key: str, inputs: object, preprocess_s: float) -> None:
        self._queue.prepared(key, inputs, preprocess_s)

    def preparation_failed(self, key: str, message: str, reason: FailureReason) -> list[EncodeEvent]:
        """Ignored, like inputs, unless they are waited for: an earlier preparation of the item may have been given up."""
        job = self._queue.get(key)
        return self._fail(key, message, reason) if job is not None and job.state == EncodeState.PREPARING else []

    def abort(self, encode_id: str) -> None:
        """The caller has left: it gets no answer, and holds nothing any more."""
        self._queue.leave(encode_id)
        self._kept.leave(encode_id)

    def release(self, encode_id: str) -> list[EncodeEvent]:
        """The caller needs no ticket any more. Said before there was one, it ends the call: a lease granted later would be nobody's."""
        asked = self._kept.leave(encode_id)
        keys = [*self._queue.leave(encode_id), *([] if asked is None else [asked])]
        message = "the ticket was released before it was made."
        return [EncodeFailed(encode_id, key, message, FailureReason.MISSING) for key in keys]

    def expire(self, now: float) -> list[EncodeEvent]:
        """Leases that have lapsed, and calls whose time is up."""
        self._kept.expire()
        expired = [(job.spec.key, _late_message(job, self._timeout_s)) for job in self._queue.expired(now)]
        return [event for key, message in expired for event in self._fail(key, message, FailureReason.TIMEOUT)]

    def next_deadline(self) -> float | None:
        return self._queue.next_deadline()

    def schedule(self, now: float, rank_of: Callable[[str], Rank]) -> PlannedEncodes:
        inputs = self._queue.schedule(now, rank_of)
        jobs = [self._queue.get(each.key) for each in inputs]
        saves = [job.spec.key for job in jobs if job is not None and job.needs_ticket and self._gives_tickets]
        return PlannedEncodes(tuple(inputs), tuple(saves), self._kept.asked())

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> tuple[list[EncodeEvent], list[str]]:
        """Events, and the keys that are resident now."""
        ec_output = result.ec_connector_output or NO_EC_OUTPUT
        metadata = output.ec_connector_metadata
        events: list[EncodeEvent] = []
        resident: list[str] = []
        for each in output.encodes:
            message = result.failed_encodes.get(each.key)
            if message is not None:
                self._cache.discard(each.key)
                events += self._fail(each.key, message, FailureReason.INTERNAL)
                continue
            self._cache.mark_resident(each.key)
            resident.append(each.key)
            events += self._finish(each.key, metadata, ec_output, result.encode_s)
        for key in metadata.republish:
            events += [
                self._answer(encode_id, key, ec_output, True, StageTimings()) for encode_id in self._kept.take_callers(key)
            ]
        return events, resident

    def came_from_peer(self, key: str) -> list[EncodeEvent | PreparationNeeded]:
        """A load has brought the item: who waits here for its encode is answered with it."""
        job = self._queue.take(key)
        specs = [spec for spec, _ in job.callers.values()] if job is not None else []
        return [event for spec in specs for event in self._answer_resident(spec)]

    def _fail(self, key: str, message: str, reason: FailureReason) -> list[EncodeEvent]:
        """The item cannot be had from here: everybody who waits for it hears so."""
        job = self._queue.take(key)
        callers = job.callers if job is not None else ()
        return [EncodeFailed(encode_id, key, message, reason) for encode_id in callers]

    def _answer_resident(self, spec: EncodeSpec) -> list[EncodeEvent | PreparationNeeded]:
        if not self._cache.holds(spec.key, spec.num_rows):
            return [_misfit(spec)]
        if spec.will_stay or not self._gives_tickets:
            self._cache.touch(spec.key)
            return [Encoded(spec.encode_id, spec.key, None, was_cached=True, timings=StageTimings())]
        self._kept.ask(spec.key, spec.encode_id)
        return []

    def _finish(
        self, key: str, metadata: ECConnectorMetadata, ec_output: ECConnectorOutput, encode_s: float
    ) -> list[EncodeEvent]:
        job = self._queue.take(key)
        assert job is not None, "an encode ran that was not queued"
        events: list[EncodeEvent] = []
        for spec, arrived_at in job.callers.values():
            queue_s = max(0.0, job.started_at - arrived_at - job.preprocess_s)
            timings = StageTimings(preprocess_s=job.preprocess_s, encode_queue_s=queue_s, encode_s=encode_s)
            if spec.will_stay or not self._gives_tickets:
                events.append(Encoded(spec.encode_id, key, None, was_cached=False, timings=timings))
            elif key in metadata.saves:
                events.append(self._answer(spec.encode_id, key, ec_output, False, timings))
            else:
                self._kept.ask(key, spec.encode_id)  # joined after the step was planned
        return events

    def _answer(
        self, encode_id: str, key: str, ec_output: ECConnectorOutput, was_cached: bool, timings: StageTimings
    ) -> EncodeEvent:
        """With the ticket that the step made, under a lease; or with why it made none."""
        ticket = ec_output.published.get(key)
        if ticket is None:
            reason = ec_output.failed_saves.get(key, FailureReason.INTERNAL)
            return EncodeFailed(encode_id, key, f"the item is here but was not published ({reason}).", reason)
        self._kept.lease(key, encode_id)
        return Encoded(encode_id, key, ticket, was_cached=was_cached, timings=timings)

    def keys_encoding(self) -> set[str]:
        return self._queue.keys_encoding()

    def check_invariants(self) -> None:
        self._queue.check_invariants()


def _misfit(spec: EncodeSpec) -> EncodeFailed:
    message = f"the item is known here with another number of rows than {spec.num_rows}."
    return EncodeFailed(spec.encode_id, spec.key, message, FailureReason.MISMATCH)


def _late_message(job: EncodeJob, timeout_s: float) -> str:
    waited_for = "its preparation" if job.state == EncodeState.PREPARING else "a step with room in the encoder cache"
    return f"the item was not encoded within {timeout_s:g} s; it waited for {waited_for}."
