"""A cluster on virtual time in which things go wrong: the router's own pipeline and pool, workers made of real engines, and between them
links that delay, lose and double messages.

Whatever goes wrong is noted, with the name of what it hit: a worker's id, an item's key or a request's, so that afterwards each error can be held
against what explains it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from triptych.config import ClusterLayout, EngineConfig, Stage
from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import TERMINAL_EVENTS, Encoded, EncodeEvent, EncodeFailed, EngineEvent, Failed, GenerateEvent
from triptych.errors import FailureReason, OverloadedError
from triptych.output import ModelRunnerOutput, SchedulerOutput
from triptych.router.fake_worker_client import FakeCosts, FakeWorkerClient
from triptych.router.metrics import RouterMetrics
from triptych.router.pipeline import Pipeline
from triptych.router.placement import Placement
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.router.worker_client import WorkerClient
from triptych.transfer.ticket import Ticket
from triptych.worker.protocol import ECDelivery, EncodeRequest, GenerateRequest, KVDelivery

T = TypeVar("T")

SILENCE_S = 10.0  # after which a router gives a worker up that stands still, as HttpWorkerClient does
MAX_STEPS = 20_000  # of one engine: more means that it spins
READ_FAILURES = [FailureReason.STALE, FailureReason.CORRUPT, FailureReason.TIMEOUT, FailureReason.PEER_LOST]
ENCODE_FAILURES = [FailureReason.INTERNAL, FailureReason.TIMEOUT, FailureReason.BAD_MEDIA]


@dataclass(frozen=True)
class Weather:
    """How often (a share) what goes wrong, beside what happens to whole workers."""

    late: float = 0.0  # messages, and loads
    late_s: float = 0.0  # at most
    lost: float = 0.0  # deliveries, releases and aborts
    twice: float = 0.0  # deliveries and releases
    refused: float = 0.0  # encodes and generates, with 429
    failed: float = 0.0  # generates, at once
    unread: float = 0.0  # loads
    unencoded: float = 0.0  # encodes


@dataclass
class Log:
    """What happened, in order: `trace` all events, `faults` what went wrong: (when, what it hit, what it was)."""

    trace: list[str] = field(default_factory=list[str])
    faults: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    ended: set[str] = field(default_factory=set[str])  # ids of requests and encodes that had their terminal event
    ids: dict[str, str] = field(default_factory=dict[str, str])  # encode ids are random: their names here

    def note(self, hit: str, fault: str) -> None:
        now = asyncio.get_running_loop().time()
        self.faults.append((now, hit, fault))
        self.say(f"{self.name(hit)}: {fault}")

    def see(self, worker_id: str, event: EngineEvent) -> None:
        id, key = getattr(event, "id", ""), getattr(event, "key", "")
        self.say(f"{worker_id} {type(event).__name__} {self.name(id)} {key[:8]} {getattr(event, 'reason', '') or ''}")
        assert id not in self.ended, f"{worker_id} says {event} after the end"
        if isinstance(event, (*TERMINAL_EVENTS, Encoded, EncodeFailed)):
            self.ended.add(id)
        if isinstance(event, Failed | EncodeFailed) and "wait already" in event.message:
            self.note(key or event.id, "refused: full")

    def say(self, what: str) -> None:
        self.trace.append(f"{asyncio.get_running_loop().time():8.4f} {what}")

    def name(self, id: str) -> str:
        return self.ids.setdefault(id, f"e{len(self.ids)}") if id.startswith("enc-") else id[:8]

    def hits(self, names: set[str]) -> int:
        return sum(hit in names for _, hit, _ in self.faults)


class FaultyFabric(Fabric):
    """Reads that fail."""

    def __init__(self, weather: Weather, rng: Random, log: Log) -> None:
        super().__init__()
        self.weather, self.rng, self.log = weather, rng, log

    def read(self, ticket: Ticket, name: str) -> list[dict[int, int]] | FailureReason:
        if self.rng.random() < self.weather.unread:
            reason = self.rng.choice(READ_FAILURES)
            self.log.note(name, f"cannot be read: {reason}")
            return reason
        return super().read(ticket, name)


class ObservedWorker(FakeWorkerClient):
    """Its engine's invariants are checked after every step. `on_encode` hears of each item before its tower runs."""

    def __init__(self, worker_id: str, role: str, cluster: "FaultyCluster") -> None:
        super().__init__(worker_id, role, cluster.fabric, costs=cluster.costs, config=cluster.config)
        self.cluster = cluster
        self.num_steps = 0

    def execute_model(self, scheduler_output: SchedulerOutput, /) -> ModelRunnerOutput:
        try:
            for each in scheduler_output.encodes:
                self.cluster.log.say(f"{self.info.worker_id} encodes {each.key[:8]}")
                self.cluster.check_encode(self, each.key)
            return super().execute_model(scheduler_output)
        except Exception as error:  # the engine makes a failed step of it
            self.cluster.broken.append(error)
            raise

    def _dispatch(self, events: list[EngineEvent]) -> None:
        self.core.scheduler.check_invariants()
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, f"{self.info.worker_id} spins"
        for event in events:
            self.cluster.log.see(self.info.worker_id, event)
        super()._dispatch(events)

    def _transfer_s(self) -> float:
        return super()._transfer_s() + self.cluster.delay_s()

    def _end_preparation(self, key: str) -> None:
        if self.cluster.rng.random() < self.cluster.weather.unencoded:
            reason = self.cluster.rng.choice(ENCODE_FAILURES)
            self.faults.encodes.append(reason)
            self.cluster.log.note(key, f"cannot be encoded: {reason}")
        super()._end_preparation(key)


class FaultyLink(WorkerClient):
    """The network between the router and one worker, from one registration to the next."""

    def __init__(self, worker: FakeWorkerClient, cluster: "FaultyCluster") -> None:
        self.info = worker.info
        self.worker = worker
        self._cluster = cluster
        self._rng = cluster.rng
        self._weather = cluster.weather
        self._is_cut = asyncio.Event()

    def cut(self) -> None:
        """The watch stream ends, though the worker lives."""
        self._is_cut.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        self._maybe_refuse(request.request_id)
        if self._rng.random() < self._weather.failed:
            reason = self._rng.choice(READ_FAILURES)
            self._cluster.log.note(request.request_id, f"failed at once: {reason}")
            yield Failed(request.request_id, "it failed", "kv_unavailable", 503, reason)
            return
        inbox: asyncio.Queue[GenerateEvent | Exception] = asyncio.Queue()
        carrying = asyncio.create_task(self._carry(request, inbox), name=f"carry {request.request_id}")
        try:
            while True:
                event = await inbox.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, TERMINAL_EVENTS):
                    return
        finally:
            self._leave(carrying, request.request_id)

    async def encode(self, request: EncodeRequest, media: bytes) -> EncodeEvent:
        self._maybe_refuse(request.key)
        calling = self._start(lambda: self.worker.encode(request, media))
        try:
            return await asyncio.shield(calling)
        finally:
            self._leave(calling, request.key)

    async def deliver(self, delivery: ECDelivery) -> None:
        await self._tell(delivery.request_id, lambda: self.worker.deliver(delivery))

    async def deliver_kv(self, delivery: KVDelivery) -> None:
        await self._tell(delivery.request_id, lambda: self.worker.deliver_kv(delivery))

    async def release(self, id: str) -> None:
        await self._tell(id, lambda: self.worker.release(id))

    async def watch(self) -> None:
        ends = [asyncio.create_task(end, name="watch") for end in (self.worker.watch(), self._is_cut.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def close(self) -> None:
        pass

    async def _carry(self, request: GenerateRequest, inbox: "asyncio.Queue[GenerateEvent | Exception]") -> None:
        try:
            await self._travel()
            async with aclosing(self.worker.generate(request)) as events:
                async for event in events:
                    await self._travel()
                    inbox.put_nowait(event)
        except Exception as error:  # whatever it is, it belongs to who reads the stream
            inbox.put_nowait(error)

    async def _tell(self, id: str, call: Callable[[], Awaitable[None]]) -> None:
        """What is on its way arrives, also if the sender has left."""
        if self._rng.random() < self._weather.lost:
            self._cluster.log.note(id, "a message to its worker is lost")
            return
        arriving = self._start(call)
        if self._rng.random() < self._weather.twice:
            self._start(call)
        await asyncio.shield(arriving)

    def _leave(self, task: "asyncio.Task[Any]", id: str) -> None:
        """The connection ends, which the worker sees now, later or never."""
        if task.done():
            return
        if self._rng.random() < self._weather.lost:
            self._cluster.log.note(id, "an abort is lost")
        else:
            asyncio.get_running_loop().call_later(self._cluster.delay_s(), task.cancel)

    def _maybe_refuse(self, name: str) -> None:
        if self._rng.random() < self._weather.refused:
            self._cluster.log.note(name, "refused: full")
            raise OverloadedError("this worker is full.")

    def _start(self, call: Callable[[], Awaitable[T]]) -> "asyncio.Task[T]":
        async def run() -> T:
            await self._travel()
            answer = await call()
            await self._travel()
            return answer

        task = asyncio.create_task(run(), name=f"call {self.info.worker_id}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its sender may have left
        return task

    async def _travel(self) -> None:
        delay_s = self._cluster.delay_s()
        if delay_s:
            await asyncio.sleep(delay_s)


class FaultyCluster:
    """`harm` and what it calls do things to whole workers; those are `touched` from then on."""

    def __init__(
        self, layout: str, config: EngineConfig, costs: FakeCosts, weather: Weather, rng: Random, request_timeout_s: float
    ) -> None:
        roles = ClusterLayout.parse(layout).roles
        stages = [stage for stage in Stage if any(stage in role for role in roles)]
        self.config, self.costs, self.weather, self.rng = replace(config, is_alone=len(roles) == 1), costs, weather, rng
        self.log = Log()
        self.fabric = FaultyFabric(weather, rng, self.log)
        self.metrics = RouterMetrics()
        self.pool = WorkerPool(ClusterLayout.parse(layout), on_lost=self._on_lost)
        self.placement = Placement(self.pool)
        self.pipeline = Pipeline(self.pool, self.placement, self.metrics, request_timeout_s=request_timeout_s)
        self.workers: dict[str, ObservedWorker] = {}
        self.touched: set[str] = set()
        self.broken: list[Exception] = []
        self._links: dict[str, FaultyLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        for role in roles:
            self._add(str(role))
        self._first = tuple(self.workers)
        self.spared: set[str] = set()  # from harm
        if rng.random() < 0.6:
            self.spared = {
                rng.choice([name for name in self._first if stage in self.workers[name].config.role]) for stage in stages
            }

    @property
    def is_slow(self) -> bool:
        """Messages may take seconds."""
        return self.weather.late > 0 and self.weather.late_s > 1

    @property
    def live(self) -> list[ObservedWorker]:
        return [worker for worker in self.workers.values() if not worker.dead.is_set()]

    def healthy(self, stage: Stage) -> list[str]:
        """The workers of a stage that have been there all along, and well."""
        return [id for id in self._first if stage in self.workers[id].config.role and id not in self.touched]

    def delay_s(self) -> float:
        return self.rng.random() * self.weather.late_s if self.rng.random() < self.weather.late else 0.0

    def check_encode(self, worker: ObservedWorker, key: str) -> None:
        """Nobody's fault, and somebody has it: then it need not be encoded again, unless it was here and is evicted. Where answers are under
        way for seconds the router may not know yet; a request that moves to another prefill worker may have left its encode."""
        has_moved = any(fault.startswith(("refused", "failed")) for _, _, fault in self.log.faults)
        has_lost = any(Stage.PREFILL in self.workers[id].config.role for id in self.touched)
        if key in worker.runner.encoded_keys or self.is_slow or has_moved or has_lost or self.log.hits({key}):
            return
        holders = [
            pooled.id
            for pooled in self.pool.ready(Stage.ENCODE)
            if pooled.id not in self.touched and self.workers[pooled.id].core.scheduler.cache.is_resident(key)
        ]
        assert not holders, f"{worker.info.worker_id} encodes {key[:8]}, which {holders} have"

    # --- what happens to workers

    def harm(self) -> None:
        """One fault of a random kind to a random worker."""
        victims, rng = [worker for worker in self.live if worker.info.worker_id not in self.spared], self.rng
        if not victims:
            return
        worker = rng.choice(victims)
        match rng.randrange(8):
            case 0:
                self._touch(worker, "dies")
                worker.die()
            case 1 | 2:
                self.stop(worker, rng.choice([0.5, 2.0, 5.0, SILENCE_S + 5.0]))
            case 3:
                self._touch(worker, "its watch stream is cut")
                self._links[worker.info.worker_id].cut()
            case 4:
                self._touch(worker, "will die while or after encoding")
                worker.faults.die_while_encoding = rng.random() < 0.5
                worker.faults.die_after_encoding = True
            case 5:
                self._touch(worker, "will die after tokens")
                worker.faults.die_after_tokens = worker.record.num_tokens + rng.randrange(4)
            case 6:
                self._touch(worker, "is sick: fails whatever it is asked")
                worker.faults.encodes.extend([FailureReason.INTERNAL] * 99)
                worker.faults.generates.extend([Failed("", "sick", "kv_unavailable", 503, FailureReason.INTERNAL)] * 99)
            case _:
                self._touch(worker, "will die with its next item or token")
                worker.faults.die_while_encoding = worker.faults.die_while_prefilling = True

    def stop(self, worker: ObservedWorker, seconds: float) -> None:
        self._touch(worker, f"stands still for {seconds} s")
        worker.hang()
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, worker.go_on)
        if seconds > SILENCE_S:
            loop.call_later(SILENCE_S, self._links[worker.info.worker_id].cut)

    def _touch(self, worker: ObservedWorker, fault: str) -> None:
        self.touched.add(worker.info.worker_id)
        self.log.note(worker.info.worker_id, fault)

    # --- membership

    def _add(self, role: str) -> None:
        name = f"{role}{sum(str(other.config.role) == role for other in self.workers.values())}"
        self.workers[name] = ObservedWorker(name, role, self)
        self._join(self.workers[name])

    def _join(self, worker: ObservedWorker) -> None:
        link = self._links[worker.info.worker_id] = FaultyLink(worker, self)
        self.pool.join(link)

    def _on_lost(self, pooled: PooledWorker) -> None:
        self.placement.forget_worker(pooled)
        task = asyncio.create_task(self._come_back(self.workers[pooled.id]), name=f"registration of {pooled.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _come_back(self, worker: ObservedWorker) -> None:
        """As worker/registration.py does, once nobody watches it; or, often, another process in place of a dead one."""
        await asyncio.sleep(0.1 + 1.9 * self.rng.random())
        await worker.running.wait()
        if worker.dead.is_set():
            if self.rng.random() < 0.7:
                await asyncio.sleep(4 * self.rng.random())
                self._add(str(worker.config.role))
        elif all(pooled.id != worker.info.worker_id for pooled in self.pool.workers):
            self._join(worker)

    async def close(self) -> None:
        await self.pipeline.stop()
        await self.pool.close()
