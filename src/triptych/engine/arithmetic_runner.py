"""`ArithmeticRunner`: stands in for the model runner where only decisions are under test.

It reproduces the runner's contract: it keeps what is written to KV blocks and to encoder-cache pages, reads it back from just the blocks and
pages that the scheduler names, publishes and loads through a shared `Fabric` with generations, and reports as the runner does. The next token
is arithmetic over what it reads, so that a wrong block, a stale row, a skipped or doubled token changes every later token; a reader can compute
it by hand from prompt and item keys (`expected_tokens`). It does not reproduce time, threads or floating point.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.config import EngineConfig
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import (
    CachedRequestData,
    ECConnectorOutput,
    ECLoad,
    ECTicket,
    KVConnectorOutput,
    KVLoad,
    KVTicket,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprob,
)
from triptych.transfer.ticket import Ticket

PRIME = 9973
NUM_TOKENS = 1000  # next tokens are 0 .. NUM_TOKENS - 1
GARBAGE = 777_777  # what a page or slot reads that nobody wrote


def row_value(key: str, row: int) -> int:
    """Embedding `row` of an item."""
    return (int(key[:12], 16) + 7 * row) % PRIME


def expected_tokens(token_ids: Sequence[int], items: Sequence[MediaItem], count: int) -> list[int]:
    """The next `count` tokens, by hand."""
    values = list(token_ids)
    for item in items:
        places = [place for start, length in item.runs for place in range(start, start + length)]
        for row, place in enumerate(places):
            values[place] = row_value(item.key, row)
    for _ in range(count):
        values.append(_next_token(values))
    return values[len(token_ids) :]


def _next_token(values: Sequence[int]) -> int:
    return sum((place + 1) * value for place, value in enumerate(values)) % PRIME % NUM_TOKENS


@dataclass(slots=True)
class Fabric:
    """The data plane between arithmetic runners. `is_holding`: loads end when it is set to False again. `failures`: the next load of a key
    (or request) ends with that reason."""

    runners: "dict[str, ArithmeticRunner]" = field(default_factory=dict)
    is_holding: bool = False
    failures: dict[str, FailureReason] = field(default_factory=dict[str, FailureReason])

    def read(self, ticket: Ticket, name: str) -> "list[dict[int, int]] | FailureReason":
        """The pages' content as offset -> value."""
        if name in self.failures:
            return self.failures.pop(name)
        producer = self.runners.get(ticket.producer)
        if producer is None:
            return FailureReason.PEER_LOST
        memory = producer.memories[ticket.arena]
        if any(memory.generations.get(page, 0) != old for page, old in zip(ticket.pages, ticket.generations, strict=True)):
            return FailureReason.STALE
        return [dict(memory.pages.get(page, {})) for page in ticket.pages]


@dataclass(slots=True)
class Memory:
    """Pages (or blocks): what was written where, and each page's generation."""

    pages: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    generations: dict[int, int] = field(default_factory=dict[int, int])

    def recycle(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.generations[page] = self.generations.get(page, 0) + 1
            self.pages.pop(page, None)

    def write(self, pages: Sequence[int], page_size: int, index: int, value: int) -> None:
        self.pages.setdefault(pages[index // page_size], {})[index % page_size] = value

    def read(self, pages: Sequence[int], page_size: int, index: int) -> int:
        return self.pages.get(pages[index // page_size], {}).get(index % page_size, GARBAGE)

    def fill(self, pages: Sequence[int], content: Sequence[dict[int, int]]) -> None:
        for page, values in zip(pages, content, strict=True):
            self.pages[page] = dict(values)

    def ticket(self, producer: str, arena: str, pages: Sequence[int], lease_s: float) -> Ticket:
        generations = tuple(self.generations.get(page, 0) for page in pages)
        return Ticket(producer, arena, tuple(pages), generations, 1, len(pages), "", lease_s, {"fabric": producer})


@dataclass(slots=True)
class ArithmeticRequest:
    token_ids: list[int]
    items: tuple[MediaItem, ...]
    block_ids: list[int]
    num_computed: int


class ArithmeticRunner:
    def __init__(self, config: EngineConfig, fabric: Fabric, worker_id: str) -> None:
        self._config = config
        self._fabric = fabric
        self._worker_id = worker_id
        self.memories = {"ec": Memory(), "kv": Memory()}
        self._requests: dict[str, ArithmeticRequest] = {}
        self._item_rows: dict[str, int] = {}  # resident key -> rows
        self._item_pages: dict[str, tuple[int, ...]] = {}  # resident key -> pages
        self._ec_loads: list[ECLoad] = []
        self._kv_loads: list[KVLoad] = []
        self.encoded_keys: list[str] = []
        fabric.runners[worker_id] = self

    def execute_model(self, scheduler_output: SchedulerOutput, /) -> ModelRunnerOutput:
        output = scheduler_output
        ec_output, kv_output = ECConnectorOutput(), KVConnectorOutput()
        result = ModelRunnerOutput(ec_connector_output=ec_output, kv_connector_output=kv_output)
        self._update_states(output)
        self._ec_loads.extend(output.ec_connector_metadata.loads)
        self._kv_loads.extend(output.kv_connector_metadata.loads)
        self._finish_loads(ec_output, kv_output)
        self._encode(output)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._compute(request_id, num_tokens, output, result)
        self._publish(output, result, ec_output, kv_output)
        return result

    def _update_states(self, output: SchedulerOutput) -> None:
        self.memories["ec"].recycle(output.freed_pages)
        self.memories["kv"].recycle(output.freed_block_ids)
        for request_id in output.finished_request_ids:
            self._requests.pop(request_id, None)  # unknown if the step that brought it failed
        for new in output.new_requests:
            self._add(new)
        for cached in output.cached_requests:
            self._extend(cached)

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self._requests, "a request is new twice"
        self._requests[new.request_id] = ArithmeticRequest(
            list(new.token_ids), new.items, list(new.block_ids), new.num_computed_tokens
        )

    def _extend(self, cached: CachedRequestData) -> None:
        request = self._requests[cached.request_id]
        assert request.num_computed == cached.num_computed_tokens, "scheduler and runner disagree on what is computed"
        request.block_ids.extend(cached.new_block_ids)

    def _finish_loads(self, ec_output: ECConnectorOutput, kv_output: KVConnectorOutput) -> None:
        waiting_ec: list[ECLoad] = []
        for load in self._ec_loads:
            if self._fabric.is_holding and not load.is_needed:
                waiting_ec.append(load)
                continue
            content = self._fabric.read(load.ticket.data, load.ticket.key)
            if isinstance(content, FailureReason):
                ec_output.failed_loads[load.ticket.key] = content
                continue
            self.memories["ec"].fill(load.pages, content)
            self._item_rows[load.ticket.key] = load.ticket.num_rows
            self._item_pages[load.ticket.key] = load.pages
            ec_output.finished_loads.add(load.ticket.key)
        waiting_kv: list[KVLoad] = []
        for load in self._kv_loads:
            if self._fabric.is_holding:
                waiting_kv.append(load)
                continue
            content = self._fabric.read(load.ticket.data, load.request_id)
            if isinstance(content, FailureReason):
                kv_output.failed_loads[load.request_id] = content
                continue
            self.memories["kv"].fill(load.block_ids, content)
            kv_output.finished_loads.add(load.request_id)
        self._ec_loads, self._kv_loads = waiting_ec, waiting_kv

    def _encode(self, output: SchedulerOutput) -> None:
        for each in output.encodes:
            self.encoded_keys.append(each.key)
            for row in range(each.num_rows):
                value = row_value(each.key, row)
                self.memories["ec"].write(each.pages, self._config.cache.rows_per_page, row, value)

    def _compute(self, request_id: str, num_tokens: int, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        request = self._requests[request_id]
        failed = result.ec_connector_output.failed_loads if result.ec_connector_output is not None else {}
        end = request.num_computed + num_tokens
        assert 0 < num_tokens <= len(request.token_ids) - request.num_computed, "a window is empty or too long"
        needed = [item for item in request.items if item.rows_before(end) > item.rows_before(request.num_computed)]
        if any(item.key in failed for item in needed):
            result.stalled_requests.add(request_id)
            return
        for place in range(request.num_computed, end):
            value = self._value_at(request, place, output)
            self.memories["kv"].write(request.block_ids, self._config.cache.block_size, place, value)
        request.num_computed = end
        if end == len(request.token_ids):
            values = [self.memories["kv"].read(request.block_ids, self._config.cache.block_size, p) for p in range(end)]
            token = _next_token(values)
            request.token_ids.append(token)
            result.sampled[request_id] = TokenLogprob(token, 0.0)

    def _value_at(self, request: ArithmeticRequest, place: int, output: SchedulerOutput) -> int:
        for item in request.items:
            for start, length in item.runs:
                if start <= place < start + length:
                    row = item.rows_before(place)
                    return self.memories["ec"].read(output.item_pages[item.key], self._config.cache.rows_per_page, row)
        return request.token_ids[place]

    def _publish(
        self, output: SchedulerOutput, result: ModelRunnerOutput, ec_output: ECConnectorOutput, kv_output: KVConnectorOutput
    ) -> None:
        rows = self._item_rows | {each.key: each.num_rows for each in output.encodes}
        self._item_rows = rows
        self._item_pages.update((each.key, each.pages) for each in output.encodes)
        metadata = output.ec_connector_metadata
        for key in (*metadata.saves, *metadata.republish):
            data = self.memories["ec"].ticket(self._worker_id, "ec", self._item_pages[key], metadata.lease_s)
            ec_output.published[key] = ECTicket(key, rows[key], self._config.model.row_width, self._config.model.dtype, data)
        kv_metadata = output.kv_connector_metadata
        for save in kv_metadata.saves:
            if save.request_id in result.stalled_requests:
                continue
            data = self.memories["kv"].ticket(self._worker_id, "kv", save.block_ids, kv_metadata.lease_s)
            block_size = self._config.cache.block_size
            kv_output.published[save.request_id] = KVTicket(
                save.request_id, save.num_tokens, block_size, self._config.kv_block_nbytes, self._config.model.dtype, data
            )
