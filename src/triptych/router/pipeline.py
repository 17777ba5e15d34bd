"""`Pipeline`: leads a request through encode, prefill and decode. The only place with that order, its retries and its aborts.

    encode the items, and prefill beside it  ->  hand the KV over  ->  decode  ->  finished
         ^                                             |                |
         +----- prompt + tokens so far, again ---------+----------------+   a worker is lost, or its KV cannot be read

A worker that prefills and decodes keeps the request to its end. Sampling is a function of logits, parameters, seed and position,
so tokens go on after a replay as they would have. Time is the running loop's and transport the workers' clients: see virtual_time.py.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, asynccontextmanager

from triptych.config import Stage
from triptych.engine.events import ECLoaded, ECNeeded, Failed, Finished, GenerateEvent, HandedOver, NewTokens
from triptych.errors import (
    DeadlineError,
    InternalError,
    OverloadedError,
    TriptychError,
    UnavailableError,
    WorkerLostError,
)
from triptych.output import KVTicket
from triptych.router.media_feed import MediaFeed
from triptych.router.metrics import RouterMetrics
from triptych.router.placement import Placement
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.router.releases import Releases
from triptych.router.running_request import GenerateJob, RunningRequest
from triptych.router.shared_encodes import ItemToEncode, SharedEncodes
from triptych.router.timing import Stopwatch
from triptych.router.worker_client import error_from_event
from triptych.worker.protocol import ECTransferParams, GenerateRequest, KVTransferParams

logger = logging.getLogger(__name__)

MAX_REPLAYS = 3
RETRY_AFTER_S = 1.0


class _ReplayError(Exception):
    """The request must be prefilled again, if `error` is not to be its end."""

    def __init__(self, error: TriptychError, worker: PooledWorker, reason: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.worker = worker
        self.reason = reason


class Pipeline:
    def __init__(
        self,
        pool: WorkerPool,
        placement: Placement,
        metrics: RouterMetrics,
        *,
        max_in_flight: int = 512,
        request_timeout_s: float = 600.0,
    ) -> None:
        self._pool = pool
        self._placement = placement
        self._metrics = metrics
        self._releases = Releases()
        self._encodes = SharedEncodes(pool, placement, self._releases, metrics)
        self._max_in_flight = max_in_flight
        self._request_timeout_s = request_timeout_s
        self._num_admitted = 0
        self._running: dict[RunningRequest, asyncio.Task[None]] = {}
        self._is_stopping = False

    @property
    def num_in_flight(self) -> int:
        return self._num_admitted

    @property
    def num_encodes_under_way(self) -> int:
        return self._encodes.num_under_way

    @asynccontextmanager
    async def admitted(self) -> AsyncGenerator[None]:
        """A place for a request, from before its rendering to its end. Raises `OverloadedError`; `UnavailableError` while stopping."""
        if self._is_stopping:
            raise _stopping_error()
        if self._num_admitted >= self._max_in_flight:
            message = f"{self._num_admitted} requests are under way, as many as are allowed; try again in {RETRY_AFTER_S:g} s."
            raise OverloadedError(message, retry_after_s=RETRY_AFTER_S)
        self._num_admitted += 1
        self._metrics.in_flight.set(self._num_admitted)
        try:
            yield
        finally:
            self._num_admitted -= 1
            self._metrics.in_flight.set(self._num_admitted)

    @asynccontextmanager
    async def run(self, job: GenerateJob, stopwatch: Stopwatch) -> AsyncGenerator[RunningRequest]:
        """The request runs while the block does: leaving it early aborts it everywhere. `stopwatch` started with its arrival."""
        if self._is_stopping:
            raise _stopping_error()
        request = RunningRequest(job, stopwatch)
        task = self._running[request] = asyncio.create_task(self._lead_to_its_end(request), name=job.request_id)
        try:
            yield request
        finally:
            del self._running[request]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """End every request with an error, and refuse new ones."""
        self._is_stopping = True
        for request, task in self._running.items():
            request.fail(_stopping_error())
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._releases.drain()

    # --- one request

    async def _lead_to_its_end(self, request: RunningRequest) -> None:
        """Exactly one of `finish` and `fail`, whatever happens, unless nobody listens any more."""
        feed = self._make_feed(request)
        try:
            async with asyncio.timeout(self._request_timeout_s - request.stopwatch.elapsed_s):
                request.finish(await self._lead(request, feed))
        except TimeoutError:
            message = f"the request did not end within {self._request_timeout_s:g} s; it was waiting for {request.waits_for}."
            request.fail(DeadlineError(message))
        except TriptychError as error:
            request.fail(error)
        except Exception as error:  # the edge of the request's task: a bug must not leave the client waiting
            logger.exception("request %s met a bug", request.job.request_id)
            request.fail(InternalError(f"the router failed: {type(error).__name__}."))
        finally:
            feed.let_go()

    async def _lead(self, request: RunningRequest, feed: MediaFeed) -> str:
        """Prefill and decode until it has finished; again from the prompt and the tokens so far when a worker fails. The finish reason."""
        avoid: set[str] = set()
        for replays_left in reversed(range(MAX_REPLAYS + 1)):
            try:
                outcome = await self._prefill(request, feed, avoid)
                return outcome if isinstance(outcome, str) else await self._decode(request, *outcome, avoid)
            except _ReplayError as replay:
                if request.num_generated_tokens >= request.job.sampling.max_tokens:
                    return "length"  # all that was lost is the news that it had finished
                avoid.add(replay.worker.id)
                if not replays_left or (replay.reason == "overloaded" and self._placement.is_exhausted(avoid)):
                    raise replay.error from None
                self._metrics.replays.labels(replay.reason).inc()
                logger.warning("request %s is prefilled again: %s", request.job.request_id, replay)
        raise AssertionError("the last replay raises or returns")

    async def _prefill(self, request: RunningRequest, feed: MediaFeed, avoid: set[str]) -> str | tuple[KVTicket, PooledWorker]:
        """Items go to the worker while it computes what stands before them. The finish reason, or the KV and who has it."""
        items = request.job.items
        worker = self._placement.pick_prefill(len(request.token_ids), items, avoid)
        kv = KVTransferParams(do_remote_decode=not worker.can(Stage.DECODE))
        message = _make_message(request, ECTransferParams(items, feed.tickets), kv)
        request.waits_for = f"prefill at {worker.id}"
        async with feed.at(worker, message.request_id), aclosing(self._events(request, worker, Stage.PREFILL, message)) as events:
            async for event in events:
                match event:
                    case ECNeeded():
                        request.waits_for = f"item {event.key[:12]}, which {worker.id} needs ({event.reason})"
                        feed.need(event.key, event.reason, worker)
                    case ECLoaded():
                        feed.arrived(event.key, worker)
                    case NewTokens():
                        request.waits_for = f"tokens from {worker.id}"
                        request.add(event.tokens)
                        feed.read_by(worker)
                        feed.let_go()
                    case Failed():
                        raise _judge(event, worker, Stage.PREFILL, feed.error)
                    case Finished() | HandedOver():
                        feed.read_by(worker)
                        return event.reason if isinstance(event, Finished) else (event.ticket, worker)
        raise _silent(worker)

    async def _decode(self, request: RunningRequest, ticket: KVTicket, prefill: PooledWorker, avoid: set[str]) -> str:
        """Tokens from where prefill stopped. Its KV is released with the first of them, or when this ends without. The finish reason."""
        with ExitStack() as kv:
            kv.callback(self._releases.send, prefill, ticket.request_id)
            worker = self._placement.pick_decode(avoid)
            message = _make_message(request, ECTransferParams(request.job.items), KVTransferParams(ticket=ticket))
            request.waits_for = f"the KV from {prefill.id} at {worker.id}"
            async with aclosing(self._events(request, worker, Stage.DECODE, message)) as events:
                async for event in events:
                    match event:
                        case NewTokens():
                            request.waits_for = f"tokens from {worker.id}"
                            request.add(event.tokens)
                            kv.close()
                        case Finished():
                            return event.reason
                        case Failed():
                            raise _judge(event, worker, Stage.DECODE, None)
                        case ECNeeded() | ECLoaded() | HandedOver():
                            raise InternalError(f"worker {worker.id} answered a decode with {type(event).__name__}.")
            raise _silent(worker)

    async def _events(
        self, request: RunningRequest, worker: PooledWorker, stage: Stage, message: GenerateRequest
    ) -> AsyncGenerator[GenerateEvent]:
        """The worker's events, timed; raises `_ReplayError` when it is lost or full. Closing it aborts the request there."""
        stay = request.stopwatch.begin(is_prefill=stage == Stage.PREFILL)
        num_tokens = len(message.token_ids)
        self._placement.begin(worker, stage, num_tokens)
        try:
            async with worker.attached(), aclosing(worker.client.generate(message)) as events:
                async for event in events:
                    if isinstance(event, Finished | HandedOver):
                        stay.reported = event.timings
                    yield event
        except WorkerLostError as error:
            self._pool.lose(worker, str(error))
            raise _ReplayError(_lost_error(worker, stage), worker, "worker_lost") from None
        except OverloadedError as error:
            raise _ReplayError(error, worker, "overloaded") from None
        finally:
            request.stopwatch.end(stay)
            self._placement.end(worker, stage, num_tokens)

    def _make_feed(self, request: RunningRequest) -> MediaFeed:
        job = request.job
        jobs = {item.key: ItemToEncode(item, job.media[item.key]) for item in job.items}
        return MediaFeed(jobs, self._encodes, self._placement, self._metrics, on_encoded=request.stopwatch.add_encode)


def _make_message(request: RunningRequest, ec: ECTransferParams, kv: KVTransferParams) -> GenerateRequest:
    job = request.job
    return GenerateRequest(
        request_id=request.next_call_id(),
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=len(job.token_ids),
        sampling_params=job.sampling,
        ec_transfer_params=ec,
        kv_transfer_params=kv,
        priority=job.priority,
    )


def _judge(event: Failed, worker: PooledWorker, stage: Stage, item_error: TriptychError | None) -> Exception:
    """What a worker's `Failed` means. If an item could not be had, nothing else went wrong, and the feed knows best why."""
    if item_error is not None:
        return item_error
    error = error_from_event(event, stage.name.lower())
    if event.reason is not None and event.reason.is_retryable:
        return _ReplayError(error, worker, event.reason)
    return error


def _silent(worker: PooledWorker) -> _ReplayError:
    error = UnavailableError(f"worker {worker.id} ended without a last event", stage=str(worker.role), reason="protocol")
    return _ReplayError(error, worker, "protocol")


def _lost_error(worker: PooledWorker, stage: Stage) -> UnavailableError:
    name = stage.name.lower()
    return UnavailableError(f"{name} worker {worker.id} is lost", stage=name, reason="worker_lost")


def _stopping_error() -> UnavailableError:
    return UnavailableError("the router is stopping", stage="router", reason="stopping")
