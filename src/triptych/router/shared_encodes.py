"""`SharedEncodes`: encodes under way, each shared by all requests that wait for the same item. Its life:

started by the first who wants it -> joined by others -> answered to all -> ticket released when the last has read it
                 +-> the last waiter leaves -> aborted
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from uuid import uuid4

from triptych.config import Stage
from triptych.engine.events import Encoded, EncodeEvent, EncodeFailed
from triptych.errors import WorkerLostError
from triptych.media.item import MediaItem
from triptych.router.metrics import RouterMetrics
from triptych.router.placement import Placement
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.router.releases import Releases, TicketLease
from triptych.worker.protocol import EncodeRequest


@dataclass(frozen=True, slots=True)
class ItemToEncode:
    item: MediaItem
    media: bytes


@dataclass(slots=True)
class Flight:
    """One encode at one worker. An item that stays where it is encoded is of no use to another prefill worker."""

    name: tuple[str, str]  # the item's key, and the worker where it stays ("": a ticket for anybody)
    worker: PooledWorker
    lease: TicketLease
    task: asyncio.Task[EncodeEvent]
    num_waiters: int = 0


class SharedEncodes:
    def __init__(self, pool: WorkerPool, placement: Placement, releases: Releases, metrics: RouterMetrics) -> None:
        self._pool = pool
        self._placement = placement
        self._releases = releases
        self._metrics = metrics
        self._flights: dict[tuple[str, str], Flight] = {}

    @property
    def num_under_way(self) -> int:
        return len(self._flights)

    def join(self, job: ItemToEncode, prefill: PooledWorker, avoid: Collection[str]) -> Flight:
        """An encode whose answer is of use at `prefill`: one under way, or a new one. Raises `UnavailableError` without encode workers."""
        key = job.item.key
        for name in ((key, prefill.id), (key, "")):
            flight = self._flights.get(name)
            if flight is not None and flight.worker.id not in avoid:
                self._metrics.encodes.labels("shared").inc()
                return flight
        worker = self._encoding(key, avoid) or self._placement.pick_encode(job.item, prefill, avoid)
        num_rows = job.item.num_rows
        self._placement.begin(worker, Stage.ENCODE, num_rows)
        name = (key, prefill.id if worker is prefill else "")
        encode_id = f"enc-{uuid4().hex}"
        task = asyncio.create_task(self._encode(job, worker, encode_id, will_stay=worker is prefill))
        flight = Flight(name, worker, TicketLease(self._releases, worker, encode_id), task)
        task.add_done_callback(lambda _: self._placement.end(worker, Stage.ENCODE, num_rows))
        self._flights[name] = flight
        self._metrics.encodes.labels("started").inc()
        return flight

    def _encoding(self, key: str, avoid: Collection[str]) -> PooledWorker | None:
        """A worker that encodes the item for itself: a ticket for others costs it no second encode."""
        workers = [flight.worker for (other, _), flight in self._flights.items() if other == key]
        return next((worker for worker in workers if worker.is_ready and worker.id not in avoid), None)

    async def wait(self, flight: Flight) -> Encoded | EncodeFailed:
        """Raises `WorkerLostError`, or the worker's refusal. Cancelling leaves the flight, which ends with its last waiter.

        With a ticket, the caller is a holder of the flight's lease from here on.
        """
        flight.num_waiters += 1
        flight.lease.hold()
        has_ticket = False
        try:
            event = await asyncio.shield(flight.task)
            has_ticket = isinstance(event, Encoded) and event.ticket is not None
            if not has_ticket:
                flight.lease.void()
            return event
        finally:
            flight.num_waiters -= 1
            if not has_ticket:
                flight.lease.let_go()
            if not flight.num_waiters or flight.task.done():
                flight.task.cancel()
                if self._flights.get(flight.name) is flight:
                    del self._flights[flight.name]

    async def _encode(self, job: ItemToEncode, worker: PooledWorker, encode_id: str, *, will_stay: bool) -> EncodeEvent:
        item = job.item
        request = EncodeRequest(
            encode_id=encode_id,
            key=item.key,
            modality=item.modality,
            num_rows=item.num_rows,
            grid=item.grid,
            will_stay=will_stay,
        )
        try:
            async with worker.attached():
                event = await worker.client.encode(request, job.media)
        except WorkerLostError as error:
            self._pool.lose(worker, str(error))
            raise
        if isinstance(event, Encoded):
            self._placement.remember(worker, item.key)
        return event
