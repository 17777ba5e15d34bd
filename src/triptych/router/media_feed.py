"""`MediaFeed`: gets a request's items to the prefill worker where the request is.

    an item:  wanted -> encoding -> delivered (a ticket, or "it is there") -> loaded: the ticket is let go
                 ^          |             |                                     |
                 +-- needed: faulty, at most twice again --+-- needed: evicted -+
                            +-> failed: the worker is told, and fails the request if it cannot do without

A ticket that was not read yet goes with the request when it moves to another prefill worker.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from triptych.engine.events import Encoded
from triptych.errors import (
    FailureReason,
    MediaError,
    OverloadedError,
    RequestError,
    TriptychError,
    UnavailableError,
    WorkerLostError,
)
from triptych.output import ECTicket
from triptych.router.metrics import RouterMetrics
from triptych.router.placement import Placement
from triptych.router.pool import PooledWorker
from triptych.router.releases import TicketLease
from triptych.router.shared_encodes import ItemToEncode, SharedEncodes
from triptych.router.timing import EncodeTimes
from triptych.worker.protocol import ECDelivery

logger = logging.getLogger(__name__)

MAX_ENCODES = 3  # of one item for one request


@dataclass(slots=True)
class FedItem:
    job: ItemToEncode
    num_encodes: int = 0
    avoid: set[str] = field(default_factory=set[str])  # encode workers that failed it
    ticket: ECTicket | None = None
    lease: TicketLease | None = None  # as long as there is a ticket
    delivery: ECDelivery | None = None  # to the worker where the request is now
    was_redelivered: bool = False
    error: TriptychError | None = None
    task: asyncio.Task[None] | None = None

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


class MediaFeed:
    """One per request. `on_encoded` hears of each encode once its answer is delivered."""

    def __init__(
        self,
        jobs: dict[str, ItemToEncode],
        encodes: SharedEncodes,
        placement: Placement,
        metrics: RouterMetrics,
        on_encoded: Callable[[EncodeTimes], None],
    ) -> None:
        self._call_id = ""  # of the call to the prefill worker where the request is
        self._items = {key: FedItem(job) for key, job in jobs.items()}
        self._encodes = encodes
        self._placement = placement
        self._metrics = metrics
        self._on_encoded = on_encoded

    @property
    def tickets(self) -> tuple[ECTicket, ...]:
        return tuple(item.ticket for item in self._items.values() if item.ticket is not None)

    @property
    def error(self) -> TriptychError | None:
        """Why an item could not be had: more precise than what the prefill worker made of it."""
        return next((item.error for item in self._items.values() if item.error is not None), None)

    @asynccontextmanager
    async def at(self, prefill: PooledWorker, call_id: str) -> AsyncGenerator[None]:
        """While inside, items go to `prefill`. What nobody is known to have is encoded without being asked for."""
        self._call_id = call_id
        for item in self._items.values():
            item.delivery, item.was_redelivered = None, False
            if item.ticket is not None:
                continue
            if self._placement.probably_holds(prefill, item.key):
                self._metrics.encodes.labels("saved").inc()
            else:
                item.task = asyncio.create_task(self._supply(item, prefill))
        try:
            yield
        finally:
            tasks = [item.task for item in self._items.values() if item.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def let_go(self) -> None:
        """Whoever prefills has read the items, or nobody will: their tickets are not needed any more."""
        for item in self._items.values():
            item.let_go()

    def arrived(self, key: str, prefill: PooledWorker) -> None:
        """The worker has the rows now: the encode worker need not keep them for us."""
        item = self._items.get(key)
        if item is not None:
            item.let_go()
            self._placement.remember(prefill, key)

    def read_by(self, prefill: PooledWorker) -> None:
        """The prompt is computed, so that every item was there a moment ago."""
        for key in self._items:
            self._placement.remember(prefill, key)

    def need(self, key: str, reason: FailureReason, prefill: PooledWorker) -> None:
        """The worker asks for an item. Raises what is wrong with the item when there is nothing left to try."""
        item = self._items.get(key)
        if item is None:
            raise RequestError(f"the prefill worker asks for an item that this request has not got ({key[:12]}).")
        if item.is_under_way:
            return
        self._placement.forget(prefill, key)
        if reason == FailureReason.MISSING and item.delivery is not None and not item.was_redelivered:
            # Question and answer have crossed on their way, or the answer came before the request: a second one does no harm.
            item.was_redelivered = True
            item.task = asyncio.create_task(self._deliver(item, item.delivery, prefill))
            return
        if item.error is not None:
            raise item.error
        if item.ticket is not None:
            if reason == FailureReason.PEER_LOST:
                item.avoid.add(item.ticket.data.producer)
            item.let_go()
        if reason == FailureReason.EVICTED:
            item.num_encodes = 0  # no fault: it had to make room, which may happen any number of times
        item.task = asyncio.create_task(self._supply(item, prefill, reason))

    async def _supply(self, item: FedItem, prefill: PooledWorker, reason: FailureReason = FailureReason.MISSING) -> None:
        """Encode and deliver; or tell the worker that the item cannot be had."""
        try:
            if item.error is not None:
                raise item.error
            encoded, is_local = await self._encode(item, prefill, reason)
        except TriptychError as error:
            item.error = error
            failure = FailureReason.BAD_MEDIA if error.status < 500 else FailureReason.INTERNAL
            await self._deliver(item, ECDelivery(self._call_id, item.key, failure=failure, message=str(error)), prefill)
            return
        answered_at = time.perf_counter()
        await self._deliver(item, ECDelivery(self._call_id, item.key, ticket=encoded.ticket), prefill)
        self._on_encoded(EncodeTimes(encoded.timings, is_local, transfer_s=time.perf_counter() - answered_at))

    async def _encode(self, item: FedItem, prefill: PooledWorker, reason: FailureReason) -> tuple[Encoded, bool]:
        """One worker after another, until one has it, and whether that is the prefill worker itself. `reason` is why it is wanted."""
        while item.num_encodes < MAX_ENCODES:
            flight = self._encodes.join(item.job, prefill, item.avoid)
            if item.num_encodes:
                self._metrics.encode_retries.labels(reason).inc()
            item.num_encodes += 1
            try:
                event = await self._encodes.wait(flight)
            except WorkerLostError:
                reason = FailureReason.PEER_LOST
            except OverloadedError:
                if item.num_encodes == MAX_ENCODES:
                    raise
                reason = FailureReason.TIMEOUT
            else:
                if isinstance(event, Encoded):
                    if event.ticket is not None:
                        item.ticket, item.lease = event.ticket, flight.lease
                    return event, flight.worker is prefill
                reason = event.reason
                if not reason.is_retryable:
                    raise self._refused(event.message, reason)
            item.avoid.add(flight.worker.id)
        raise self._unavailable(item, reason)

    async def _deliver(self, item: FedItem, delivery: ECDelivery, prefill: PooledWorker) -> None:
        item.delivery = delivery
        try:
            await prefill.client.deliver(delivery)
        except WorkerLostError:
            pass  # whoever reads the request's stream there learns of it
        except TriptychError as error:
            # The worker's own wait for the item has a deadline, which ends the request.
            logger.error("worker %s refused the delivery of item %s: %s", prefill.id, item.key[:12], error)

    def _refused(self, message: str, reason: FailureReason) -> TriptychError:
        if reason == FailureReason.BAD_MEDIA:
            return MediaError(message)
        return UnavailableError(message, type="ec_unavailable", stage="encode", reason=reason)

    def _unavailable(self, item: FedItem, reason: FailureReason) -> UnavailableError:
        message = f"item {item.key[:12]} could not be had after {item.num_encodes} encodes"
        return UnavailableError(message, type="ec_unavailable", stage="encode", reason=reason)
