"""`EncodeScheduler`: calls to encode an item, from admission to the one terminal event of each.

What is resident already is answered at once, or, if a ticket is wanted, by the next step, which publishes it again: an earlier ticket may
have outlived what the data plane keeps under it.
"""

from dataclasses import dataclass

from triptych.engine.ec_connector import ECConnectorScheduler
from triptych.engine.encode_queue import EncodeQueue, EncodeSpec
from triptych.engine.encoder_cache_manager import EncoderCacheManager
from triptych.engine.events import Encoded, EncodeEvent, EncodeFailed, PreparationNeeded, StageTimings
from triptych.errors import FailureReason
from triptych.output import ECTicket, EncodeInput, ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class PlannedEncodes:
    inputs: tuple[EncodeInput, ...] = ()
    saves: tuple[str, ...] = ()
    republish: tuple[str, ...] = ()


class EncodeScheduler:
    def __init__(self, cache: EncoderCacheManager, ec: ECConnectorScheduler, max_rows_per_step: int) -> None:
        self._cache = cache
        self._ec = ec
        self._queue = EncodeQueue(cache, max_rows_per_step)
        self._awaiting_ticket: dict[str, list[EncodeSpec]] = {}  # resident items that the next step publishes

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def add(self, spec: EncodeSpec, now: float) -> list[EncodeEvent | PreparationNeeded]:
        if self._cache.is_resident(spec.key):
            return self._answer_resident(spec)
        if self._queue.submit(spec, now):
            return [PreparationNeeded(spec.key)]
        return []

    def prepared(self, key: str, inputs: object, preprocess_s: float) -> None:
        self._queue.prepared(key, inputs, preprocess_s)

    def fail(self, key: str, message: str, reason: FailureReason) -> list[EncodeEvent]:
        """The item could not be prepared or encoded: everybody who waits for it hears so."""
        job = self._queue.take(key)
        callers = job.callers if job is not None else ()
        return [EncodeFailed(encode_id, key, message, reason) for encode_id in callers]

    def abort(self, encode_id: str) -> None:
        self._queue.abort(encode_id)
        for key, specs in list(self._awaiting_ticket.items()):
            remaining = [spec for spec in specs if spec.encode_id != encode_id]
            self._cache.unpin(key, _ticket_holder(encode_id))
            if remaining:
                self._awaiting_ticket[key] = remaining
            else:
                del self._awaiting_ticket[key]

    def schedule(self, now: float) -> PlannedEncodes:
        inputs = self._queue.schedule(now, self._ec.rank_of)
        saves = [each.key for each in inputs if self._ec.is_producer and self._queue.needs_ticket(each.key)]
        return PlannedEncodes(tuple(inputs), tuple(saves), tuple(self._awaiting_ticket))

    def update(
        self, planned: tuple[EncodeInput, ...], result: ModelRunnerOutput, now: float
    ) -> tuple[list[EncodeEvent], list[str]]:
        """Events, and the keys that are resident now."""
        published = result.ec_connector_output.published if result.ec_connector_output is not None else {}
        events: list[EncodeEvent] = []
        resident: list[str] = []
        for each in planned:
            message = result.failed_encodes.get(each.key)
            if message is not None:
                self._cache.discard(each.key)
                events += self.fail(each.key, message, FailureReason.INTERNAL)
                continue
            self._cache.mark_resident(each.key)
            resident.append(each.key)
            events += self._finish(each.key, published.get(each.key), result.encode_s)
        events += self._answer_published(published)
        return events, resident

    def came_from_peer(self, key: str) -> list[EncodeEvent | PreparationNeeded]:
        """A load has brought the item: who waits here for its encode is answered with it."""
        job = self._queue.take(key)
        specs = [spec for spec, _ in job.callers.values()] if job is not None else []
        return [event for spec in specs for event in self._answer_resident(spec)]

    def _answer_resident(self, spec: EncodeSpec) -> list[EncodeEvent | PreparationNeeded]:
        if spec.will_stay or not self._ec.is_producer:
            self._cache.touch(spec.key)
            return [Encoded(spec.encode_id, spec.key, None, was_cached=True, timings=StageTimings())]
        self._cache.pin(spec.key, _ticket_holder(spec.encode_id))
        self._awaiting_ticket.setdefault(spec.key, []).append(spec)
        return []

    def _finish(self, key: str, ticket: ECTicket | None, encode_s: float) -> list[EncodeEvent]:
        job = self._queue.take(key)
        assert job is not None, "an encode ran that was not queued"
        events: list[EncodeEvent] = []
        for spec, arrived_at in job.callers.values():
            if not spec.will_stay and self._ec.is_producer and ticket is None:
                events.append(
                    EncodeFailed(spec.encode_id, key, "the item was encoded but not published.", FailureReason.INTERNAL)
                )
                continue
            given = None if spec.will_stay else ticket
            if given is not None:
                self._ec.lease(spec.encode_id, given)
            queue_s = max(0.0, job.started_at - arrived_at - job.preprocess_s)
            timings = StageTimings(preprocess_s=job.preprocess_s, encode_queue_s=queue_s, encode_s=encode_s)
            events.append(Encoded(spec.encode_id, key, given, was_cached=False, timings=timings))
        return events

    def _answer_published(self, published: dict[str, ECTicket]) -> list[EncodeEvent]:
        events: list[EncodeEvent] = []
        for key, specs in self._awaiting_ticket.items():
            ticket = published.get(key)
            for spec in specs:
                self._cache.unpin(key, _ticket_holder(spec.encode_id))
                if ticket is None:
                    message = "the item is here but was not published."
                    events.append(EncodeFailed(spec.encode_id, key, message, FailureReason.INTERNAL))
                else:
                    self._ec.lease(spec.encode_id, ticket)
                    events.append(Encoded(spec.encode_id, key, ticket, was_cached=True, timings=StageTimings()))
        self._awaiting_ticket.clear()
        return events

    def check_invariants(self) -> None:
        self._queue.check_invariants()


def _ticket_holder(encode_id: str) -> str:
    return f"ticket:{encode_id}"
