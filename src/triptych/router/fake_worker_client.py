"""`FakeWorkerClient`: an arithmetic model in place of a worker, whose answers a reader computes by hand.

    item       its rows are      ENCODE * digit(key) + row          digit: the key's first 8 hex digits mod 1000
    KV         of a prompt token PREFILL * (position + 1) * id      a placeholder has its row in place of the id
               of a generated one DECODE * (position + 1) * id
    next token FIRST_ID + (sum of the KV + seed) mod SPAN           `end_after` tokens, then a stop

Each stage has a constant of its own, so a wrong route, a stale row or a lost, doubled or moved token shows in the answer. What
moves between workers moves through a `FakePlane`, by ticket.

Reproduces: the events of each role and their order, waits for items, hand-over, tickets with generations, leases held until released,
refusals by role, aborts; and on command death, hanging, late answers, lost items, failures. Does not reproduce: batching, cache
sizes, chunks, queues, preemption.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from triptych.config import Fingerprint, Role, Stage
from triptych.engine.events import (
    TERMINAL_EVENTS,
    ECNeeded,
    Encoded,
    EncodeEvent,
    EncodeFailed,
    Failed,
    Finished,
    GenerateEvent,
    HandedOver,
    NewTokens,
    StageTimings,
)
from triptych.errors import FailureReason, RequestError, TransferError, WorkerLostError
from triptych.media.item import MediaItem
from triptych.output import ECTicket, KVTicket, TokenLogprob
from triptych.router.worker_client import WorkerClient
from triptych.transfer.ticket import Ticket
from triptych.worker.protocol import ECDelivery, EncodeRequest, GenerateRequest, WorkerInfo

ENCODE, PREFILL, DECODE = 3, 5, 7
FIRST_ID, SPAN = 300, 500
T = TypeVar("T")

FINGERPRINT = Fingerprint("fake", "arithmetic", "int", 16, 1, 1, 1, 1)


def item_digit(key: str) -> int:
    return int(key[:8], 16) % 1000


@dataclass
class FakePlane:
    """What the data plane reaches: (worker, name) -> (generation, value)."""

    memory: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict[tuple[str, str], tuple[int, int]])
    lost: set[str] = field(default_factory=set[str])

    def publish(self, worker: str, name: str, value: int) -> Ticket:
        generation = self.memory.get((worker, name), (0, 0))[0] + 1
        self.memory[worker, name] = (generation, value)
        return Ticket(worker, name, (0,), (generation,), 1, 1, "", 60.0, {"fake": worker})

    def read(self, ticket: Ticket) -> int:
        if ticket.producer in self.lost:
            raise TransferError(FailureReason.PEER_LOST, f"{ticket.producer} is gone")
        if (ticket.producer, ticket.arena) not in self.memory:
            raise TransferError(FailureReason.MISSING, f"{ticket.producer} has no {ticket.arena}")
        generation, value = self.memory[ticket.producer, ticket.arena]
        if generation != ticket.generations[0]:
            raise TransferError(FailureReason.STALE, f"{ticket.arena} was recycled")
        return value


@dataclass
class FakeCosts:
    """Seconds of virtual time."""

    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0  # per token
    transfer_s: float = 0.0  # per item, and per hand-over


@dataclass
class FakeFaults:
    """What goes wrong next; lists are used up one by one, from the front."""

    encodes: deque[FailureReason | Exception] = field(default_factory=deque[FailureReason | Exception])
    generates: deque[Failed | Exception] = field(default_factory=deque[Failed | Exception])
    die_while_encoding: bool = False
    die_after_encoding: bool = False  # the ticket arrives, the producer is gone
    die_while_prefilling: bool = False
    die_after_tokens: int | None = None  # tokens sent by this worker
    ignore_deliveries: int = 0
    start_late_s: float = 0.0  # before a generate is looked at


@dataclass
class FakeRecord:
    """What the worker was asked, and how it ended."""

    generates: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    encodes: list[EncodeRequest] = field(default_factory=list[EncodeRequest])
    media: list[bytes] = field(default_factory=list[bytes])
    deliveries: list[ECDelivery] = field(default_factory=list[ECDelivery])
    aborted: list[str] = field(default_factory=list[str])  # generates and encodes left before their end
    released: list[str] = field(default_factory=list[str])
    failed_encodes: set[str] = field(default_factory=set[str])  # answered without a ticket


class FakeWorkerClient(WorkerClient):
    """`end_after` is the number of tokens after which the model says a stop token; `script` replaces the arithmetic's tokens."""

    def __init__(
        self, worker_id: str, role: str, plane: FakePlane, *, costs: FakeCosts | None = None, end_after: int = 8,
        script: tuple[int, ...] = (), info: WorkerInfo | None = None,
    ) -> None:  # fmt: skip
        self.info = info or WorkerInfo(worker_id, role, FINGERPRINT, 4096, 4096, 4096)
        self.role = Role.parse(role)
        self.plane = plane
        self.costs = costs or FakeCosts()
        self.faults = FakeFaults()
        self.record = FakeRecord()
        self.end_after = end_after
        self.script = script
        self.resident: dict[str, int] = {}  # items in this worker's encoder cache
        self.running = asyncio.Event()  # cleared: it hangs
        self.running.set()
        self._dead = asyncio.Event()
        self._inboxes: dict[str, asyncio.Queue[ECDelivery]] = {}

    # --- on command

    def die(self) -> None:
        self._dead.set()
        self.plane.lost.add(self.info.worker_id)

    def hang(self) -> None:
        self.running.clear()

    def lose(self, key: str) -> None:
        """Evict an item: from the cache, and for those who hold a ticket."""
        self.resident.pop(key, None)
        self.plane.memory.pop((self.info.worker_id, key), None)

    # --- WorkerClient

    async def encode(self, request: EncodeRequest, media: bytes) -> EncodeEvent:
        self._require(Stage.ENCODE)
        self.record.encodes.append(request)
        self.record.media.append(media)
        try:
            return await self._encode(request)
        except asyncio.CancelledError:
            self.record.aborted.append(request.encode_id)
            raise

    async def _encode(self, request: EncodeRequest) -> EncodeEvent:
        was_cached = request.key in self.resident
        await self._spend(0.0 if was_cached else self.costs.encode_s)
        if self.faults.die_while_encoding:
            self.die()
            self._check_alive()
        if self.faults.encodes:
            fault = self.faults.encodes.popleft()
            self.record.failed_encodes.add(request.encode_id)
            if isinstance(fault, Exception):
                raise fault
            return EncodeFailed(request.encode_id, request.key, f"the tower said {fault}", fault)
        value = ENCODE * item_digit(request.key)
        self.resident[request.key] = value
        timings = StageTimings(encode_s=0.0 if was_cached else self.costs.encode_s)
        if request.will_stay:
            return Encoded(request.encode_id, request.key, None, was_cached, timings)
        data = self.plane.publish(self.info.worker_id, request.key, value)
        if self.faults.die_after_encoding:
            self.die()
        ticket = ECTicket(request.key, request.num_rows, 1, "int", data)
        return Encoded(request.encode_id, request.key, ticket, was_cached, timings)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        self._require(Stage.DECODE if request.kv_transfer_params.ticket else Stage.PREFILL)
        self.record.generates.append(request)
        has_ended = False
        try:
            async for event in self._generate(request):
                has_ended = isinstance(event, TERMINAL_EVENTS)
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            if not has_ended:
                self.record.aborted.append(request.request_id)
            raise

    async def _generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        await self._spend(self.faults.start_late_s)
        if self.faults.generates:
            fault = self.faults.generates.popleft()
            if isinstance(fault, Exception):
                raise fault
            yield msgspec.structs.replace(fault, id=request.request_id)
            return
        kv, timings = 0, StageTimings()
        async for step in self._load(request) if request.kv_transfer_params.ticket else self._prefill(request):
            if isinstance(step, tuple):
                kv, timings = step
                continue
            yield step
            if isinstance(step, Failed):
                return
        async for event in self._decode(request, kv, timings):
            yield event

    async def deliver(self, delivery: ECDelivery) -> None:
        self._check_alive()
        self.record.deliveries.append(delivery)
        if self.faults.ignore_deliveries:
            self.faults.ignore_deliveries -= 1
            return
        self._inboxes.setdefault(delivery.request_id, asyncio.Queue()).put_nowait(delivery)

    async def release(self, id: str) -> None:
        self._check_alive()
        self.record.released.append(id)
        self.plane.memory.pop((self.info.worker_id, id), None)

    async def watch(self) -> None:
        await self._dead.wait()

    async def close(self) -> None:
        pass

    # --- the arithmetic

    async def _prefill(self, request: GenerateRequest) -> AsyncIterator[ECNeeded | Failed | tuple[int, StageTimings]]:
        inbox = self._inboxes.setdefault(request.request_id, asyncio.Queue())
        tickets = {ticket.key: ticket for ticket in request.ec_transfer_params.tickets}
        items = request.ec_transfer_params.items
        waited_s = 0.0
        rows: dict[int, int] = {}
        for item in items:
            if item.key not in self.resident and item.key not in tickets:
                yield ECNeeded(request.request_id, item.key, FailureReason.MISSING)
        for item in items:
            started = asyncio.get_running_loop().time()
            async for event in self._receive(request.request_id, item, tickets, inbox):
                yield event
                if isinstance(event, Failed):
                    return
            waited_s += asyncio.get_running_loop().time() - started
            rows |= placeholder_rows(item, self.resident[item.key])
        await self._spend(self.costs.prefill_s)
        if self.faults.die_while_prefilling:
            self.die()
        kv = sum(
            (PREFILL if position < request.num_prompt_tokens else DECODE) * (position + 1) * rows.get(position, token_id)
            for position, token_id in enumerate(request.token_ids)
        )
        yield kv, StageTimings(prefill_s=self.costs.prefill_s, ec_wait_s=waited_s)

    async def _receive(
        self, request_id: str, item: MediaItem, tickets: dict[str, ECTicket], inbox: asyncio.Queue[ECDelivery]
    ) -> AsyncIterator[ECNeeded | Failed]:
        """Until the item is resident, or cannot be had."""
        while item.key not in self.resident:
            ticket = tickets.pop(item.key, None)
            if ticket is None:
                delivery = await self._while_alive(inbox.get())
                if delivery.failure is not None:
                    yield Failed(request_id, delivery.message, "ec_unavailable", 503, delivery.failure)
                    return
                if delivery.ticket is not None:
                    tickets[delivery.key] = delivery.ticket
                continue
            await self._spend(self.costs.transfer_s)
            try:
                self.resident[item.key] = self.plane.read(ticket.data)
            except TransferError as error:
                yield ECNeeded(request_id, item.key, error.reason)

    async def _load(self, request: GenerateRequest) -> AsyncIterator[Failed | tuple[int, StageTimings]]:
        ticket = request.kv_transfer_params.ticket
        assert ticket is not None
        await self._spend(self.costs.transfer_s)
        try:
            kv = self.plane.read(ticket.data)
        except TransferError as error:
            yield Failed(request.request_id, str(error), "kv_unavailable", 503, error.reason)
            return
        for position in range(ticket.num_tokens, len(request.token_ids)):
            kv += DECODE * (position + 1) * request.token_ids[position]
        yield kv, StageTimings(kv_transfer_s=self.costs.transfer_s)

    async def _decode(self, request: GenerateRequest, kv: int, timings: StageTimings) -> AsyncIterator[GenerateEvent]:
        sampling, request_id = request.sampling_params, request.request_id
        length, num_sent, decode_s = len(request.token_ids), 0, 0.0
        while True:
            count = length - request.num_prompt_tokens
            if count >= sampling.max_tokens or count == self.end_after:
                reason = "length" if count >= sampling.max_tokens else "stop"
                yield Finished(request_id, reason, msgspec.structs.replace(timings, decode_s=decode_s))
                return
            if num_sent or request.kv_transfer_params.ticket:
                await self._spend(self.costs.decode_s)
                decode_s += self.costs.decode_s
            if num_sent == self.faults.die_after_tokens:
                self.die()
            self._check_alive()
            token_id = self.script[count] if self.script else FIRST_ID + (kv + sampling.seed) % SPAN
            yield NewTokens(request_id, (TokenLogprob(token_id, -0.5, ((token_id, -0.5), (7, -2.0))),))
            num_sent += 1
            if request.kv_transfer_params.do_remote_decode and count + 1 < sampling.max_tokens:
                data = self.plane.publish(self.info.worker_id, request_id, kv)
                yield HandedOver(request_id, KVTicket(request_id, length, 16, 1, "int", data), timings)
                return
            length += 1
            kv += DECODE * length * token_id

    # --- life

    async def _spend(self, seconds: float) -> None:
        async def spend() -> None:
            await asyncio.sleep(seconds)
            await self.running.wait()

        await self._while_alive(spend())

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, but no longer than this worker lives."""
        task, death = asyncio.ensure_future(work), asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait((task, death), return_when=asyncio.FIRST_COMPLETED)
            self._check_alive()
            return task.result()
        finally:
            task.cancel()
            death.cancel()

    def _check_alive(self) -> None:
        if self._dead.is_set():
            raise WorkerLostError(f"worker {self.info.worker_id} is lost.")

    def _require(self, stage: Stage) -> None:
        self._check_alive()
        if stage not in self.role:
            raise RequestError(f"worker {self.info.worker_id} has role {self.role} and does not {stage.name.lower()}.")


def placeholder_rows(item: MediaItem, value: int) -> dict[int, int]:
    """Position -> the row that stands there."""
    positions = [start + offset for start, length in item.runs for offset in range(length)]
    return {position: value + row for row, position in enumerate(positions)}
