"""`KVSupply`: requests whose KV blocks come from another worker, and blocks that are kept here for another worker.

taken:  WAITING with a ticket -> blocks reserved, LOADING_KV -> all read: RUNNING
given:  a request's blocks -> published with its last prompt token -> kept under a lease -> released or lapsed
"""

from collections.abc import Callable, Iterable, Mapping

from triptych.config import EngineConfig
from triptych.engine.events import EngineEvent, Failed
from triptych.engine.kv_cache_manager import KVCacheManager
from triptych.engine.kv_connector import get_kv_connector_scheduler
from triptych.engine.request import Request, RequestStatus
from triptych.errors import FailureReason
from triptych.output import KVConnectorMetadata, KVConnectorOutput


class KVSupply:
    """A `Failed` among the events that its methods give is an order to end that request."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float], kv: KVCacheManager) -> None:
        self._timeout_s = config.connector.kv_timeout_s
        self._kv = kv
        self._connector = get_kv_connector_scheduler(config, clock)

    @property
    def num_leases(self) -> int:
        return self._connector.num_leases

    @property
    def num_leases_expired(self) -> int:
        return self._connector.num_leases_expired

    @property
    def is_copying(self) -> bool:
        return self._connector.is_copying

    # --- taken from others ------------------------------------------------------------------------------------------

    def start_loads(self, waiting: Iterable[Request], max_loads: int) -> list[Request]:
        """Reserve before pulling: a load starts once all of the request's blocks are there. The requests that load now, at most `max_loads`."""
        started: list[Request] = []
        for request in waiting:
            if len(started) >= max_loads:
                break
            if request.kv_ticket is None or self._connector.is_loading(request.request_id):
                continue  # a copy for an earlier request of this id has not ended
            if self._kv.allocate(request.request_id, len(request.token_ids)) is None:
                break
            num_blocks = -(-request.kv_ticket.num_tokens // self._kv.block_size)
            block_ids = self._kv.block_ids(request.request_id)[:num_blocks]
            self._connector.start_load(request.request_id, request.kv_ticket, block_ids)
            request.change_status(RequestStatus.LOADING_KV)
            started.append(request)
        return started

    def update(
        self, output: KVConnectorOutput, requests: Mapping[str, Request], now: float
    ) -> tuple[list[Request], list[EngineEvent]]:
        """Take in what the copies gave: the requests whose KV is here, which run from now on, and the failures of others."""
        loaded = sorted(output.finished_loads)  # a set's order would differ from run to run
        for request_id in [*loaded, *output.failed_loads]:
            self._kv.reclaim(self._connector.end_load(request_id))
        ready: list[Request] = []
        for request_id in loaded:
            request = requests.get(request_id)
            if request is None or request.kv_ticket is None or request.status != RequestStatus.LOADING_KV:
                continue  # the copy was for an earlier request of this id
            request.num_computed_tokens = request.kv_ticket.num_tokens
            request.timeline.kv_resident_at = now
            request.change_status(RequestStatus.RUNNING)
            ready.append(request)
        events: list[EngineEvent] = []
        for request_id, reason in output.failed_loads.items():
            if request_id in requests and requests[request_id].status == RequestStatus.LOADING_KV:
                message = f"the KV blocks could not be read ({reason})."
                events.append(Failed(request_id, message, "kv_unavailable", 503, reason))
        return ready, events

    def leave(self, request: Request) -> None:
        """The request ends. Blocks that a copy still writes are kept until it has ended."""
        if request.status != RequestStatus.LOADING_KV:
            return
        if self._connector.abandon_load(request.request_id, self._kv.block_ids(request.request_id)):
            self._kv.give_up(request.request_id)

    def expire(self, requests: Iterable[Request], now: float) -> list[EngineEvent]:
        self._kv.reclaim(self._connector.expire())
        message = f"the KV blocks did not arrive within {self._timeout_s:g} s."
        late = [request for request in requests if request.awaits_kv and request.kv_deadline <= now]
        return [Failed(each.request_id, message, "kv_unavailable", 503, FailureReason.TIMEOUT) for each in late]

    # --- given to others --------------------------------------------------------------------------------------------

    def save(self, request: Request) -> None:
        """This step computes the last token of its prompt: publish its blocks."""
        block_ids = self._kv.block_ids(request.request_id)
        self._kv.mark_published(block_ids)
        self._connector.save(request.request_id, len(request.token_ids), block_ids)

    def keep(self, request_id: str) -> None:
        """The request's blocks were published: they are kept under a lease, and not the request's any more."""
        self._kv.reclaim(self._connector.keep(request_id, self._kv.give_up(request_id)))

    def release(self, request_id: str) -> None:
        """Nobody needs what was published for the request. Idempotent."""
        self._kv.reclaim(self._connector.release(request_id))

    # --- the rest ---------------------------------------------------------------------------------------------------

    def plan(self) -> KVConnectorMetadata:
        return self._connector.plan()

    def next_deadline(self, requests: Iterable[Request]) -> float | None:
        deadlines = [self._connector.next_deadline(), *(each.kv_deadline for each in requests if each.awaits_kv)]
        return min((each for each in deadlines if each is not None), default=None)
