"""`KVSupply`: requests whose KV blocks come from another worker, and blocks that are given to another worker.

taken:  WAITING with tickets -> blocks for all of it reserved, LOADING_KV: each part is read as its ticket comes -> all read, and the first
        token is known: RUNNING
given:  full blocks of a request -> published with each chunk, the rest with its prompt's last token -> kept under a lease -> released or lapsed
"""

from collections.abc import Callable, Iterable

from triptych.config import EngineConfig
from triptych.engine.admission import check_kv_parts, check_request
from triptych.engine.events import EngineEvent, Failed
from triptych.engine.kv_cache_manager import KVCacheManager
from triptych.engine.kv_connector import get_kv_connector_scheduler
from triptych.engine.request import Request, RequestSpec, RequestStatus
from triptych.errors import FailureReason, RequestError, TriptychError
from triptych.output import KVConnectorMetadata, KVConnectorOutput, KVLoad, KVSave, KVTicket


class KVSupply:
    """A `Failed` among the events that its methods give is an order to end that request."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float], kv: KVCacheManager) -> None:
        self._config = config
        self._timeout_s = config.connector.kv_timeout_s
        self._clock = clock
        self._kv = kv
        self._connector = get_kv_connector_scheduler(config, clock)
        self._loading: dict[str, Request] = {}
        self._published: dict[str, list[KVTicket]] = {}  # of requests that are computed here

    @property
    def num_leases(self) -> int:
        return self._connector.num_leases

    @property
    def num_leases_expired(self) -> int:
        return self._connector.num_leases_expired

    @property
    def is_copying(self) -> bool:
        return bool(self._connector.written_block_ids)

    # --- taken from others ------------------------------------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def has_blocks_coming(self) -> bool:
        """Whether a copy for a request that left still writes blocks, which are free when it has ended."""
        return self._connector.has_abandoned

    @property
    def written_block_ids(self) -> frozenset[int]:
        """Blocks into which copies are under way."""
        return self._connector.written_block_ids

    def in_order_of_yielding(self, running: Iterable[Request]) -> list[Request]:
        """Who gives way when there are no blocks: first those that hold blocks while their prompt is still computed elsewhere, since they lose
        least, then the last in line."""
        return sorted([*running, *self._loading.values()], key=lambda each: (each.is_early, each.rank), reverse=True)

    @property
    def last_early(self) -> Request | None:
        return max((each for each in self._loading.values() if each.is_early), key=lambda each: each.rank, default=None)

    def deliver(
        self, request: Request, tickets: tuple[KVTicket, ...], token_ids: tuple[int, ...], is_last: bool
    ) -> list[EngineEvent]:
        """Further tickets for a request, and with the last the first tokens. Idempotent."""
        incoming, now = request.incoming, self._clock()
        if incoming is None or incoming.is_complete:
            return []
        incoming.take(tickets, self._kv.block_size)
        incoming.deadline = now + self._timeout_s
        try:
            if is_last:
                self._complete(request, tickets, token_ids, now)
            check_kv_parts(tuple(incoming.tickets), len(request.token_ids), self._config)
        except TriptychError as error:
            return [Failed(request.request_id, error.message, error.type, error.status)]
        if request.status == RequestStatus.LOADING_KV:
            self._order_loads(request)
        return []

    def _complete(self, request: Request, tickets: tuple[KVTicket, ...], token_ids: tuple[int, ...], now: float) -> None:
        incoming = request.incoming
        assert incoming is not None
        request.token_ids += token_ids
        incoming.is_complete = True
        request.timeline.kv_complete_at = now
        if not tickets or incoming.num_tokens != tickets[-1].num_tokens:
            raise RequestError(f"the last delivery leaves a gap after token {incoming.num_tokens} of the prompt's KV.")
        check_request(
            RequestSpec(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                items=request.items,
                kv_tickets=tuple(incoming.tickets),
            ),
            self._config,
        )

    def may_start(self, request: Request) -> bool:
        """Whether it takes KV, and no copy for an earlier request of its id is under way."""
        return request.incoming is not None and not self._connector.is_loading(request.request_id)

    def start(self, request: Request) -> bool:
        """Reserve before pulling: a load starts once there are blocks for the whole prompt and one token. Whether it does."""
        incoming = request.incoming
        assert incoming is not None
        num_kv_tokens = len(request.token_ids) if request.is_early else incoming.num_tokens
        hashes = request.block_hashes.extend(request.token_ids)[: num_kv_tokens // self._kv.block_size]
        num_held = self._kv.start(request.request_id, hashes, len(request.token_ids) + request.is_early)
        if num_held is None:
            return False
        request.num_computed_tokens = num_held * self._kv.block_size
        self._loading[request.request_id] = request
        request.change_status(RequestStatus.LOADING_KV)
        self._order_loads(request)
        return True

    def _order_loads(self, request: Request) -> None:
        """Of what is known and not here. What is here by its hash is neither read nor waited for."""
        incoming = request.incoming
        assert incoming is not None
        block_ids, num_held = self._kv.block_ids(request.request_id), request.num_computed_tokens // self._kv.block_size
        for ticket in incoming.tickets[incoming.num_ordered :]:
            first, end = max(ticket.first_block, num_held), self._kv.num_blocks_for(ticket.num_tokens)
            if first < end:
                load = KVLoad(request.request_id, ticket, block_ids[first:end], first - ticket.first_block)
                self._connector.start_load(load)
                incoming.unread.add(ticket.first_block)
        incoming.num_ordered = len(incoming.tickets)

    def take_ready(self, now: float) -> list[Request]:
        """The requests whose KV is here, and which run from now on."""
        ready: list[Request] = []
        for request in list(self._loading.values()):
            incoming = request.incoming
            if incoming is not None and incoming.is_here:
                del self._loading[request.request_id]
                request.num_computed_tokens = incoming.num_tokens
                hashes = request.block_hashes.extend(request.token_ids)
                self._kv.enter(request.request_id, hashes[: incoming.num_tokens // self._kv.block_size])
                request.timeline.kv_resident_at = now
                request.change_status(RequestStatus.RUNNING)
                ready.append(request)
        return ready

    def update(self, output: KVConnectorOutput) -> list[EngineEvent]:
        """Take in what the copies gave: the failures."""
        events: list[EngineEvent] = []
        for part in [*sorted(output.finished_loads), *output.failed_loads]:  # a set's order would differ from run to run
            self._kv.reclaim(self._connector.end_load(part))
            request_id, first_block = part
            request = self._loading.get(request_id)
            if request is None or request.incoming is None:
                continue  # the copy was for an earlier request of this id
            request.incoming.unread.discard(first_block)
            if part in output.failed_loads:
                reason = output.failed_loads[part]
                message = f"the KV blocks could not be read ({reason})."
                events.append(Failed(request_id, message, "kv_unavailable", 503, reason))
        return events

    def expire(self, requests: Iterable[Request], now: float) -> list[EngineEvent]:
        self._kv.reclaim(self._connector.expire())
        message = f"the KV blocks did not arrive within {self._timeout_s:g} s."
        late = [each for each in requests if each.kv_deadline is not None and each.kv_deadline <= now]
        return [Failed(each.request_id, message, "kv_unavailable", 503, FailureReason.TIMEOUT) for each in late]

    # --- given to others --------------------------------------------------------------------------------------------

    def save(self, request: Request, num_tokens: int) -> None:
        """This step completes the KV of its first `num_tokens` tokens: publish the blocks that are full then, or, at the prompt's end, all."""
        if not request.will_hand_over:
            return
        request_id, is_last = request.request_id, num_tokens == len(request.token_ids)
        published = self._published.get(request_id)
        first = published[-1].num_tokens // self._kv.block_size if published else 0
        end = self._kv.num_blocks_for(num_tokens) if is_last else num_tokens // self._kv.block_size
        if first < end:
            block_ids = self._kv.block_ids(request_id)[first:end]
            self._kv.mark_published(block_ids)
            self._connector.save(KVSave(request_id, min(num_tokens, end * self._kv.block_size), block_ids, first))

    def add_published(self, ticket: KVTicket) -> None:
        self._published.setdefault(ticket.request_id, []).append(ticket)

    def published(self, request: Request) -> tuple[KVTicket, ...]:
        """The tickets for all that is computed of it, in order; none if a part could not be published."""
        tickets = self._published.get(request.request_id, [])
        return tuple(tickets) if tickets and tickets[-1].num_tokens == request.num_computed_tokens else ()

    def keep(self, request_id: str) -> None:
        """The request's blocks were published: they are kept under a lease, and not the request's any more."""
        self._kv.reclaim(self._connector.keep(request_id, self._kv.give_up(request_id)))

    def release(self, request_id: str) -> None:
        """Nobody needs what was published for the request. Idempotent."""
        self._kv.reclaim(self._connector.release(request_id))

    # --- the rest ---------------------------------------------------------------------------------------------------

    def leave(self, request: Request) -> None:
        """The request ends, or starts anew. Blocks that a copy still writes are kept until it has ended, the others are free at once."""
        self._published.pop(request.request_id, None)
        if self._loading.pop(request.request_id, None) is not None:
            written = self._connector.abandon_loads(request.request_id)
            block_ids = self._kv.give_up(request.request_id)
            self._kv.reclaim(tuple(block_id for block_id in block_ids if block_id not in written))

    def plan(self) -> KVConnectorMetadata:
        return self._connector.plan()

    def next_deadline(self, requests: Iterable[Request]) -> float | None:
        deadlines = [self._connector.next_deadline(), *(each.kv_deadline for each in requests)]
        return min((each for each in deadlines if each is not None), default=None)
