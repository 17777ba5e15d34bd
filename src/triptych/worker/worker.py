"""`Worker`: everything of one worker but its HTTP front. `LLM` uses it in process, `app.py` serves it."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

import torch

from triptych.config import EngineConfig
from triptych.engine.admission import (
    check_ec_ticket,
    check_kv_ticket,
    check_role,
    check_takes_items,
    check_takes_kv,
    check_tower,
)
from triptych.engine.core import EngineCore
from triptych.engine.events import (
    TERMINAL_EVENTS,
    Encoded,
    EncodeEvent,
    EncodeFailed,
    EngineEvent,
    Failed,
    GenerateEvent,
    PreparationNeeded,
)
from triptych.engine.request import RequestSpec
from triptych.errors import ConfigError, FailureReason, InternalError, RequestError
from triptych.media.processor import MediaProcessor
from triptych.models.loader import LoadedModel, Parts, load_model
from triptych.output import ECTicket
from triptych.runner.model_runner import ModelRunner, make_runner
from triptych.transfer.planes import make_data_plane
from triptych.worker.engine_thread import EngineThread
from triptych.worker.event_streams import EventStreams, StreamEvent
from triptych.worker.media_preparation import MediaPreparation, PreparationFailed, Prepared
from triptych.worker.metrics import Count
from triptych.worker.protocol import ECDelivery, EncodeRequest, GenerateRequest, KVDelivery, WorkerInfo

logger = logging.getLogger(__name__)


class Worker:
    """Loads its parts of the model, then runs. Its coroutines, those of a `WorkerClient`, may be called from one event loop at a time."""

    url = ""  # app.py knows it, if anybody does

    def __init__(self, config: EngineConfig, progress: Callable[[float], None] = lambda _: None) -> None:
        if config.device.num_threads is not None:
            torch.set_num_threads(config.device.num_threads)
        self.config = config
        self.info = WorkerInfo.of(config, f"{config.role}-{uuid.uuid4().hex[:12]}")
        loaded = load_model(config.model, _parts(config), _device(config), progress)
        self._resources = ExitStack()  # closed in reverse: engine thread, media pool, data plane, caches
        self._is_closed = asyncio.Event()
        self._streams = EventStreams()
        runner = self._make_runner(config, loaded)
        self._grammars = runner.grammars
        self._core = EngineCore(config, runner, time.monotonic, loaded.adapter.atomic_items)
        self._thread = EngineThread(self._core, self._on_events, self._on_death)
        preprocess = partial(loaded.adapter.preprocess, limits=config.media)
        self._media = MediaPreparation(MediaProcessor(config.media.num_threads), preprocess, self._on_prepared)
        self._resources.callback(self._media.close)
        self._resources.callback(self._thread.close)
        self._thread.start()

    def _make_runner(self, config: EngineConfig, loaded: LoadedModel) -> ModelRunner:
        if config.is_alone:
            runner = make_runner(config, loaded)
            self._resources.callback(runner.close)
        else:
            data_plane = make_data_plane(config.connector, self.info.worker_id)
            runner = make_runner(config, loaded, data_plane, on_progress=self._wake)
            self._resources.callback(runner.close)
            self._resources.callback(data_plane.close)
        if loaded.model.device.type != "cpu":  # a CPU swaps before it fails, and this step takes it most of a second
            runner.profile_run()
        runner.warm_up()
        runner.capture_model()
        return runner

    # --- calls ------------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """The request's events; the last one is terminal. Closing the generator early aborts the request.

        Raises `RequestError` at once for a call that this worker's role cannot serve, or a ticket that this cluster has not made; and in place of
        the first event for a structured output that cannot be had.
        """
        spec, tickets = request.to_spec(), request.ec_transfer_params.tickets
        check_role(spec, self.config)
        for ticket in tickets:
            check_ec_ticket(ticket, self.config)
        for kv_ticket in spec.kv_tickets:
            check_kv_ticket(kv_ticket, self.config)
        return self._generate(spec, tickets)

    async def _generate(self, spec: RequestSpec, tickets: tuple[ECTicket, ...]) -> AsyncGenerator[GenerateEvent, None]:
        if spec.sampling.structured_output is not None:
            await self._grammars.check(spec.sampling.structured_output)
        queue = self._streams.open(spec.request_id)
        has_ended = False
        try:
            for ticket in tickets:
                self._thread.submit(lambda core, ticket=ticket: core.announce(ticket))
            self._thread.submit(lambda core: core.add_request(spec))
            while not has_ended:
                event = await queue.get()
                if isinstance(event, Encoded | EncodeFailed):
                    raise InternalError(f"the id {spec.request_id} is an encode's as well.")
                has_ended = isinstance(event, TERMINAL_EVENTS)
                yield event
        finally:
            self._streams.close(spec.request_id)
            if not has_ended:
                await self.abort(spec.request_id)

    async def encode(self, request: EncodeRequest, media: bytes) -> EncodeEvent:
        """Raises `RequestError` if this worker has no tower. Cancelling the call aborts the encode."""
        check_tower(self.config)
        queue = self._streams.open(request.encode_id)
        self._media.hold(request, media)
        event: StreamEvent | None = None
        try:
            self._thread.submit(lambda core: core.add_encode(request.to_spec()))
            event = await queue.get()
        finally:
            self._streams.close(request.encode_id)
            self._media.let_go(request)
            if event is None:
                await self.abort(request.encode_id)
        if isinstance(event, Failed):
            return EncodeFailed(request.encode_id, request.key, event.message, FailureReason.PEER_LOST)
        if not isinstance(event, Encoded | EncodeFailed):
            raise InternalError(f"the id {request.encode_id} is a request's as well.")
        return event

    async def deliver(self, delivery: ECDelivery) -> None:
        """An item announced, or the news that it cannot be had. Raises `RequestError` if this worker takes no items, or not this ticket:
        whoever waits for the item waits on for the right one."""
        ticket, failure = delivery.ticket, delivery.failure
        if failure is not None:
            message = delivery.message or f"media item {delivery.key[:12]} could not be had ({failure})."
            self._thread.submit(lambda core: core.item_failed(delivery.request_id, delivery.key, message, failure))
        elif ticket is not None:
            check_takes_items(self.config)
            if ticket.key != delivery.key:
                raise RequestError("the ticket is for another item than the delivery.")
            check_ec_ticket(ticket, self.config)
            self._thread.submit(lambda core: core.announce(ticket))

    async def deliver_kv(self, delivery: KVDelivery) -> None:
        """Further KV tickets for a request. Raises `RequestError` if this worker takes no KV, or one of them is not this cluster's."""
        check_takes_kv(self.config)
        for ticket in delivery.tickets:
            check_kv_ticket(ticket, self.config)
        args = (delivery.request_id, delivery.tickets, delivery.token_ids, delivery.is_last)
        self._thread.submit(lambda core: core.deliver_kv(*args))

    async def abort(self, id: str) -> None:
        self._thread.submit(lambda core: core.scheduler.abort(id))

    async def release(self, id: str) -> None:
        self._thread.submit(lambda core: core.scheduler.release(id))

    async def watch(self) -> None:
        """Return when the worker is closed."""
        await self._is_closed.wait()

    async def close(self) -> None:
        self._is_closed.set()
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """End the engine thread, the pools and the data plane, in bounded time; streams that are open end with an error."""
        self._streams.fail_all("the worker stops.")
        self._resources.close()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    @property
    def engine_error(self) -> BaseException | None:
        """What broke the engine, which never runs again."""
        return self._thread.error

    async def engine_ended(self) -> None:
        """Return when the engine has: the worker was closed, or it broke."""
        await asyncio.to_thread(self._thread.join)

    def gauges(self) -> dict[str, float]:
        """Instantaneous values for /metrics, by name."""
        scheduler = self._core.scheduler
        return {
            "requests_running": scheduler.num_running,
            "requests_waiting": scheduler.num_waiting,
            "encodes_queued": scheduler.num_queued_encodes,
            "item_waits": scheduler.num_item_waits,
            "leases": scheduler.num_leases,
            "kv_blocks": scheduler.kv.num_blocks,
            "kv_blocks_free": scheduler.kv.num_free_blocks,
            "encoder_cache_pages": scheduler.cache.num_pages,
            "encoder_cache_pages_free": scheduler.cache.num_free_pages,
            "encoder_cache_items_pinned": scheduler.cache.num_pinned,
            "streams": len(self._streams),
        }

    def counters(self) -> dict[str, Count]:
        """What has been done since the start, for /metrics, by name."""
        scheduler = self._core.scheduler
        return {
            **asdict(self._core.counters),
            "encoder_cache_evictions": scheduler.cache.num_evicted,
            "preemptions": scheduler.num_preempted,
            "prefix_cache_queries": scheduler.prefixes.num_tokens_asked,
            "prefix_cache_hits": scheduler.prefixes.num_tokens_found,
            "item_waits_expired": scheduler.num_item_waits_expired,
            "leases_expired": scheduler.num_leases_expired,
        }

    # --- called from other threads ----------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._thread.wake()

    def _on_events(self, events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, PreparationNeeded):
                self._media.start(event.key)
        self._streams.dispatch([event for event in events if not isinstance(event, PreparationNeeded)])

    def _on_prepared(self, key: str, outcome: Prepared | PreparationFailed) -> None:
        if isinstance(outcome, Prepared):
            self._thread.submit(lambda core: core.scheduler.prepared(key, outcome.inputs, outcome.seconds))
        else:
            self._thread.submit(lambda core: core.scheduler.preparation_failed(key, outcome.message, outcome.reason))

    def _on_death(self, error: BaseException) -> None:
        self._streams.fail_all(f"{type(error).__name__}: {error}")


def _parts(config: EngineConfig) -> Parts:
    if not config.has_language_model:
        return Parts.TOWER
    return Parts.FULL if config.has_tower else Parts.LANGUAGE_MODEL


def _device(config: EngineConfig) -> torch.device:
    name = config.device.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device '{name}' does not exist; use auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device '{name}' is not here: PyTorch sees {torch.cuda.device_count()} CUDA devices; use --device cpu."
        )
    return device
