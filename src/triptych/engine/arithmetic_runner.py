"""`ArithmeticRunner`: stands in for the model runner where only decisions are under test.

It reproduces the runner's contract: it keeps what is written to KV blocks and to encoder-cache pages, reads it back from just the blocks and
pages that the scheduler names, publishes and loads through a shared `Fabric` with generations, and reports as the runner does. The next token
is arithmetic over what it reads, which a reader can compute by hand from prompt and item keys (`expected_tokens`):

    row of an item  ENCODE * digits(key) + row            digits: the key's first 12 hex digits mod PRIME
    KV              PREFILL * (place + 1) * id            of a prompt token; a placeholder has its row in place of the id
                    DECODE * (place + 1) * id             of a generated token
    next token      FIRST_ID + (sum of the KV + seed) mod PRIME mod SPAN
    prompt logprob  -(place + id mod 16 / 16)

Each stage has a constant of its own, so that a wrong route, a wrong block, a stale row, or a lost, doubled or moved token changes every later
token. It does not reproduce time, threads or floating point.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triptych.config import EngineConfig, ModelConfig
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import (
    CachedRequestData,
    ECConnectorOutput,
    ECLoad,
    ECTicket,
    KVConnectorOutput,
    KVLoad,
    KVPart,
    KVTicket,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprob,
)
from triptych.sampling_params import SamplingParams
from triptych.transfer.ticket import Ticket

ENCODE, PREFILL, DECODE = 3, 5, 7
PRIME = 9973
FIRST_ID, SPAN = 300, 700  # next tokens are 300 .. 999
GARBAGE = 777_777  # what a page or slot reads that nobody wrote
LOGPROB, SECOND_BEST = -0.5, (7, -2.0)  # of every token

MODEL = ModelConfig(
    path=Path("/nowhere"),
    name="arithmetic",
    family="arithmetic",
    weights_digest="0",
    dtype="float32",
    max_model_len=4096,
    vocab_size=20_000,
    hidden_size=1,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)


def row_value(key: str, row: int) -> int:
    """Embedding `row` of an item."""
    return ENCODE * (int(key[:12], 16) % PRIME) + row


def expected_tokens(token_ids: Sequence[int], items: Sequence[MediaItem], count: int, seed: int = 0) -> list[int]:
    """The first `count` tokens of the answer to a prompt, by hand."""
    values = list(token_ids)
    for item in items:
        places = [place for start, length in item.runs for place in range(start, start + length)]
        for row, place in enumerate(places):
            values[place] = row_value(item.key, row)
    kv = sum(PREFILL * (place + 1) * value for place, value in enumerate(values))
    tokens: list[int] = []
    for place in range(len(values), len(values) + count):
        tokens.append(_next_token(kv, seed))
        kv += DECODE * (place + 1) * tokens[-1]
    return tokens


def expected_prompt_logprob(place: int, token_id: int, num_alternatives: int) -> TokenLogprob:
    logprob = -(place + token_id % 16 / 16)
    return TokenLogprob(token_id, logprob, ((token_id, logprob), SECOND_BEST)[:num_alternatives], rank=1)


def _next_token(kv: int, seed: int) -> int:
    return FIRST_ID + (kv + seed) % PRIME % SPAN


@dataclass(slots=True)
class Fabric:
    """The data plane between arithmetic runners. `is_holding`: loads end when it is set to False again. `failures`: the next load of a key
    (or of a part of a request's KV) ends with that reason. A runner that is not in `runners` is gone, and its memory with it."""

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
    num_prompt_tokens: int
    sampling: SamplingParams
    items: tuple[MediaItem, ...]
    block_ids: list[int]
    num_computed: int


class ArithmeticRunner:
    """`script`: the first tokens of every answer, in place of the arithmetic's. `held`: the keys and parts of requests' KV whose loads are
    under way until whoever put them in takes them out."""

    def __init__(self, config: EngineConfig, fabric: Fabric, worker_id: str) -> None:
        self._config = config
        self._fabric = fabric
        self._worker_id = worker_id
        self.memories = {"ec": Memory(), "kv": Memory()}
        self._requests: dict[str, ArithmeticRequest] = {}
        self._items: dict[str, tuple[int, tuple[int, ...]]] = {}  # resident key -> number of rows, pages
        self._ec_loads: list[ECLoad] = []
        self._kv_loads: list[KVLoad] = []
        self.encoded_keys: list[str] = []
        self.held: set[str | KVPart] = set()
        self.num_blocks_read = 0
        self.script: tuple[int, ...] = ()
        self._published_blocks: dict[str, tuple[int, ...]] = {}  # by request id
        fabric.runners[worker_id] = self

    def lose_kv(self, request_id: str) -> None:
        """Whoever reads the request's published blocks from now on finds them stale. What they hold here stays as it is."""
        generations = self.memories["kv"].generations
        for block in self._published_blocks.get(request_id, ()):
            generations[block] = generations.get(block, 0) + 1

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
        self._items = {key: item for key, item in self._items.items() if item[1][0] not in output.freed_pages}
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
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            sampling=new.sampling,
            items=new.items,
            block_ids=list(new.block_ids),
            num_computed=new.num_computed_tokens,
        )

    def _extend(self, cached: CachedRequestData) -> None:
        request = self._requests[cached.request_id]
        assert request.num_computed == cached.num_computed_tokens, "scheduler and runner disagree on what is computed"
        request.block_ids.extend(cached.new_block_ids)

    def _finish_loads(self, ec_output: ECConnectorOutput, kv_output: KVConnectorOutput) -> None:
        ec_loads, self._ec_loads = self._ec_loads, []
        for load in ec_loads:
            key, ticket = load.ticket.key, load.ticket
            if key in self.held or (self._fabric.is_holding and not load.is_needed):
                self._ec_loads.append(load)
                continue
            failure = self._read(ticket.data, key, load.pages)
            if failure is None:
                ec_output.finished_loads.add(key)
                self._items[key] = (ticket.num_rows, load.pages)
            else:
                ec_output.failed_loads[key] = failure
        kv_loads, self._kv_loads = self._kv_loads, []
        for load in kv_loads:
            if load.part in self.held or self._fabric.is_holding:
                self._kv_loads.append(load)
                continue
            self.num_blocks_read += len(load.block_ids)
            failure = self._read(load.ticket.data.without_first(load.num_skipped), load.request_id, load.block_ids)
            if failure is None:
                kv_output.finished_loads.add(load.part)
            else:
                kv_output.failed_loads[load.part] = failure

    def _read(self, ticket: Ticket, name: str, pages: Sequence[int]) -> FailureReason | None:
        content = self._fabric.read(ticket, name)
        if isinstance(content, FailureReason):
            return content
        self.memories[ticket.arena].fill(pages, content)
        return None

    def _encode(self, output: SchedulerOutput) -> None:
        for each in output.encodes:
            self.encoded_keys.append(each.key)
            self._items[each.key] = (each.num_rows, each.pages)
            for row in range(each.num_rows):
                value = row_value(each.key, row)
                self.memories["ec"].write(each.pages, self._config.cache.rows_per_page, row, value)

    def _compute(self, request_id: str, num_tokens: int, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        request = self._requests[request_id]
        end = request.num_computed + num_tokens
        assert 0 < num_tokens <= len(request.token_ids) - request.num_computed, "a window is empty or too long"
        needed = {item.key for item in request.items if item.rows_before(end) > item.rows_before(request.num_computed)}
        if not needed <= self._items.keys():
            result.stalled_requests.add(request_id)
            return
        block_size, memory = self._config.cache.block_size, self.memories["kv"]
        for place in range(request.num_computed, end):
            constant = PREFILL if place < request.num_prompt_tokens else DECODE
            memory.write(request.block_ids, block_size, place, constant * (place + 1) * self._value_at(request, place, output))
        self._report_prompt(request_id, request, end, result)
        request.num_computed = end
        if end == len(request.token_ids):
            index = end - request.num_prompt_tokens
            kv = sum(memory.read(request.block_ids, block_size, place) for place in range(end))
            token = self.script[index] if index < len(self.script) else _next_token(kv, request.sampling.seed)
            request.token_ids.append(token)
            result.sampled[request_id] = TokenLogprob(token, LOGPROB, ((token, LOGPROB), SECOND_BEST), rank=1)

    def _report_prompt(self, request_id: str, request: ArithmeticRequest, end: int, result: ModelRunnerOutput) -> None:
        num_alternatives = request.sampling.prompt_logprobs
        places = range(request.num_computed + 1, min(end + 1, request.num_prompt_tokens))
        if num_alternatives is not None and places and len(request.token_ids) == request.num_prompt_tokens:
            tokens = (expected_prompt_logprob(place, request.token_ids[place], num_alternatives) for place in places)
            result.prompt_logprobs[request_id] = tuple(tokens)

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
        config, ec, kv = self._config, output.ec_connector_metadata, output.kv_connector_metadata
        for key in (*ec.saves, *ec.republish):
            num_rows, pages = self._items[key]
            data = self.memories["ec"].ticket(self._worker_id, "ec", pages, ec.lease_s)
            ec_output.published[key] = ECTicket(key, num_rows, config.model.row_width, config.model.dtype, data)
        for save in kv.saves:
            if save.request_id in result.stalled_requests:
                continue
            self._published_blocks[save.request_id] = save.block_ids
            data = self.memories["kv"].ticket(self._worker_id, "kv", save.block_ids, kv.lease_s)
            kv_output.published[save.request_id] = KVTicket(
                request_id=save.request_id,
                num_tokens=save.num_tokens,
                block_size=config.cache.block_size,
                block_nbytes=config.kv_block_nbytes,
                dtype=config.model.dtype,
                data=data,
                first_block=save.first_block,
            )
