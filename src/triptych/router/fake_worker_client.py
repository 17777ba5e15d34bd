"""`FakeWorkerClient`: a worker within the running loop: the real engine over the arithmetic runner, whose answers one computes by hand.

Reproduces: whatever the engine decides (batches, chunks, queues, waits, small caches, preemption, leases, deadlines), refusals by role, what steps,
loads and preparations take in the loop's seconds (virtual ones on a `VirtualTimeLoop`); and on command death, standing still, failures.
Does not reproduce: pixels, floating point, processes and threads, a network: a call arrives at once.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

import msgspec

from triptych.config import CacheConfig, EngineConfig, Role
from triptych.engine.admission import check_role, check_takes_items, check_takes_kv, check_tower
from triptych.engine.arithmetic_runner import MODEL, ArithmeticRunner, Fabric
from triptych.engine.core import EngineCore
from triptych.engine.events import (
    TERMINAL_EVENTS,
    Encoded,
    EncodeEvent,
    EncodeFailed,
    EngineEvent,
    Failed,
    GenerateEvent,
    NewTokens,
    PreparationNeeded,
)
from triptych.errors import FailureReason, WorkerLostError
from triptych.output import KVPart, ModelRunnerOutput, SchedulerOutput
from triptych.router.worker_client import WorkerClient
from triptych.worker.protocol import ECDelivery, EncodeRequest, GenerateRequest, KVDelivery, WorkerInfo

Command = Callable[[EngineCore], None]
StreamEvent = GenerateEvent | EncodeEvent

CONFIG = EngineConfig(MODEL, is_alone=False, cache=CacheConfig(num_kv_blocks=256, encoder_cache_rows=4096))


@dataclass
class FakeCosts:
    """Seconds. A step takes the sum of what it does; preparations and loads run beside the steps."""

    encode_s: float = 0.0  # a step that runs the tower
    prefill_s: float = 0.0  # a step that computes several tokens of a request
    decode_s: float = 0.0  # a step that computes one token of a request
    transfer_s: float = 0.0  # a load
    preparation_s: float = 0.0  # bytes -> tower inputs


@dataclass
class FakeFaults:
    """What goes wrong next; lists are used up one by one, from the front. An exception refuses the call, the others are its answer."""

    encodes: deque[FailureReason | Exception] = field(default_factory=deque[FailureReason | Exception])
    generates: deque[Failed | Exception] = field(default_factory=deque[Failed | Exception])
    slow_loads_s: deque[float] = field(default_factory=deque[float])  # by which the next loads take longer
    die_while_encoding: bool = False
    die_after_encoding: bool = False  # the ticket arrives, the producer is gone
    die_while_prefilling: bool = False
    die_after_tokens: int | None = None  # tokens sent by this worker
    ignore_deliveries: int = 0
    start_late_s: float = 0.0  # before a generate is looked at


@dataclass
class FakeRecord:
    """What the worker was asked, and what it said."""

    generates: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    encodes: list[EncodeRequest] = field(default_factory=list[EncodeRequest])
    media: list[bytes] = field(default_factory=list[bytes])
    deliveries: list[ECDelivery] = field(default_factory=list[ECDelivery])
    kv_deliveries: list[KVDelivery] = field(default_factory=list[KVDelivery])
    aborted: list[str] = field(default_factory=list[str])  # generates and encodes left before their end
    released: list[str] = field(default_factory=list[str])
    num_tokens: int = 0  # sent


class FakeWorkerClient(WorkerClient):
    """`config`'s role is replaced by `role`. Its engine starts with the first call and runs until `die`, or the loop's end."""

    def __init__(
        self, worker_id: str, role: str, fabric: Fabric, *, costs: FakeCosts | None = None, config: EngineConfig = CONFIG,
        info: WorkerInfo | None = None,
    ) -> None:  # fmt: skip
        self.config = replace(config, role=Role.parse(role))
        self.info = info or WorkerInfo.of(self.config, worker_id)
        self.costs = costs or FakeCosts()
        self.faults = FakeFaults()
        self.record = FakeRecord()
        self.runner = ArithmeticRunner(self.config, fabric, worker_id)
        self.core = EngineCore(self.config, self, self._clock)
        self.running = asyncio.Event()  # cleared: it stands still
        self.running.set()
        self.dead = asyncio.Event()
        self.engine: asyncio.Task[None] | None = None
        self._fabric = fabric
        self._ahead_s = 0.0  # of the loop's time, while a step is computed at once and takes its time afterwards
        self._commands: list[Command] = []
        self._has_work = asyncio.Event()
        self._streams: dict[str, asyncio.Queue[StreamEvent | None]] = {}  # None: the worker is dead

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    # --- on command

    def die(self) -> None:
        """Its connections end, and its memory is gone."""
        self.dead.set()
        self.running.set()
        self._fabric.runners.pop(self.info.worker_id, None)
        if self.engine is not None:
            self.engine.cancel()
        for events in self._streams.values():
            events.put_nowait(None)

    def hang(self) -> None:
        """Like SIGSTOP: calls get no answer, but its memory can be read."""
        self.running.clear()

    def go_on(self) -> None:
        self.running.set()

    def lose(self, name: str) -> None:
        """Give up an item (by its key) or the KV of a request (by its id), also if it is leased: who reads it later finds it stale."""
        cache = self.core.scheduler.cache
        if cache.is_resident(name):
            cache.discard(name)
        self.runner.lose_kv(name)
        self._submit(lambda core: core.scheduler.release(name))

    # --- WorkerClient

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        self._check_alive()
        spec = request.to_spec()
        check_role(spec, self.config)
        self.record.generates.append(request)
        events = self._streams[spec.request_id] = asyncio.Queue()
        has_ended = False
        try:
            if self.faults.start_late_s:
                await asyncio.sleep(self.faults.start_late_s)
            if self.faults.generates:
                fault, has_ended = self.faults.generates.popleft(), True
                if isinstance(fault, Exception):
                    raise fault
                yield msgspec.structs.replace(fault, id=spec.request_id)
            else:
                for ticket in request.ec_transfer_params.tickets:
                    self._submit(lambda core, ticket=ticket: core.announce(ticket))
                self._submit(lambda core: core.add_request(spec))
            while not has_ended:
                event = await self._next(events)
                assert not isinstance(event, Encoded | EncodeFailed)
                has_ended = isinstance(event, TERMINAL_EVENTS)
                yield event
        finally:
            self._close(spec.request_id, has_ended)

    async def encode(self, request: EncodeRequest, media: bytes) -> EncodeEvent:
        self._check_alive()
        check_tower(self.config)
        self.record.encodes.append(request)
        self.record.media.append(media)
        refusal = self.faults.encodes[0] if self.faults.encodes else None
        if isinstance(refusal, Exception):
            self.faults.encodes.popleft()
            raise refusal
        events = self._streams[request.encode_id] = asyncio.Queue()
        event: StreamEvent | None = None
        try:
            self._submit(lambda core: core.add_encode(request.to_spec()))
            event = await self._next(events)
        finally:
            self._close(request.encode_id, has_ended=event is not None)
        assert isinstance(event, Encoded | EncodeFailed)
        return event

    async def deliver(self, delivery: ECDelivery) -> None:
        await self._get_in()
        self.record.deliveries.append(delivery)
        ticket, failure = delivery.ticket, delivery.failure
        if self.faults.ignore_deliveries:
            self.faults.ignore_deliveries -= 1
        elif failure is not None:
            self._submit(lambda core: core.item_failed(delivery.request_id, delivery.key, delivery.message, failure))
        elif ticket is not None:
            check_takes_items(self.config)
            self._submit(lambda core: core.announce(ticket))

    async def deliver_kv(self, delivery: KVDelivery) -> None:
        await self._get_in()
        self.record.kv_deliveries.append(delivery)
        check_takes_kv(self.config)
        args = (delivery.request_id, delivery.tickets, delivery.token_ids, delivery.is_last)
        self._submit(lambda core: core.deliver_kv(*args))

    async def release(self, id: str) -> None:
        await self._get_in()
        self.record.released.append(id)
        self._submit(lambda core: core.scheduler.release(id))

    async def watch(self) -> None:
        await self.dead.wait()

    async def close(self) -> None:
        pass

    def _close(self, id: str, has_ended: bool) -> None:
        del self._streams[id]
        if not has_ended and not self.dead.is_set():
            self.record.aborted.append(id)
            self._submit(lambda core: core.scheduler.abort(id))

    async def _next(self, events: "asyncio.Queue[StreamEvent | None]") -> StreamEvent:
        event = await events.get()
        if event is None:
            raise self._lost()
        return event

    async def _get_in(self) -> None:
        self._check_alive()
        await self.running.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.dead.is_set():
            raise self._lost()

    def _lost(self) -> WorkerLostError:
        return WorkerLostError(f"worker {self.info.worker_id} is lost.")

    # --- the engine: what EngineThread, MediaPreparation and EventStreams do in a process

    def _submit(self, command: Command) -> None:
        self._commands.append(command)
        self._has_work.set()
        if self.engine is None:
            self.engine = asyncio.create_task(self._run(), name=f"engine of {self.info.worker_id}")

    def _clock(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead_s

    async def _run(self) -> None:
        has_moved = False
        while True:
            if not has_moved:
                await self._wait_for_work()
            await self.running.wait()
            self._has_work.clear()
            commands, self._commands = self._commands, []
            for command in commands:
                command(self.core)
            events, has_moved = self.core.step()
            await asyncio.sleep(self._ahead_s)
            self._ahead_s = 0.0
            await self.running.wait()
            self._dispatch(events)

    async def _wait_for_work(self) -> None:
        """Until a call, the end of a load or the next deadline."""
        timeout_s = self.core.seconds_to_deadline()
        deadline = asyncio.get_running_loop().call_later(timeout_s, self._has_work.set) if timeout_s is not None else None
        await self._has_work.wait()
        if deadline is not None:
            deadline.cancel()

    def execute_model(self, scheduler_output: SchedulerOutput, /) -> ModelRunnerOutput:
        """As the step's clock tells it, the step takes its time in here."""
        sizes = scheduler_output.num_scheduled_tokens.values()
        encode_s = self.costs.encode_s if scheduler_output.encodes else 0.0
        prefill_s = self.costs.prefill_s if any(size > 1 for size in sizes) else 0.0
        decode_s = self.costs.decode_s if any(size == 1 for size in sizes) else 0.0
        self._ahead_s += self._begin_loads(scheduler_output) + encode_s + prefill_s + decode_s
        result = self.runner.execute_model(scheduler_output)
        result.encode_s = encode_s
        return result

    def _begin_loads(self, output: SchedulerOutput) -> float:
        """How long the step waits for what it needs."""
        waited_s, bound_s = 0.0, output.ec_connector_metadata.timeout_s
        for load in output.ec_connector_metadata.loads:
            transfer_s = self._transfer_s()
            if load.is_needed:
                waited_s = max(waited_s, min(transfer_s, bound_s))
            if not load.is_needed or transfer_s > bound_s:
                self._hold(load.ticket.key, transfer_s)
        for load in output.kv_connector_metadata.loads:
            self._hold(load.part, self._transfer_s())
        return waited_s

    def _transfer_s(self) -> float:
        delays = self.faults.slow_loads_s
        return self.costs.transfer_s + (delays.popleft() if delays else 0.0)

    def _hold(self, name: str | KVPart, seconds: float) -> None:
        if seconds:
            self.runner.held.add(name)
            asyncio.get_running_loop().call_later(seconds, self._end_load, name)

    def _end_load(self, name: str | KVPart) -> None:
        self.runner.held.discard(name)
        self._has_work.set()

    def _dispatch(self, events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, PreparationNeeded):
                asyncio.get_running_loop().call_later(self.costs.preparation_s, self._end_preparation, event.key)
                continue
            if self._dies_before(event):
                self.die()
                return
            if event.id in self._streams:
                self._streams[event.id].put_nowait(event)
            if isinstance(event, Encoded) and self.faults.die_after_encoding:
                self.die()
                return

    def _dies_before(self, event: StreamEvent) -> bool:
        match event:
            case Encoded():
                return self.faults.die_while_encoding
            case NewTokens():
                self.record.num_tokens += 1
                return self.faults.die_while_prefilling or self.record.num_tokens - 1 == self.faults.die_after_tokens
            case _:
                return False

    def _end_preparation(self, key: str) -> None:
        reason = self.faults.encodes.popleft() if self.faults.encodes else None
        if isinstance(reason, FailureReason):
            self._submit(lambda core: core.scheduler.preparation_failed(key, f"the tower said {reason}", reason))
        else:
            self._submit(lambda core: core.scheduler.prepared(key, None, self.costs.preparation_s))
