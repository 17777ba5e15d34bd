"""`EarlyDecode`: a request's stay at a decode worker that begins while its prompt is still computed at a prefill worker.

    idle -- the first ticket --> going: the worker reserves blocks and reads parts as their tickets come -- handed over --> decoding
                                   |                                                                            |
                                   +-- refused, lost, unread: dropped without a word --+                        +-- judged by the pipeline
                                                                                       v
                                                         the ordinary way, with all tickets, at the hand-over

It is tried once for each call to a prefill worker. A prompt that is computed anew there (preempted) ends it: blocks are scarce.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from triptych.engine.events import Failed, GenerateEvent, KVAwaited
from triptych.errors import TriptychError
from triptych.output import KVTicket
from triptych.router.metrics import RouterMetrics
from triptych.router.pool import PooledWorker
from triptych.worker.protocol import GenerateRequest, KVDelivery

Deliver = Callable[[PooledWorker, KVDelivery], Awaitable[None]]


class EarlyDecode:
    """One per call to a prefill worker. Close it (`aclose`) when the request leaves, which aborts it at the decode worker."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._worker: PooledWorker | None = None
        self._call_id = ""
        self._num_tokens = 0  # that went with the call
        self._tickets: list[KVTicket] = []  # that it was given
        self._has_failed = False
        self._is_handed_over = False
        self._is_known = asyncio.Event()  # the worker has the request: nothing can overtake it any more
        self._inbox: asyncio.Queue[GenerateEvent | Exception | None] = asyncio.Queue()
        self._outbox: asyncio.Queue[KVDelivery] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def was_tried(self) -> bool:
        return self._worker is not None

    @property
    def is_going(self) -> bool:
        return self.was_tried and not self._has_failed

    def begin(
        self, worker: PooledWorker, message: GenerateRequest, events: AsyncGenerator[GenerateEvent], deliver: Deliver
    ) -> None:
        """`message` has the first ticket; `events` are those of the call that it makes, once they are listened to."""
        self._tickets = [*message.kv_transfer_params.tickets]
        self._worker, self._call_id, self._num_tokens = worker, message.request_id, len(message.token_ids)
        self._tasks = [
            asyncio.create_task(self._listen(events), name=f"early decode {message.request_id}"),
            asyncio.create_task(self._tell(worker, deliver), name=f"tickets for {message.request_id}"),
        ]

    def deliver(self, ticket: KVTicket) -> None:
        """A part that follows those before it."""
        if self.is_going:
            self._tickets.append(ticket)
            self._outbox.put_nowait(KVDelivery(self._call_id, (ticket,)))

    async def worker_for(self, tickets: tuple[KVTicket, ...]) -> PooledWorker | None:
        """Where it can go on now that all tickets are known; nowhere if the prompt was computed anew meanwhile."""
        if tickets[: len(self._tickets)] != tuple(self._tickets):
            await self.drop()
        return self._worker if self.is_going else None

    async def hand_over(self, tickets: tuple[KVTicket, ...], token_ids: list[int]) -> AsyncGenerator[GenerateEvent]:
        """The events from here on; raises what ended the call. `token_ids` are the request's by now."""
        self._is_handed_over = True
        self._metrics.early_decodes.labels("kept").inc()
        self._outbox.put_nowait(KVDelivery(self._call_id, tickets, tuple(token_ids[self._num_tokens :]), is_last=True))
        while (event := await self._inbox.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    async def drop(self) -> None:
        """It is of no use any more; the hand-over goes the ordinary way."""
        if self.is_going:
            self._fail()
            await self.aclose()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fail(self) -> None:
        if not self._is_handed_over and not self._has_failed:
            self._metrics.early_decodes.labels("dropped").inc()
        self._has_failed = True

    def _end(self, error: Exception) -> None:
        self._fail()
        self._inbox.put_nowait(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _listen(self, events: AsyncGenerator[GenerateEvent]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, KVAwaited):
                        self._is_known.set()
                        continue
                    if isinstance(event, Failed):
                        self._fail()
                    self._inbox.put_nowait(event)
            self._inbox.put_nowait(None)
        except Exception as error:  # whatever ends the call is judged by whoever reads on; before the hand-over nobody does
            self._end(error)

    async def _tell(self, worker: PooledWorker, deliver: Deliver) -> None:
        await self._is_known.wait()
        while True:
            delivery = await self._outbox.get()
            try:
                await deliver(worker, delivery)
            except TriptychError as error:
                self._end(error)
                return
