"""`MediaFeed`: gets a request's items to the prefill worker where the request is.

    an item:  wanted -> encoding -> has a ticket, or is there -> delivered -> loaded: the ticket is let go
                 ^          |                                       |
                 |          +-> covered by a prefix that the worker has kept: called off
                 |          +-> faulty: at most twice again         |
                 +--------------------------- needed again ---------+
                            +-> failed: the worker is told, and fails the request if it cannot do without

The encode outlives the stay at a prefill worker: when the request moves to another one, its tickets go with it, and those that are still
to come follow. Only an item that was to stay at the old worker is encoded again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from triptych.config import Stage
from triptych.engine.events import Encoded, StageTimings
from triptych.errors import (
    FailureReason,
    InternalError,
    MediaError,
    OverloadedError,
    RequestError,
    TriptychError,
    UnavailableError,
    WorkerLostError,
)
from triptych.media.item import item_name
from triptych.output import ECTicket
from triptych.router.metrics import RouterMetrics
from triptych.router.placement import Backoff, Placement
from triptych.router.pool import PooledWorker
from triptych.router.releases import TicketLease
from triptych.router.running_request import RunningRequest
from triptych.router.shared_encodes import Flight, ItemToEncode, SharedEncodes
from triptych.router.timing import EncodeTimes
from triptych.worker.protocol import ECDelivery

logger = logging.getLogger(__name__)

MAX_ENCODES = 3  # of one item for one request
PAUSE_S = 0.5  # before a worker that failed an item is asked for it again, for want of another


@dataclass(slots=True)
class FedItem:
    """`name` is the client's word for it; empty for the only one. `waits_for`, in words, is for the sentence of a deadline."""

    job: ItemToEncode
    name: str
    end: int  # one past its last placeholder, in the last place where it stands
    num_faults: int = 0
    was_encoded: bool = False
    avoid: set[str] = field(default_factory=set[str])  # encode workers that failed it
    ticket: ECTicket | None = None
    lease: TicketLease | None = None  # as long as there is a ticket
    error: TriptychError | None = None
    task: asyncio.Task[None] | None = None  # has it encoded
    stays_at: PooledWorker | None = None  # what the task waits for is of no use elsewhere
    waits_for: str = ""

    @property
    def key(self) -> str:
        return self.job.item.key

    @property
    def is_under_way(self) -> bool:
        return self.task is not None and not self.task.done()

    def let_go(self) -> None:
        """Of the ticket."""
        if self.lease is not None:
            self.lease.let_go()
        self.ticket = self.lease = None

    def call_off(self) -> None:
        self.let_go()
        if self.task is not None:
            self.task.cancel()
            self.task = None


@dataclass(slots=True)
class PrefillCall:
    """The present call to a prefill worker, and what it was told."""

    worker: PooledWorker
    id: str
    num_tokens_hinted: int  # the prefix that the worker has probably kept
    num_tokens_hit: int = 0  # by its own word
    is_read: bool = False
    told: dict[str, ECDelivery] = field(default_factory=dict[str, ECDelivery])  # by key
    told_twice: set[str] = field(default_factory=set[str])
    deliveries: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


class MediaFeed:
    """One per request."""

    def __init__(self, request: RunningRequest, encodes: SharedEncodes, placement: Placement, metrics: RouterMetrics) -> None:
        self._request = request
        self._encodes = encodes
        self._placement = placement
        self._metrics = metrics
        self._items = _make_items(request)
        self._call: PrefillCall | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the items', also of those that were let go

    @property
    def tickets(self) -> tuple[ECTicket, ...]:
        """Those that can still be read."""
        held = [(item.ticket, item.lease) for item in self._items.values()]
        return tuple(ticket for ticket, lease in held if ticket is not None and lease is not None and lease.is_good)

    @property
    def error(self) -> TriptychError | None:
        """Why an item could not be had: more precise than what the prefill worker made of it."""
        return next((item.error for item in self._items.values() if item.error is not None), None)

    @property
    def waits_for(self) -> str:
        """What is still to come, in words."""
        return ", ".join(f"item {item.key[:12]} from {item.waits_for}" for item in self._items.values() if item.is_under_way)

    # --- the request's stay at a prefill worker

    @asynccontextmanager
    async def at(self, prefill: PooledWorker, call_id: str, *, is_eager: bool) -> AsyncGenerator[None]:
        """While inside, items go to `prefill`. If `is_eager`, what nobody is known to have is encoded without being asked for."""
        num_held = self._placement.num_tokens_held(prefill, self._request)
        if num_held:
            self._metrics.prefix_hints.inc()
            self._metrics.prefix_hint_tokens.inc(num_held)
        call = self._call = PrefillCall(prefill, call_id, num_held)
        for item in self._items.values():
            self._supply(item, call, is_eager=is_eager)
        try:
            yield
        finally:
            self._call = None
            if call.is_read:
                self._placement.remember_prefix(prefill, self._request)  # with the tokens since the first
            stays = [item.task for item in self._items.values() if item.task is not None and item.stays_at is prefill]
            await _end([*call.deliveries, *stays])

    def _supply(self, item: FedItem, call: PrefillCall, *, is_eager: bool) -> None:
        """At the start of a stay: tickets have gone with the request."""
        reason: FailureReason | None = None
        if item.lease is not None and not item.lease.is_good:
            item.let_go()
            reason = FailureReason.PEER_LOST
        if item.ticket is not None or item.is_under_way:
            return
        if item.error is not None:
            self._tell(call, _failure(call, item))
        elif item.end <= call.num_tokens_hinted or self._placement.probably_holds(call.worker, item.key):
            self._metrics.encodes.labels("saved").inc()
        elif is_eager:
            self._want(item, reason)

    def arrived(self, key: str, prefill: PooledWorker) -> None:
        """The worker has the rows now: the encode worker need not keep them for us."""
        item = self._items.get(key)
        if item is not None:
            item.let_go()
            self._placement.remember(prefill, key)

    def covered(self, num_tokens: int) -> None:
        """The prefill worker has kept this much of the prompt: it does not need the items before, unless it asks for them later."""
        call = self._call
        assert call is not None, "only a prefill worker keeps a prompt"
        call.num_tokens_hit = num_tokens
        for key, item in self._items.items():
            if item.end <= num_tokens:
                item.call_off()
                call.told.pop(key, None)

    def read_by(self, prefill: PooledWorker) -> None:
        """The prompt is computed, so that every item that was needed was there a moment ago. The answer of an encode that stays there is on
        its way, then."""
        call = self._call
        assert call is not None, "only a prefill worker reads"
        if not call.is_read:
            call.is_read = True
            self._placement.remember_prefix(prefill, self._request)
        for key, item in self._items.items():
            if item.end > call.num_tokens_hit:
                self._placement.remember(prefill, key)
            if item.stays_at is prefill:
                item.let_go()
            else:
                item.call_off()

    def call_off(self) -> None:
        """Nothing is needed any more, or not yet."""
        for item in self._items.values():
            item.call_off()

    async def close(self) -> None:
        self.call_off()
        await _end(self._tasks)

    def need(self, key: str, reason: FailureReason) -> None:
        """The prefill worker asks for an item. Raises what is wrong with the item when there is nothing left to try."""
        item, call = self._items.get(key), self._call
        assert call is not None, "only a prefill worker asks"
        if item is None:
            raise RequestError(f"the prefill worker asks for an item that this request has not got ({key[:12]}).")
        if item.is_under_way:
            return
        self._placement.forget(call.worker, key)
        if item.end <= call.num_tokens_hinted:
            self._placement.forget_prefix(call.worker, self._request, item.end - 1)
        told = call.told.get(key)
        if reason == FailureReason.MISSING and told is not None and key not in call.told_twice:
            # Question and answer have crossed on their way, or the answer came before the request: a second one does no harm.
            call.told_twice.add(key)
            self._tell(call, told)
            return
        if item.error is not None:
            raise item.error
        if item.ticket is not None:
            if reason == FailureReason.PEER_LOST:
                item.avoid.add(item.ticket.data.producer)
            item.let_go()
        if reason == FailureReason.EVICTED:
            item.num_faults = 0  # it had to make room, which may happen any number of times
        is_fault = item.was_encoded and reason != FailureReason.EVICTED
        item.num_faults += is_fault
        self._want(item, reason if is_fault else None)

    # --- an item

    def _want(self, item: FedItem, again_for: FailureReason | None) -> None:
        task = item.task = asyncio.create_task(self._get(item, again_for))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _get(self, item: FedItem, again_for: FailureReason | None) -> None:
        """Have the item encoded, and tell the prefill worker; or that it cannot be had."""
        try:
            encoded, is_local = await self._encode(item, again_for)
        except TriptychError as error:
            item.error = error
        except Exception as error:  # the edge of the item's task: a bug must not leave the request waiting
            logger.exception("item %s met a bug", item.key[:12])
            item.error = InternalError(f"the router failed: {type(error).__name__}.")
        else:
            if self._call is not None:
                delivery = ECDelivery(self._call.id, item.key, ticket=encoded.ticket)
                self._tell(self._call, delivery, encoded.timings, is_local=is_local)
            return
        if self._call is not None:
            self._tell(self._call, _failure(self._call, item))

    async def _encode(self, item: FedItem, again_for: FailureReason | None) -> tuple[Encoded, bool]:
        """One worker after another, until one has it; and whether that is the prefill worker itself. `again_for` is why it is not the first time."""
        backoff, failure = Backoff(self._placement, Stage.ENCODE), again_for or FailureReason.MISSING
        while item.num_faults < MAX_ENCODES:
            flight = await self._find_flight(item, backoff)
            if again_for is not None:
                self._count_retry(flight, again_for)
                again_for = None
            is_known = False
            try:
                event = await self._encodes.wait(flight, item.avoid)
            except OverloadedError as error:
                if not backoff.has_next(flight.worker, item.avoid):
                    item.waits_for = f"{flight.worker.id}, which is full"
                    await backoff.pause(error)
                continue
            except WorkerLostError:
                is_known = flight.worker.id in item.avoid  # the prefill worker, say, has seen it die before us
                failure = FailureReason.PEER_LOST
            except (InternalError, UnavailableError) as error:
                logger.warning("worker %s failed item %s: %s", flight.worker.id, item.key[:12], error)
                failure = FailureReason.INTERNAL
            else:
                if isinstance(event, Encoded):
                    item.was_encoded = True
                    if event.ticket is not None:
                        item.ticket, item.lease = event.ticket, flight.lease
                    return event, flight.will_stay
                failure = event.reason
                if not failure.is_retryable:
                    raise self._refused(item, event.message, failure)
            again_for = failure
            item.num_faults += not is_known
            item.avoid.add(flight.worker.id)
            if flight.worker.is_ready and not self._placement.has_choice(Stage.ENCODE, item.avoid):
                await asyncio.sleep(PAUSE_S)
        message = f"item {item.key[:12]} could not be had after {item.num_faults} attempts"
        raise UnavailableError(message, type="ec_unavailable", stage="encode", reason=failure)

    async def _find_flight(self, item: FedItem, backoff: Backoff) -> Flight:
        item.stays_at, item.waits_for = None, "an encode worker"

        def join() -> Flight:
            prefill = self._call.worker if self._call is not None else None
            return self._encodes.join(item.job, prefill, item.avoid | backoff.full)

        flight = await self._placement.when_there(join)
        item.stays_at, item.waits_for = flight.worker if flight.will_stay else None, flight.worker.id
        return flight

    def _count_retry(self, flight: Flight, reason: FailureReason) -> None:
        """In the request's timing each, in the metrics once for all who share the encode."""
        self._request.stopwatch.num_encode_retries += 1
        if flight.is_new:
            self._metrics.encode_retries.labels(reason).inc()

    def _refused(self, item: FedItem, message: str, reason: FailureReason) -> TriptychError:
        if reason == FailureReason.BAD_MEDIA:
            return MediaError(f"{item.name}: {message}" if item.name else message)
        return UnavailableError(message, type="ec_unavailable", stage="encode", reason=reason)

    # --- deliveries

    def _tell(
        self, call: PrefillCall, delivery: ECDelivery, timings: StageTimings | None = None, *, is_local: bool = False
    ) -> None:
        call.told[delivery.key] = delivery
        task = asyncio.create_task(self._deliver(call, delivery, timings, is_local))
        call.deliveries.add(task)
        task.add_done_callback(call.deliveries.discard)

    async def _deliver(self, call: PrefillCall, delivery: ECDelivery, timings: StageTimings | None, is_local: bool) -> None:
        answered_at = time.perf_counter()
        try:
            await call.worker.client.deliver(delivery)
        except WorkerLostError:
            return  # whoever reads the request's stream there learns of it
        except TriptychError as error:
            logger.error("worker %s refused the delivery of item %s: %s", call.worker.id, delivery.key[:12], error)
            if delivery.ticket is not None:
                self._give_up(self._items[delivery.key], call, error)
        if timings is not None:
            self._request.stopwatch.add_encode(EncodeTimes(timings, is_local, transfer_s=time.perf_counter() - answered_at))

    def _give_up(self, item: FedItem, call: PrefillCall, error: TriptychError) -> None:
        """The worker would refuse the next ticket as well: it need not wait for it."""
        message = f"worker {call.worker.id} refused the ticket of item {item.key[:12]}: {error}"
        item.error = UnavailableError(message, type="ec_unavailable", stage="prefill", reason=FailureReason.MISMATCH)
        item.let_go()
        self._tell(call, _failure(call, item))


def _make_items(request: RunningRequest) -> dict[str, FedItem]:
    """One for each key; the same picture again has the first one's name."""
    job, items = request.job, dict[str, FedItem]()
    total = len(job.items)
    ends = {item.key: item.end for item in job.items}
    for number, item in enumerate(job.items, 1):
        name = item_name(item.modality, number, total) if total > 1 else ""
        items.setdefault(item.key, FedItem(ItemToEncode(item, job.media[item.key]), name, ends[item.key]))
    return items


def _failure(call: PrefillCall, item: FedItem) -> ECDelivery:
    reason = FailureReason.BAD_MEDIA if isinstance(item.error, RequestError) else FailureReason.INTERNAL
    return ECDelivery(call.id, item.key, failure=reason, message=str(item.error))


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
