"""Holds a scheduler to what docs/scheduler.md promises, from its orders alone: it keeps its own books, and never looks into the scheduler's.

Every place of a KV block and of the encoder cache is followed: what a step writes where, and what it will read there. A place's content is all
that its keys and values follow from (tenant, tokens and rows up to it), as one number for each such history.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from triptych.config import EngineConfig
from triptych.engine.request import RequestSpec
from triptych.media.item import MediaItem
from triptych.output import CachedRequestData, KVLoad, KVPart, ModelRunnerOutput, NewRequestData, SchedulerOutput

Rank = tuple[float, int]
Place = tuple[int, int]  # block, offset


@dataclass
class Watched:
    """A request, from its arrival to its end."""

    spec: RequestSpec
    rank: Rank
    token_ids: list[int]
    histories: list[int]  # of each token
    block_ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    is_known: bool = False  # to the runner: it runs
    has_begun: bool = False

    @property
    def is_decoding(self) -> bool:
        """It needs one token, and no item for it."""
        return self.is_known and self.num_computed == len(self.token_ids) - 1 and not self.items_read(1)

    def items_read(self, num_tokens: int) -> list[MediaItem]:
        """Those of whose rows a window of `num_tokens` needs any."""
        end = self.num_computed + num_tokens
        return [each for each in self.spec.items if each.rows_before(end) > each.rows_before(self.num_computed)]


@dataclass
class Rows:
    """An item in the encoder cache."""

    num_rows: int
    pages: tuple[int, ...]
    is_filled: bool


class SchedulerObserver:
    """`note_*` say what happened outside; `watch_orders` before a step runs, `watch_results` after it."""

    def __init__(self, config: EngineConfig, has_atomic_items: bool = False) -> None:
        self._config = config
        self._has_atomic_items = has_atomic_items
        self._block_size = config.cache.block_size
        self._requests: dict[str, Watched] = {}
        self._num_arrived = 0
        self._numbers: dict[tuple[object, ...], int] = {}  # histories
        self._kv: dict[Place, int] = {}  # history of what was written last
        self._kv_loads: dict[KVPart, KVLoad] = {}  # copies under way
        self._kv_leases: dict[str, tuple[tuple[int, ...], float]] = {}
        self._items: dict[str, Rows] = {}
        self._item_leases: dict[str, dict[str, float]] = {}  # key -> encode id -> end
        self.num_hits = self.num_preemptions = self.num_shared = 0  # what the traffic has led to

    # --- what happens outside ---------------------------------------------------------------------------------------

    def note_arrival(self, spec: RequestSpec, now: float) -> None:
        aging = self._config.scheduler.priority_aging_s
        rank = (now - spec.age_s + spec.priority * aging, self._num_arrived)
        self._num_arrived += 1
        request = self._requests[spec.request_id] = Watched(spec, rank, [], [])
        for token_id in spec.token_ids:
            self._grow(request, token_id)

    def note_end(self, request_id: str) -> None:
        del self._requests[request_id]

    def note_hand_over(self, request_id: str, now: float) -> None:
        blocks = tuple(self._requests[request_id].block_ids)
        self._kv_leases[request_id] = blocks, now + self._config.connector.kv_lease_s

    def note_item_lease(self, key: str, encode_id: str, now: float) -> None:
        self._item_leases.setdefault(key, {})[encode_id] = now + self._config.connector.ec_lease_s

    def note_release(self, name: str) -> None:
        self._kv_leases.pop(name, None)
        for leases in self._item_leases.values():
            leases.pop(name, None)

    def _grow(self, request: Watched, token_id: int) -> None:
        place = len(request.token_ids)
        before = request.histories[-1] if request.histories else request.spec.cache_salt
        rows = [(item.key, item.rows_before(place)) for item in request.spec.items if _has_row_at(item, place)]
        request.token_ids.append(token_id)
        request.histories.append(self._numbers.setdefault((before, token_id, *rows), len(self._numbers)))

    def reads_any(self, request_id: str, num_tokens: int, keys: Collection[str]) -> bool:
        """Whether a window needs rows of any of these."""
        return any(item.key in keys for item in self._requests[request_id].items_read(num_tokens))

    # --- the orders of a step ---------------------------------------------------------------------------------------

    def watch_orders(self, output: SchedulerOutput, now: float) -> None:
        decoding = [request for request in self._requests.values() if request.is_decoding]
        waiting = [request for request in self._requests.values() if not request.is_known]
        self._check_budgets(output)
        self._follow_pages(output, now)
        self._follow_requests(output)
        self._check_kv_loads(output)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._check_window(self._requests[request_id], num_tokens, output, now)
        self._check_reads(output)
        for request in decoding:
            self._check_decode(request, output)
        self._check_line(waiting, output)

    def _check_budgets(self, output: SchedulerOutput) -> None:
        settings = self._config.scheduler
        assert all(num_tokens > 0 for num_tokens in output.num_scheduled_tokens.values()), "an empty window"
        is_one_item = self._has_atomic_items and len(output.num_scheduled_tokens) == 1  # which may be larger than the budget
        is_within = sum(output.num_scheduled_tokens.values()) <= settings.max_num_batched_tokens
        assert is_within or is_one_item, "more tokens than the budget"
        num_rows = sum(each.num_rows for each in output.encodes)
        assert num_rows <= settings.max_encoder_rows or len(output.encodes) == 1, "more rows for the tower than its budget"

    def _follow_pages(self, output: SchedulerOutput, now: float) -> None:
        freed = set(output.freed_pages)
        for key in [key for key, rows in self._items.items() if freed & set(rows.pages)]:
            rows = self._items.pop(key)
            assert rows.is_filled, "pages are given up while they fill"
            assert set(rows.pages) <= freed, "an item is given up by halves"
            assert not any(end > now for end in self._item_leases.get(key, {}).values()), "an item is given up under its lease"
        for load in output.ec_connector_metadata.loads:
            self._place_item(load.ticket.key, load.ticket.num_rows, load.pages)
        for each in output.encodes:
            self._place_item(each.key, each.num_rows, each.pages)

    def _place_item(self, key: str, num_rows: int, pages: tuple[int, ...]) -> None:
        assert key not in self._items, "an item is brought that is here, or on its way"
        taken = {page for rows in self._items.values() for page in rows.pages}
        assert not taken & set(pages), "a page belongs to two items"
        assert len(set(pages)) == len(pages) == -(-num_rows // self._config.cache.rows_per_page), "not as many pages as rows need"
        self._items[key] = Rows(num_rows, pages, is_filled=False)

    def _follow_requests(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_request_ids:
            request = self._requests.get(request_id)
            if request is not None:  # it has not ended: it was preempted
                assert request.is_known, "the runner is to forget what it never knew"
                request.is_known, request.block_ids = False, []
                self.num_preemptions += 1
        for new in output.new_requests:
            self._follow_new(new)
        for cached in output.cached_requests:
            self._follow_cached(cached)
        ids = [each.request_id for each in (*output.new_requests, *output.cached_requests)]
        assert (ids and sorted(ids) == sorted(output.num_scheduled_tokens)) or not ids, "windows and requests differ"
        running = [request for request in self._requests.values() if request.is_known]
        assert len(running) <= self._config.scheduler.max_num_seqs, "more requests run than there are places"

    def _follow_new(self, new: NewRequestData) -> None:
        request = self._requests[new.request_id]
        assert not request.is_known, "a request is new twice"
        assert list(new.token_ids) == request.token_ids, "a request's tokens are not those that it has"
        request.is_known = request.has_begun = True
        request.block_ids, request.num_computed = list(new.block_ids), new.num_computed_tokens
        self.num_hits += new.num_computed_tokens > 0 and not request.spec.kv_tickets

    def _follow_cached(self, cached: CachedRequestData) -> None:
        request = self._requests[cached.request_id]
        assert request.is_known, "the runner does not know a request that goes on"
        assert cached.num_computed_tokens == request.num_computed, "a window does not begin where the last one ended"
        request.block_ids.extend(cached.new_block_ids)

    def _check_kv_loads(self, output: SchedulerOutput) -> None:
        for load in output.kv_connector_metadata.loads:
            assert load.part not in self._kv_loads, "two copies under one id"
            self._check_unused(load.block_ids, "a copy writes", except_for=load.request_id)
            self._kv_loads[load.part] = load

    def _check_window(self, request: Watched, num_tokens: int, output: SchedulerOutput, now: float) -> None:
        start, end = request.num_computed, request.num_computed + num_tokens
        assert end <= len(request.token_ids), "a window goes beyond the last token"
        assert len(request.block_ids) * self._block_size >= end, "a window has no blocks"
        assert len(request.block_ids) == len(set(request.block_ids)), "a request has a block twice"
        written = request.block_ids[start // self._block_size : -(-end // self._block_size)]
        self._check_unused(written, "a window writes", except_for=request.spec.request_id)
        for blocks, lease_end in self._kv_leases.values():
            assert lease_end <= now or not set(blocks) & set(written), "a window writes what a peer may read"
        for place in range(start, end):
            self._kv[self._place(request, place)] = request.histories[place]
        for item in request.items_read(num_tokens):
            self._check_item(item, output)
            assert not self._has_atomic_items or item.end <= end, "a window ends inside an item whose tokens attend to each other"

    def _check_unused(self, blocks: Iterable[int], who: str, *, except_for: str) -> None:
        others = [each.block_ids for name, each in self._requests.items() if name != except_for]
        others += [list(load.block_ids) for load in self._kv_loads.values() if load.request_id != except_for]
        used = {block for each in others for block in each}
        assert not used & set(blocks), f"{who} a block that another uses"

    def _check_item(self, item: MediaItem, output: SchedulerOutput) -> None:
        rows = self._items.get(item.key)
        assert rows is not None, "a window reads an item that is nowhere"
        assert rows.num_rows == item.num_rows, "a window reads an item of another size"
        needed = {load.ticket.key for load in output.ec_connector_metadata.loads if load.is_needed}
        is_encoded_now = item.key in {each.key for each in output.encodes}
        assert rows.is_filled or is_encoded_now or item.key in needed, "a window reads an item that may not be here in time"
        assert output.item_pages[item.key] == rows.pages, "a window is sent to pages of something else"

    def _check_reads(self, output: SchedulerOutput) -> None:
        """After all writes of the step, each window finds its own request's history in every place before its end."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            for place in range(request.num_computed + num_tokens):
                found = self._kv.get(self._place(request, place))
                assert found == request.histories[place], f"{request_id} reads other keys and values at token {place}"
        users: dict[int, int] = {}
        for request in self._requests.values():
            for block in request.block_ids if request.is_known else ():
                users[block] = users.get(block, 0) + 1
        self.num_shared += any(count > 1 for count in users.values())

    def _check_decode(self, request: Watched, output: SchedulerOutput) -> None:
        """Who decodes gets its token, unless it gave its blocks up in this step; or it needs a block, and nobody behind it has one."""
        if request.spec.request_id in output.num_scheduled_tokens or not request.is_known:
            return
        assert request.num_computed == len(request.block_ids) * self._block_size, "a decode is left out that needs no block"
        behind = [each for each in self._requests.values() if each.is_known and each.rank > request.rank]
        assert not behind, "a decode is left out for want of a block, and who is behind it keeps one"

    def _check_line(self, waiting: list[Watched], output: SchedulerOutput) -> None:
        """Nobody starts before a request that is before it in line and waits for its turn only: a text, whose beginning nobody else computes.
        Who starts in an otherwise empty step may: nothing else can go on, and it takes the place of those that wait."""
        started = [request for request in waiting if request.is_known and not request.spec.kv_tickets]
        if len(output.num_scheduled_tokens) == 1:
            return
        beginnings = {self._beginning(self._requests[name]) for name in output.num_scheduled_tokens}
        ready = [
            each
            for each in waiting
            if not each.is_known and not each.spec.items and not each.spec.kv_tickets and self._beginning(each) not in beginnings
        ]
        for request in started:
            passed = [each.spec.request_id for each in ready if each.rank < request.rank]
            assert not passed, f"{request.spec.request_id} starts before {passed}, which wait for nothing but their turn"

    def _beginning(self, request: Watched) -> int:
        return request.histories[min(self._block_size, len(request.histories)) - 1]

    def _place(self, request: Watched, place: int) -> Place:
        return request.block_ids[place // self._block_size], place % self._block_size

    # --- its results --------------------------------------------------------------------------------------------------

    def watch_results(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """What the runner did; before the scheduler hears of it."""
        ec, kv = result.ec_connector_output, result.kv_connector_output
        for each in output.encodes:
            if each.key in result.failed_encodes:
                del self._items[each.key]
            else:
                self._items[each.key].is_filled = True
        for key in ec.finished_loads if ec is not None else ():
            self._items[key].is_filled = True
        for key in ec.failed_loads if ec is not None else ():
            del self._items[key]
        for part in kv.finished_loads if kv is not None else ():
            self._fill(self._kv_loads.pop(part), self._requests.get(part[0]))
        for part in kv.failed_loads if kv is not None else ():
            del self._kv_loads[part]
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or request_id in result.failed_requests or request_id in result.stalled_requests:
                continue
            request.num_computed += num_tokens
            if request_id in result.sampled:
                self._grow(request, result.sampled[request_id].token_id)

    def _fill(self, load: KVLoad, request: Watched | None) -> None:
        """A copy has ended; who it was for may have left."""
        first = (load.ticket.first_block + load.num_skipped) * self._block_size
        histories = request.histories[first:] if request is not None else []
        for place, history in enumerate(histories[: len(load.block_ids) * self._block_size]):
            self._kv[load.block_ids[place // self._block_size], place % self._block_size] = history


def _has_row_at(item: MediaItem, place: int) -> bool:
    return any(start <= place < start + length for start, length in item.runs)
