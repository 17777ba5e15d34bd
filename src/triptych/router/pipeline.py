"""`Pipeline`: leads a request through encode, prefill and decode. The only place with that order, its retries and its aborts.

    encode the items, and prefill beside it  ->  hand the KV over  ->  decode  ->  finished
            (a decode worker takes the KV of its chunks meanwhile: early_decode.py)
         ^                                             |                |
         +----- prompt + tokens so far, again ---------+----------------+   a worker is lost, or its KV cannot be read

A worker that prefills and decodes keeps the request to its end. Sampling is a function of logits, parameters, seed and position,
so tokens go on after a replay as they would have. Time is the running loop's and transport the workers' clients: see virtual_time.py.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager

from triptych.config import Stage
from triptych.engine.events import (
    ECLoaded,
    ECNeeded,
    Failed,
    Finished,
    GenerateEvent,
    HandedOver,
    KVAwaited,
    KVPublished,
    NewTokens,
    PrefixHit,
    PromptLogprobs,
)
from triptych.errors import (
    DeadlineError,
    FailureReason,
    InternalError,
    OverloadedError,
    RequestError,
    TriptychError,
    UnavailableError,
    WorkerLostError,
)
from triptych.output import KVTicket
from triptych.router.early_decode import EarlyDecode
from triptych.router.media_feed import MediaFeed
from triptych.router.metrics import RouterMetrics
from triptych.router.placement import Backoff, Placement
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.router.releases import Releases
from triptych.router.running_request import GenerateJob, RunningRequest
from triptych.router.shared_encodes import SharedEncodes
from triptych.router.timing import Stopwatch
from triptych.router.worker_client import error_from_event
from triptych.worker.protocol import ECTransferParams, GenerateRequest, KVDelivery, KVTransferParams

logger = logging.getLogger(__name__)

MAX_REPLAYS = 3  # in a row, without a token from a decode worker between
SHORTEST_RETRY_AFTER_S, LONGEST_RETRY_AFTER_S = 1.0, 30.0


class _ReplayError(Exception):
    """The request must be prefilled again, if `error` is not to be its end."""

    def __init__(self, error: TriptychError, worker: PooledWorker, reason: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.worker = worker
        self.reason = reason


class _RefusedError(Exception):
    """The worker is full: nothing has happened, and the same call can go elsewhere, or there a little later."""

    def __init__(self, error: OverloadedError) -> None:
        super().__init__(str(error))
        self.error = error


class Pipeline:
    def __init__(
        self,
        pool: WorkerPool,
        placement: Placement,
        metrics: RouterMetrics,
        *,
        max_in_flight: int = 256,
        request_timeout_s: float = 600.0,
        encode_timeout_s: float = 20.0,
    ) -> None:
        self._pool = pool
        self._placement = placement
        self._metrics = metrics
        self._releases = Releases()
        self._encodes = SharedEncodes(pool, placement, self._releases, metrics, encode_timeout_s)
        self._max_in_flight = max_in_flight
        self._request_timeout_s = request_timeout_s
        self._num_admitted = 0
        self._mean_stay_s = 0.0  # of the requests that have ended lately
        self._running: dict[RunningRequest, asyncio.Task[None]] = {}
        self._is_stopping = False

    @property
    def num_in_flight(self) -> int:
        return self._num_admitted

    @property
    def num_encodes_under_way(self) -> int:
        return self._encodes.num_under_way

    @asynccontextmanager
    async def admitted(self, num_choices: int = 1) -> AsyncGenerator[None]:
        """A place for each answer to a request, from before its rendering to its end; all or none. Raises `RequestError` if there are not
        so many, `OverloadedError` if there are not now; `UnavailableError` while stopping."""
        if self._is_stopping:
            raise _stopping_error()
        if num_choices > self._max_in_flight:
            message = f"n is {num_choices}, but at most {self._max_in_flight} answers may be under way at once (--max-in-flight)."
            raise RequestError(message, param="n")
        if self._num_admitted + num_choices > self._max_in_flight:
            wait_s = self._retry_after_s
            message = f"{self._num_admitted} answers are under way, of {self._max_in_flight} that are allowed; try again in {wait_s:.0f} s."
            raise OverloadedError(message, retry_after_s=wait_s)
        started_at = asyncio.get_running_loop().time()
        self._num_admitted += num_choices
        self._metrics.in_flight.set(self._num_admitted)
        try:
            yield
        finally:
            self._num_admitted -= num_choices
            self._metrics.in_flight.set(self._num_admitted)
            stay_s = asyncio.get_running_loop().time() - started_at
            self._mean_stay_s += (stay_s - self._mean_stay_s) / 8

    @property
    def _retry_after_s(self) -> float:
        """On average, whoever is here is halfway."""
        return min(max(self._mean_stay_s / 2, SHORTEST_RETRY_AFTER_S), LONGEST_RETRY_AFTER_S)

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
        feed = MediaFeed(request, self._encodes, self._placement, self._metrics)
        try:
            async with asyncio.timeout(self._request_timeout_s - request.stopwatch.elapsed_s):
                request.finish(await self._lead(request, feed))
        except TimeoutError:
            waits = f"{request.waits_for} ({feed.waits_for})" if feed.waits_for else request.waits_for
            message = f"the request did not end within {self._request_timeout_s:g} s; it was waiting for {waits}."
            request.fail(DeadlineError(message))
        except TriptychError as error:
            if error.status >= 500:
                logger.error("request %s ends: %s", request.job.request_id, error)
            request.fail(error)
        except Exception as error:  # the edge of the request's task: a bug must not leave the client waiting
            logger.exception("request %s met a bug", request.job.request_id)
            request.fail(InternalError(f"the router failed: {type(error).__name__}."))
        finally:
            await feed.close()

    async def _lead(self, request: RunningRequest, feed: MediaFeed) -> str:
        """Prefill and decode until it has finished; again from the prompt and the tokens so far when a worker fails. The finish reason."""
        avoid: set[str] = set()
        replays_left, num_tokens = MAX_REPLAYS, request.num_generated_tokens
        while True:
            try:
                # The callbacks of `kv` give back what is kept for the decode worker.
                async with aclosing(EarlyDecode(self._metrics)) as early:
                    with ExitStack() as kv:
                        outcome = await self._prefill(request, feed, avoid, kv, early)
                        return outcome if isinstance(outcome, str) else await self._decode(request, *outcome, avoid, kv, early)
            except _ReplayError as replay:
                if request.num_generated_tokens >= request.job.sampling.max_tokens:
                    return "length"  # all that was lost is the news that it had finished
                avoid.add(replay.worker.id)
                if request.num_generated_tokens > num_tokens + 1:  # prefill gives one, however often decode fails
                    replays_left = MAX_REPLAYS
                if not replays_left:
                    raise replay.error from None
                replays_left, num_tokens = replays_left - 1, request.num_generated_tokens
                request.stopwatch.num_replays += 1
                self._metrics.replays.labels(replay.reason).inc()
                logger.warning("request %s is prefilled again: %s", request.job.request_id, replay)

    async def _prefill(
        self, request: RunningRequest, feed: MediaFeed, avoid: set[str], kv: ExitStack, early: EarlyDecode
    ) -> str | tuple[tuple[KVTicket, ...], PooledWorker]:
        """At a worker that has room. The finish reason, or the KV and who has it."""

        def take_part(ticket: KVTicket) -> Awaitable[None]:
            return self._take_part(request, ticket, avoid, early)

        backoff = Backoff(self._placement, Stage.PREFILL)

        def pick() -> PooledWorker:
            return self._placement.pick_prefill(request, avoid | backoff.full)

        while True:
            request.waits_for = "a prefill worker"
            worker = await self._placement.when_there(pick)
            try:
                return await self._prefill_at(worker, request, feed, kv, take_part, is_eager=not backoff.has_paused)
            except _RefusedError as refusal:
                kv.pop_all()
                if not backoff.has_next(worker, avoid):
                    request.waits_for = f"prefill at {worker.id}, which is full"
                    feed.call_off()  # its encodes would keep those waiting that have found room
                    await backoff.pause(refusal.error)

    async def _prefill_at(
        self,
        worker: PooledWorker,
        request: RunningRequest,
        feed: MediaFeed,
        kv: ExitStack,
        take_part: Callable[[KVTicket], Awaitable[None]],
        *,
        is_eager: bool,
    ) -> str | tuple[tuple[KVTicket, ...], PooledWorker]:
        """Items go to the worker while it computes what stands before them, and the KV of what it has computed goes on."""
        hands_over = not worker.can(Stage.DECODE)
        message = _make_message(
            request, ECTransferParams(request.job.items, feed.tickets), KVTransferParams(do_remote_decode=hands_over)
        )
        request.waits_for = f"prefill at {worker.id}"
        if hands_over:  # from now on: the client may leave while the ticket is on its way
            kv.callback(self._releases.send, worker, message.request_id)
        stay = feed.at(worker, message.request_id, is_eager=is_eager)
        num_held = self._placement.num_tokens_held(worker, request)
        call = self._timed(request, self._call(worker, Stage.PREFILL, message, num_held), is_prefill=True)
        async with stay, aclosing(call) as events:
            async for event in events:
                match event:
                    case ECNeeded():
                        request.waits_for = f"item {event.key[:12]}, which {worker.id} needs ({event.reason})"
                        feed.need(event.key, event.reason)
                    case ECLoaded():
                        feed.arrived(event.key, worker)
                    case PrefixHit():
                        request.see_prefix_hit(event.num_tokens)
                        feed.covered(event.num_tokens)
                    case PromptLogprobs():
                        request.add_prompt_logprobs(event.start, event.tokens)
                    case KVPublished():
                        await take_part(event.ticket)
                    case NewTokens():
                        request.waits_for = f"tokens from {worker.id}"
                        request.add(event.tokens)
                        feed.read_by(worker)
                    case Failed():
                        kv.pop_all()
                        raise _judge_prefill(event, worker, feed)
                    case Finished():
                        kv.pop_all()
                        feed.read_by(worker)
                        return event.reason
                    case HandedOver():
                        feed.read_by(worker)
                        return event.tickets, worker
                    case KVAwaited():
                        raise InternalError(f"worker {worker.id} answered a prefill with {type(event).__name__}.")
        raise _silent(worker)

    async def _take_part(self, request: RunningRequest, ticket: KVTicket, avoid: set[str], early: EarlyDecode) -> None:
        """The KV of a chunk is there, and the prompt goes on: a decode worker can read it meanwhile."""
        if ticket.first_block:
            early.deliver(ticket)
        elif early.was_tried:
            await early.drop()
        else:
            try:
                worker = self._placement.pick_decode(avoid)
            except UnavailableError:
                return  # one may come before the hand-over, which waits for it
            kv = KVTransferParams(tickets=(ticket,), has_more=True)
            message = _make_message(request, ECTransferParams(request.job.items), kv)
            early.begin(worker, message, self._call(worker, Stage.DECODE, message), self._deliver)

    async def _deliver(self, worker: PooledWorker, delivery: KVDelivery) -> None:
        """If the worker is lost, whoever listens to it hears so."""
        try:
            await worker.client.deliver_kv(delivery)
        except WorkerLostError as error:
            self._pool.lose(worker, str(error))

    async def _decode(
        self,
        request: RunningRequest,
        tickets: tuple[KVTicket, ...],
        prefill: PooledWorker,
        avoid: set[str],
        kv: ExitStack,
        early: EarlyDecode,
    ) -> str:
        """At a worker that has room. The finish reason."""
        backoff = Backoff(self._placement, Stage.DECODE)

        def pick() -> PooledWorker:
            return self._placement.pick_decode(avoid | backoff.full)

        going_on = await early.worker_for(tickets)
        while True:
            request.waits_for = "a decode worker"
            worker = going_on or await self._placement.when_there(pick)
            request.waits_for = f"the KV from {prefill.id} at {worker.id}"
            if going_on is not None:
                events = early.hand_over(tickets, request.token_ids)
            else:
                message = _make_message(request, ECTransferParams(request.job.items), KVTransferParams(tickets=tickets))
                events = self._call(worker, Stage.DECODE, message)
            going_on = None
            try:
                return await self._decode_at(worker, request, events, kv)
            except _RefusedError as refusal:
                if not backoff.has_next(worker, avoid):
                    request.waits_for = f"decode at {worker.id}, which is full"
                    await backoff.pause(refusal.error)

    async def _decode_at(
        self, worker: PooledWorker, request: RunningRequest, call: AsyncGenerator[GenerateEvent], kv: ExitStack
    ) -> str:
        """Tokens from where prefill stopped. Its KV is given back with the first of them."""
        async with aclosing(self._timed(request, call, is_prefill=False)) as events:
            async for event in events:
                match event:
                    case NewTokens():
                        request.waits_for = f"tokens from {worker.id}"
                        request.add(event.tokens)
                        kv.close()
                    case Finished():
                        return event.reason
                    case Failed():
                        raise _judge(event, worker, Stage.DECODE)
                    case PrefixHit() | KVAwaited():
                        pass
                    case ECNeeded() | ECLoaded() | PromptLogprobs() | KVPublished() | HandedOver():
                        raise InternalError(f"worker {worker.id} answered a decode with {type(event).__name__}.")
        raise _silent(worker)

    async def _timed(
        self, request: RunningRequest, call: AsyncGenerator[GenerateEvent], *, is_prefill: bool
    ) -> AsyncGenerator[GenerateEvent]:
        """The events of a call, which is from now on where the request's time goes."""
        stay = request.stopwatch.begin(is_prefill=is_prefill)
        try:
            async with aclosing(call) as events:
                async for event in events:
                    if isinstance(event, Finished | HandedOver):
                        stay.reported = event.timings
                    yield event
        finally:
            request.stopwatch.end(stay)

    async def _call(
        self, worker: PooledWorker, stage: Stage, message: GenerateRequest, num_held: int = 0
    ) -> AsyncGenerator[GenerateEvent]:
        """The worker's events; raises `_ReplayError` when it is lost, `_RefusedError` when it is full. Closing it aborts the request there.
        `num_held`: tokens that it need not compute."""
        num_tokens = len(message.token_ids) - num_held
        self._placement.begin(worker, stage, num_tokens)
        try:
            async with worker.attached(), aclosing(worker.client.generate(message)) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        _raise_if_gone_or_full(event)
                    yield event
        except WorkerLostError as error:
            self._pool.lose(worker, str(error))
            raise _ReplayError(_lost_error(worker, stage), worker, "worker_lost") from None
        except OverloadedError as error:
            raise _RefusedError(error) from None
        finally:
            self._placement.end(worker, stage, num_tokens)


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
        age_s=request.stopwatch.elapsed_s,
        cache_salt=job.cache_salt,
    )


def _raise_if_gone_or_full(event: Failed) -> None:
    """A worker speaks of itself here, and not of the request."""
    if event.type == WorkerLostError.type:
        raise WorkerLostError(event.message)
    if event.status == OverloadedError.status:
        raise OverloadedError(event.message)


def _judge_prefill(event: Failed, worker: PooledWorker, feed: MediaFeed) -> Exception:
    """If an item could not be had, nothing else went wrong, and the feed knows best why."""
    is_for_item = event.type == "ec_unavailable" or event.reason == FailureReason.BAD_MEDIA
    if is_for_item and feed.error is not None:
        return feed.error
    if is_for_item and event.reason == FailureReason.TIMEOUT and feed.waits_for:
        # Another prefill worker would wait for the same encode.
        message = f"{event.message.rstrip('.')}; still to come: {feed.waits_for}"
        return UnavailableError(message, type=event.type, stage="encode", reason=event.reason)
    return _judge(event, worker, Stage.PREFILL)


def _judge(event: Failed, worker: PooledWorker, stage: Stage) -> Exception:
    """What a worker's `Failed` means."""
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
