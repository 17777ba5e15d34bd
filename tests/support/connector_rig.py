"""Workers on a turned clock whose engine core, EC connector, encoder cache and arena are real; only the model is arithmetic.

`RigWorker` keeps books of its own beside the worker: who is here, which leases run, what was encoded. After each call and each step it
compares them with what the worker says, and asks of every failure for the fault that was injected to cause it.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from engine_rig import MODEL, TurnedClock, key_of
from numpy.typing import NDArray

from triptych.config import CacheConfig, ConnectorConfig, EngineConfig, Role, SchedulerConfig
from triptych.engine.core import EngineCore
from triptych.engine.encode_queue import EncodeSpec
from triptych.engine.encoder_cache_manager import LAST
from triptych.engine.events import (
    ECNeeded,
    Encoded,
    EncodeFailed,
    EngineEvent,
    Failed,
    Finished,
    NewTokens,
    PreparationNeeded,
)
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason, TransferError
from triptych.media.item import MediaItem
from triptych.output import ECLoad, ECTicket, ModelRunnerOutput, NewRequestData, SchedulerOutput, TokenLogprob
from triptych.runner.ec_connector import get_ec_connector
from triptych.runner.encoder_cache import EncoderCache, RowWindow
from triptych.transfer.arena import Arena
from triptych.transfer.fake import FakeDataPlane, FakeNetwork, FakeRead

ROWS_PER_PAGE, ROW_WIDTH, BLOCK_SIZE = 2, 4, 4
PICTURES = {key_of(name): num_rows for name, num_rows in (("ape", 2), ("bee", 3), ("cat", 3), ("dog", 5))}
NUM_PAGES_OF_ALL = sum(-(-num_rows // ROWS_PER_PAGE) for num_rows in PICTURES.values())
EC_TIMEOUT_S, LEASE_S = 600.0, 2.0
STEP_S = 0.001
UNWRITTEN = 0xA5

Causes = set[tuple[str, ...]]  # what was done to a history: (kind of fault, whom it met ...)


class InjectedError(Exception):
    """The device failed because the history says so."""


def rows_of(key: str) -> NDArray[np.float32]:
    """[num_rows, ROW_WIDTH]: all numbers of all pictures differ."""
    first = 1000 * (1 + list(PICTURES).index(key))
    return np.arange(first, first + PICTURES[key] * ROW_WIDTH, dtype=np.float32).reshape(-1, ROW_WIDTH)


ROWS = {key: rows_of(key) for key in PICTURES}


def next_token(values: Sequence[int]) -> int:
    return sum((place + 1) * value for place, value in enumerate(values)) % 9973 % 1000


def expected_tokens(token_ids: Sequence[int], items: Sequence[MediaItem], count: int) -> list[int]:
    """The next `count` tokens, by hand: a placeholder stands for the first number of its row."""
    values = list(token_ids)
    for item in items:
        places = [place for start, length in item.runs for place in range(start, start + length)]
        for row, place in enumerate(places):
            values[place] = int(ROWS[item.key][row, 0])
    for _ in range(count):
        values.append(next_token(values))
    return values[len(token_ids) :]


def make_config(role: str, num_pages: int, chunk: int) -> EngineConfig:
    return EngineConfig(
        model=replace(MODEL, hidden_size=ROW_WIDTH),
        role=Role.parse(role),
        is_alone=False,
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=14,
            encoder_cache_rows=num_pages * ROWS_PER_PAGE,
            rows_per_page=ROWS_PER_PAGE,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=3, max_encoder_rows=6),
        connector=ConnectorConfig(ec_timeout_s=EC_TIMEOUT_S, ec_lease_s=LEASE_S),
    )


class WatchedNetwork(FakeNetwork):
    """Looks at the destination's whole arena around each copy."""

    def __init__(self) -> None:
        super().__init__(num_ticks=0)
        self.workers: dict[str, RigWorker] = {}

    def begin(self, read: FakeRead) -> None:
        with self._watch(read):
            super().begin(read)

    def deliver(self, *reads: FakeRead) -> None:
        for read in reads or tuple(self.pending):
            with self._watch(read):
                super().deliver(read)

    @contextmanager
    def _watch(self, read: FakeRead) -> Generator[None, None, None]:
        worker = self.workers[read.consumer.worker_id]
        if read.result.cancelled() or worker.is_dead:
            yield
            return
        assert read.pages in worker.pages_filling(), "a read goes to pages that are not reserved for it"
        before, had_begun = read.arena.pages.copy(), read.has_begun
        yield
        changed = set(np.nonzero((read.arena.pages != before).any(axis=1))[0].tolist())
        assert changed <= set(read.pages), "a read has written outside the pages reserved for it"
        if not had_begun and read.result.done():
            error = read.result.exception()
            was_refused = isinstance(error, TransferError) and error.reason != FailureReason.CORRUPT
            assert not (changed and was_refused), "a read that was refused has copied something"


@dataclass(slots=True)
class RunnerRequest:
    token_ids: list[int]
    items: tuple[MediaItem, ...]
    block_ids: list[int]
    num_computed: int


class ConnectorRunner:
    """Obeys a `SchedulerOutput` as `ModelRunner` does; embeddings are compared with the picture's when they are gathered."""

    def __init__(self, config: EngineConfig, plane: FakeDataPlane, on_progress: Callable[[], None]) -> None:
        arena = Arena.create("ec", config.num_encoder_pages, config.encoder_page_nbytes)
        arena.pages[:] = UNWRITTEN
        self.cache = EncoderCache(arena, config, torch.device("cpu"))
        self.connector = get_ec_connector(config, self.cache, plane, on_progress)
        self.requests: dict[str, RunnerRequest] = {}
        self.loads: dict[str, ECLoad] = {}  # started and not reported
        self.failing_keys: set[str] = set()  # the tower cannot encode them in the next step
        self.is_failing = False  # the device fails in the next step
        self.error: BaseException | None = None  # of this step
        self._output = SchedulerOutput()  # of this step
        self._result = ModelRunnerOutput()
        self._kv: dict[int, int] = {}  # slot -> value

    def heal(self) -> None:
        self.is_failing = False
        self.failing_keys.clear()

    @property
    def encoded_keys(self) -> list[str]:
        return [encode.key for encode in self._output.encodes]

    def has_failed(self, key: str) -> bool:
        """Whether an item could not be encoded or published in this step."""
        return self.error is not None or key in self._result.failed_encodes

    @property
    def finished_loads(self) -> set[str]:
        """Those that this step reported; a step that failed reports by the next."""
        output = self._result.ec_connector_output
        return output.finished_loads if output is not None and self.error is None else set()

    @property
    def failed_loads(self) -> dict[str, FailureReason]:
        output = self._result.ec_connector_output
        return output.failed_loads if output is not None and self.error is None else {}

    def execute_model(self, scheduler_output: SchedulerOutput, /) -> ModelRunnerOutput:
        self.error, self._output, self._result = None, scheduler_output, ModelRunnerOutput()
        # The bound on the wait is in real seconds: what was not delivered when it was started is not waited for.
        metadata = replace(scheduler_output.ec_connector_metadata, timeout_s=0.0)
        self.loads.update((load.ticket.key, load) for load in metadata.loads)
        self.cache.recycle(scheduler_output.freed_pages)
        try:
            with self.connector.step(replace(scheduler_output, ec_connector_metadata=metadata)) as ec_output:
                self._result.ec_connector_output = ec_output
                self._run()
        except BaseException as error:
            self.error = error
            raise
        return self._result

    def _run(self) -> None:
        output = self._output
        for request_id in output.finished_request_ids:
            self.requests.pop(request_id, None)
        for new in output.new_requests:
            self._add(new)
        for cached in output.cached_requests:
            self.requests[cached.request_id].block_ids += cached.new_block_ids
            assert self.requests[cached.request_id].num_computed == cached.num_computed_tokens
        for encode in output.encodes:
            if encode.key in self.failing_keys:
                self._result.failed_encodes[encode.key] = "the tower failed."
                continue
            self.cache.write(encode.key, encode.pages, torch.from_numpy(ROWS[encode.key]))
        if self.is_failing:
            raise InjectedError("out of memory")
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._compute(request_id, num_tokens)

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self.requests, "a request is new twice"
        self.requests[new.request_id] = RunnerRequest(
            list(new.token_ids), new.items, list(new.block_ids), new.num_computed_tokens
        )

    def _compute(self, request_id: str, num_tokens: int) -> None:
        request = self.requests[request_id]
        start, end = request.num_computed, request.num_computed + num_tokens
        assert start < end <= len(request.token_ids), "a window is empty or too long"
        values = dict(zip(range(start, end), request.token_ids[start:end], strict=True))
        for item in request.items:
            rows = self._rows_of_window(item, start, end)
            if rows is None:
                self._result.stalled_requests.add(request_id)
                return
            places = [place for first, length in item.runs for place in range(first, first + length) if start <= place < end]
            values.update(zip(places, rows, strict=True))
        for place, value in values.items():
            self._kv[self._slot(request, place)] = value
        request.num_computed = end
        if end == len(request.token_ids):
            token = next_token([self._kv[self._slot(request, place)] for place in range(end)])
            request.token_ids.append(token)
            self._result.sampled[request_id] = TokenLogprob(token, 0.0)

    def _rows_of_window(self, item: MediaItem, start: int, end: int) -> list[int] | None:
        """The first number of each row that the window reads; None if the rows were to come in this step, and did not."""
        first, last = item.rows_before(start), item.rows_before(end)
        if first == last:
            return []
        cached = self.cache.find(item.key)
        if cached is None:
            arriving = {load.ticket.key for load in self._output.ec_connector_metadata.loads}
            assert item.key in arriving or item.key in self._result.failed_encodes, "scheduled without its embeddings"
            return None
        assert cached.pages == self._output.item_pages[item.key], "the picture is in other pages than the scheduler says"
        rows = self.cache.gather([RowWindow(cached.pages, first, last)]).numpy()
        assert rows.tobytes() == ROWS[item.key][first:last].tobytes(), f"wrong rows for {item.key[:6]}: {rows[:, 0]}"
        return [int(value) for value in rows[:, 0]]

    def _slot(self, request: RunnerRequest, place: int) -> int:
        return request.block_ids[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE


@dataclass(slots=True)
class LiveRequest:
    keys: set[str]
    arrived_at: float
    tokens_to_come: list[int]
    has_slept: bool = False  # the clock was turned past its deadline while messages for it were under way


class RigWorker:
    """A worker as its front sees it: calls, and steps that give events."""

    def __init__(
        self,
        worker_id: str,
        config: EngineConfig,
        network: WatchedNetwork,
        clock: TurnedClock,
        causes: Causes,
        verify_checksums: bool,
    ) -> None:
        self.id = worker_id
        self.config = config
        self.is_dead = False
        self.is_awake = False
        self.causes = causes
        self._clock = clock
        self._network = network
        network.workers[worker_id] = self
        self.runner = ConnectorRunner(config, FakeDataPlane(worker_id, network, verify_checksums), self.wake)
        self.core = EngineCore(config, self.runner, clock)
        self.live: dict[str, LiveRequest] = {}
        self.calls: dict[str, str] = {}  # encode calls without an answer: id -> key
        self.leases: dict[str, tuple[ECTicket, float]] = {}  # encode id -> ticket, end
        self.issued: list[ECTicket] = []
        self.preparations: list[str] = []
        self.num_encodes: Counter[str] = Counter()
        self._num_failed_encodes: Counter[str] = Counter()
        self._known_ids: list[str] = []  # of all requests that have come here
        self._aborted: set[str] = set()
        self._released: set[str] = set()
        self._told: set[tuple[str, str]] = set()  # (request id, key) of each first want
        self._generations = self.runner.cache.arena.generations.copy()

    # --- calls ------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self.is_awake = True

    def add_request(self, spec: RequestSpec) -> None:
        tokens = expected_tokens(spec.token_ids, spec.items, spec.sampling.max_tokens)
        self.live[spec.request_id] = LiveRequest({item.key for item in spec.items}, self._clock.now, tokens)
        self._known_ids.append(spec.request_id)
        self.core.add_request(spec)
        self._called()

    def add_encode(self, spec: EncodeSpec) -> None:
        self.calls[spec.encode_id] = spec.key
        self.core.add_encode(spec)
        self._called()

    def prepare(self, key: str, failure: FailureReason | None = None) -> None:
        """The first preparation of the item that is under way has ended."""
        self.preparations.remove(key)
        if failure is None:
            self.core.scheduler.prepared(key, {"key": key}, 0.0)
        else:
            self.causes.add((failure, self.id, key))
            self.core.scheduler.preparation_failed(key, "the picture is broken.", failure)
        self._called()

    def announce(self, ticket: ECTicket) -> None:
        self.core.announce(ticket)
        self._called()

    def item_failed(self, request_id: str, key: str, reason: FailureReason) -> None:
        self.core.item_failed(request_id, key, "the picture cannot be had.", reason)
        self._called()

    def abort(self, id: str) -> None:
        self._aborted.add(id)
        for book in (self.live, self.calls, self.leases):
            book.pop(id, None)
        self.core.scheduler.abort(id)
        self._called()

    def release(self, id: str) -> None:
        self._released.add(id)
        self.leases.pop(id, None)
        self.core.scheduler.release(id)
        self._called()

    def _called(self) -> None:
        self.is_awake = True
        self._check_holders()

    def die(self) -> None:
        self.is_dead = True
        self.causes.add(("killed", self.id))
        self.close()

    def close(self) -> None:
        self._network.kill(self.id)
        self.runner.connector.close()
        self.runner.cache.close()

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the engine thread would step now."""
        return self.is_awake or self.core.seconds_to_deadline() == 0.0

    def step(self) -> list[EngineEvent]:
        self._clock.now += STEP_S
        self.leases = {id: lease for id, lease in self.leases.items() if lease[1] > self._clock.now}
        self.is_awake = False
        events, has_moved = self.core.step()
        self.is_awake |= has_moved
        if self.runner.error is not None and not isinstance(self.runner.error, InjectedError):
            raise self.runner.error
        self._check_work()
        for event in events:
            self._take(event)
        self.runner.heal()
        self._check_holders()
        self._check_books()
        self._check_memory()
        return events

    def _take(self, event: EngineEvent) -> None:
        match event:
            case PreparationNeeded():
                self.preparations.append(event.key)
            case ECNeeded():
                self._check_need(event)
            case NewTokens() if event.id in self.live:
                for token in event.tokens:
                    assert token.token_id == self.live[event.id].tokens_to_come.pop(0), f"{event.id} got a wrong token"
            case Finished() | Failed() if event.id not in self.live:
                assert event.id in self._aborted, f"{event.id} ended twice"
            case Finished():
                assert not self.live.pop(event.id).tokens_to_come, f"{event.id} ended early"
            case Failed():
                self._check_failure(event, self.live.pop(event.id))
            case Encoded():
                self.calls.pop(event.id, None)
                if event.ticket is not None:
                    self.issued.append(event.ticket)
                    self.leases[event.id] = event.ticket, self._clock.now + LEASE_S
            case EncodeFailed():
                self.calls.pop(event.id, None)
                self.leases.pop(event.id, None)  # the call was repeated, and gave up what it had
                assert self._may_fail_encode(event), f"{self.id} could not encode {event.key[:6]}: {event.message}"
            case _:
                pass

    # --- what must have a cause ---------------------------------------------------------------------------------------

    def _check_work(self) -> None:
        """What the step encoded and loaded."""
        runner, num_evicted = self.runner, self.core.scheduler.cache.num_evicted
        for key in runner.encoded_keys:
            self.num_encodes[key] += 1
            assert self.num_encodes[key] <= 1 + self._num_failed_encodes[key] + num_evicted, f"{self.id} encoded {key[:6]} again"
            self._num_failed_encodes[key] += runner.has_failed(key)
        for key in runner.finished_loads:
            ticket = runner.loads.pop(key).ticket
            # An old copy of the picture may lie where a misdirected ticket points: then it brings the right rows.
            is_right = self._is_genuine(ticket) or ("misdirected", self.id, key) in self.causes
            assert is_right, f"{self.id} took {key[:6]} from a ticket that nobody issued"
        for key, reason in runner.failed_loads.items():
            ticket = runner.loads.pop(key).ticket
            assert self._may_fail_load(ticket, reason), f"{self.id} could not load {key[:6]} ({reason}), and nothing was wrong"

    def _may_fail_load(self, ticket: ECTicket, reason: FailureReason) -> bool:
        if not self._is_genuine(ticket):
            return reason != FailureReason.INTERNAL
        match reason:
            case FailureReason.STALE:
                producer = self._network.workers[ticket.data.producer]
                return all(leased != ticket or end <= self._clock.now for leased, end in producer.leases.values())
            case FailureReason.CORRUPT:
                return ("cut", self.id, ticket.key) in self.causes
            case FailureReason.PEER_LOST:
                return ("killed", ticket.data.producer) in self.causes
            case FailureReason.TIMEOUT:
                return ("slow",) in self.causes
            case _:
                return False

    def _is_genuine(self, ticket: ECTicket) -> bool:
        producer = self._network.workers.get(ticket.data.producer)
        return producer is not None and ticket in producer.issued

    def _may_fail_encode(self, event: EncodeFailed) -> bool:
        match event.reason:
            case FailureReason.MISSING:
                return event.id in self._released
            case FailureReason.TIMEOUT:
                return ("slept",) in self.causes
            case _:
                return self.runner.has_failed(event.key) or (event.reason, self.id, event.key) in self.causes

    def _check_need(self, event: ECNeeded) -> None:
        if event.reason == FailureReason.MISSING:
            assert (event.id, event.key) not in self._told, f"{event.id} wants {event.key[:6]} for the first time again"
            self._told.add((event.id, event.key))
        elif event.reason == FailureReason.EVICTED:
            assert self.core.scheduler.cache.num_evicted, f"{event.key[:6]} is said to be evicted"
        else:
            assert self.runner.failed_loads.get(event.key) == event.reason, f"{event.key[:6]} is said to have failed"

    def _check_failure(self, event: Failed, request: LiveRequest) -> None:
        match event.reason:
            case FailureReason.BAD_MEDIA:
                has_cause = event.status == 400 and ("refused", event.id) in self.causes
            case FailureReason.MISMATCH:
                has_cause = event.status == 503 and any(("forged", self.id, key) in self.causes for key in request.keys)
            case FailureReason.TIMEOUT:
                is_late = self._clock.now >= request.arrived_at + EC_TIMEOUT_S
                has_cause = event.status == 503 and is_late and self._may_be_late(event.id, request)
            case FailureReason.INTERNAL:
                has_cause = event.status == 503 and ("exhausted", event.id) in self.causes
            case _:
                has_cause = event.status == 500 and isinstance(self.runner.error, InjectedError)
        assert has_cause, f"{event.id} failed, and nothing was wrong: {event}"

    def _may_be_late(self, request_id: str, request: LiveRequest) -> bool:
        """Something of its own was lost; or, in a small cache, of a request that may be before it in line and hold the room that it needs."""
        cache = self.core.scheduler.cache
        request_ids = [request_id] if cache.num_pages >= NUM_PAGES_OF_ALL else self._known_ids
        names = [*(("lost", each) for each in request_ids), *(("lost", self.id, key) for key in request.keys)]
        return request.has_slept or any(name in self.causes for name in names)

    # --- what must be true ------------------------------------------------------------------------------------------

    def pages_filling(self) -> list[tuple[int, ...]]:
        cache = self.core.scheduler.cache
        return [cache.pages(key) for key in PICTURES if cache.is_known(key) and not cache.is_resident(key)]

    def _check_holders(self) -> None:
        """Only who is here holds anything."""
        scheduler = self.core.scheduler
        scheduler.check_invariants()
        keys = {key for request in self.live.values() for key in request.keys}
        keys.update(self.calls.values(), (ticket.key for ticket, _ in self.leases.values()))
        assert scheduler.cache.num_pinned <= len(keys), f"{self.id} has pins of nobody"
        assert scheduler.num_item_waits <= sum(len(request.keys) for request in self.live.values())
        assert scheduler.num_queued_encodes <= len(set(self.calls.values())), f"{self.id} has encodes queued for nobody"

    def _check_books(self) -> None:
        scheduler = self.core.scheduler
        assert scheduler.num_leases == len(self.leases), f"{self.id} has {scheduler.num_leases} leases: {self.leases}"
        assert scheduler.num_running + scheduler.num_waiting == len(self.live)

    def _check_memory(self) -> None:
        """Every picture that is here is right; every ticket that the generations say is good stands for its picture."""
        arena, cache = self.runner.cache.arena, self.core.scheduler.cache
        self.runner.cache.check_invariants()
        assert (arena.generations >= self._generations).all(), "a generation went back"
        self._generations = arena.generations.copy()
        for key in PICTURES:
            if cache.is_resident(key):
                cached = self.runner.cache.find(key)
                assert cached is not None and cached.pages == cache.pages(key), f"{self.id} has {key[:6]} on one side only"
                assert self._content(cached.pages, key) == ROWS[key].tobytes(), f"{self.id} has wrong rows of {key[:6]}"
        for ticket in self.issued:
            if arena.generations_of(ticket.data.pages) == ticket.data.generations:
                content = self._content(ticket.data.pages, ticket.key)
                assert content == ROWS[ticket.key].tobytes(), f"{self.id}: a ticket for {ticket.key[:6]} stands for other rows"
        for ticket, _ in self.leases.values():
            assert arena.generations_of(ticket.data.pages) == ticket.data.generations, f"{self.id} gave up leased pages"

    def _content(self, pages: Sequence[int], key: str) -> bytes:
        return self.runner.cache.arena.pages[list(pages)].tobytes()[: ROWS[key].nbytes]

    def check_nothing_is_held(self) -> None:
        scheduler = self.core.scheduler
        gauges = (scheduler.num_running, scheduler.num_waiting, scheduler.num_leases, scheduler.num_item_waits)
        assert gauges == (0, 0, 0, 0), f"{self.id} holds on (running, waiting, leases, waits): {gauges}"
        assert scheduler.num_queued_encodes == scheduler.cache.num_pinned == 0
        assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks
        assert not (self.runner.requests or self.runner.loads or self.pages_filling())
        cache = scheduler.cache
        assert cache.allocate("all", cache.num_pages * ROWS_PER_PAGE, LAST) is not None, f"{self.id} lost pages"
        cache.discard("all")
