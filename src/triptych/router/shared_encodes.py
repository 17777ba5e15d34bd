"""`SharedEncodes`: encodes under way, each shared by all requests that wait for the same item. Its life:

started by the first who wants it -> joined by others -> answered to all -> ticket released when the last has read it
                 |                                 +-> takes too long: all go on to another worker, if there is one
                 +-> the last waiter leaves -> aborted

A worker that was asked twice for an item (once to keep it, once for a ticket) runs its tower once: it shares, too.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from uuid import uuid4

from triptych.config import Stage
from triptych.engine.events import Encoded, EncodeEvent, EncodeFailed
from triptych.errors import FailureReason, OverloadedError, WorkerLostError
from triptych.media.item import MediaItem
from triptych.router.metrics import RouterMetrics
from triptych.router.placement import Placement
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.router.releases import Releases, TicketLease
from triptych.worker.protocol import EncodeRequest

SUSPECT_S = 60.0  # how long a worker comes last for encodes after one took too long there


@dataclass(frozen=True, slots=True)
class ItemToEncode:
    item: MediaItem
    media: bytes


@dataclass(slots=True, eq=False)
class Flight:
    """One encode at one worker. An item that stays there is of no use to another prefill worker."""

    key: str
    worker: PooledWorker
    will_stay: bool
    overdue_at: float  # by the loop's clock
    lease: TicketLease
    task: asyncio.Task[EncodeEvent]
    num_waiters: int = 0

    @property
    def is_new(self) -> bool:
        """Whoever joined it is the first."""
        return self.num_waiters == 0


class SharedEncodes:
    def __init__(
        self, pool: WorkerPool, placement: Placement, releases: Releases, metrics: RouterMetrics, timeout_s: float
    ) -> None:
        self._pool = pool
        self._placement = placement
        self._releases = releases
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._flights: dict[str, list[Flight]] = {}  # by key, oldest first

    @property
    def num_under_way(self) -> int:
        return sum(map(len, self._flights.values()))

    def join(self, job: ItemToEncode, prefill: PooledWorker | None, avoid: Collection[str]) -> Flight:
        """An encode whose answer is of use at `prefill` (None: anywhere): one under way, or a new one. Raises `UnavailableError`
        without encode workers."""
        flights = [
            each for each in reversed(self._flights.get(job.item.key, ())) if each.worker.is_ready and each.worker.id not in avoid
        ]
        for flight in flights:
            if not flight.will_stay or flight.worker is prefill:
                self._metrics.encodes.labels("shared").inc()
                return flight
        worker = flights[0].worker if flights else self._placement.pick_encode(job.item, prefill, avoid)
        return self._start(job, worker, will_stay=worker is prefill)

    async def wait(self, flight: Flight, avoid: Collection[str]) -> Encoded | EncodeFailed:
        """Raises `WorkerLostError`, or the worker's refusal. An encode that takes too long has failed once there is another worker, not
        among `avoid`. Cancelling leaves the flight, which ends with its last waiter.

        With a ticket, the caller is a holder of the flight's lease from here on.
        """
        flight.num_waiters += 1
        flight.lease.hold()
        has_ticket = False
        try:
            if not await self._is_answered(flight, avoid):
                return EncodeFailed("", flight.key, f"{flight.worker.id} took too long", FailureReason.TIMEOUT)
            event = flight.task.result()
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
                self._forget(flight)

    async def _is_answered(self, flight: Flight, avoid: Collection[str]) -> bool:
        """Wait for the answer; or, when it is overdue, until another worker could do it."""
        loop = asyncio.get_running_loop()
        while not flight.task.done():
            left_s = flight.overdue_at - loop.time()
            if left_s > 0:
                await asyncio.wait({flight.task}, timeout=left_s)
            elif self._placement.has_choice(Stage.ENCODE, {*avoid, flight.worker.id}):
                flight.worker.suspect_until = loop.time() + SUSPECT_S
                return False
            else:
                await asyncio.wait({flight.task, self._pool.next_join()}, return_when=asyncio.FIRST_COMPLETED)
        return True

    def _start(self, job: ItemToEncode, worker: PooledWorker, *, will_stay: bool) -> Flight:
        item, encode_id = job.item, f"enc-{uuid4().hex}"
        self._placement.begin(worker, Stage.ENCODE, item.num_rows)
        task = asyncio.create_task(self._encode(job, worker, encode_id, will_stay=will_stay))
        task.add_done_callback(lambda _: self._placement.end(worker, Stage.ENCODE, item.num_rows))
        overdue_at = asyncio.get_running_loop().time() + self._timeout_s
        flight = Flight(item.key, worker, will_stay, overdue_at, TicketLease(self._releases, worker, encode_id), task)
        self._flights.setdefault(item.key, []).append(flight)
        self._metrics.encodes.labels("started").inc()
        return flight

    def _forget(self, flight: Flight) -> None:
        flights = self._flights.get(flight.key, [])
        if flight in flights:
            flights.remove(flight)
        if not flights:
            self._flights.pop(flight.key, None)

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
            if isinstance(event, EncodeFailed) and event.reason == FailureReason.PEER_LOST:
                raise WorkerLostError(event.message)
        except WorkerLostError as error:
            self._pool.lose(worker, str(error))
            raise
        if isinstance(event, EncodeFailed) and event.reason == FailureReason.OVERLOADED:
            raise OverloadedError(event.message)
        if isinstance(event, Encoded):
            self._placement.remember(worker, item.key)
        return event
