"""`ItemSupply`: gets the items of requests into the encoder cache, by a load or by the tower, and keeps each until its request has computed it.

For each item that a request still has to compute, one of these holds: the request has a pin on it; or it waits for it (consumer_item.py);
or the pin has yielded to somebody before it in line, which the request notices, and asks for the item, when its window gets there.

How many rows a key has is said by whoever brings it first, a ticket or what is resident. A request which expects another number is refused:
it would read rows of another item.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from triptych.config import EngineConfig
from triptych.engine.consumer_item import ConsumerItems, ItemState
from triptych.engine.ec_connector import get_ec_connector_scheduler
from triptych.engine.encode_scheduler import EncodeScheduler, PlannedEncodes
from triptych.engine.encoder_cache_manager import EncoderCacheManager, EntryState
from triptych.engine.events import ECLoaded, ECNeeded, EngineEvent, Failed
from triptych.engine.producer_item import PEERS, ProducerItems
from triptych.engine.request import Request
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import NO_EC_OUTPUT, ECLoad, ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class PlannedItems:
    """What a step brings. Its windows may read the items of `num_rows`."""

    encodes: PlannedEncodes
    loads: dict[str, ECLoad]
    num_rows: dict[str, int]


class ItemSupply:
    """A `Failed` among the events that its methods give is an order to end that request."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        connector = config.connector
        self._timeout_s = connector.ec_timeout_s
        self.cache = EncoderCacheManager(config.num_encoder_pages, config.cache.rows_per_page)
        self.wanted = ConsumerItems(connector.ec_timeout_s)
        self.kept = ProducerItems(self.cache, connector.ec_lease_s, clock)
        self.encodes = EncodeScheduler(
            self.cache, self.kept, config.is_ec_producer, config.scheduler.max_encoder_rows, connector.ec_timeout_s
        )
        self.ec = get_ec_connector_scheduler(config, self.cache, self.wanted)
        self.num_waits_expired = 0

    # --- a request's items

    def secure(self, request: Request, item: MediaItem, reason: FailureReason, now: float) -> list[EngineEvent]:
        """Pin an item that is here; else wait for it, and say so once."""
        rank = request.rank_of(item)
        if self.cache.holds(item.key, item.num_rows):
            self.cache.pin(item.key, request.request_id, rank)
        elif self.cache.is_resident(item.key):
            return [_misfit(request.request_id, item.key)]
        elif self.wanted.want(item, request.request_id, rank, now):
            return [ECNeeded(request.request_id, item.key, reason)]
        return []

    def has(self, item: MediaItem, planned: PlannedItems) -> bool:
        """Whether a window of the step that is being planned may read the item."""
        return planned.num_rows.get(item.key) == item.num_rows or self.cache.holds(item.key, item.num_rows)

    def give_up_computed(self, request: Request, before: Sequence[MediaItem]) -> None:
        """The request has computed on, or found what it need not compute; `before`, these were still pending."""
        if request.pending_items() is before:
            return
        still_needed = request.needed_items()
        for key in dict.fromkeys(item.key for item in before):
            if key not in still_needed:
                self.cache.unpin(key, request.request_id)
                self.wanted.leave(request.request_id, key)
            elif self.cache.is_resident(key):  # the same picture further on: its place in line is now that of the next use
                self.cache.pin(key, request.request_id, request.rank_of(still_needed[key]))

    def give_up_all(self, request: Request) -> None:
        for item in request.items:
            self.cache.unpin(item.key, request.request_id)
            self.wanted.leave(request.request_id, item.key)

    def lacks(self, request_id: str, key: str) -> bool:
        """Whether the request waits for the item and no ticket is here, be it one that somebody else asked for."""
        item = self.wanted.get(key)
        return item is not None and request_id in item.waiters and item.ticket is None

    # --- one step

    def expire(self, now: float) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for request_id, key in self.wanted.expire(now):
            self.num_waits_expired += 1
            message = f"media item {key[:12]} did not arrive within {self._timeout_s:g} s."
            events.append(Failed(request_id, message, "ec_unavailable", 503, FailureReason.TIMEOUT))
        events += [_misfit(request_id, key) for request_id, key in self.wanted.misfits()]
        return events + self.encodes.expire(now)

    def plan(self, now: float) -> PlannedItems:
        """What to load and to encode; nothing is evicted after this in a step."""
        loads = self.ec.plan_loads()
        encodes = self.encodes.schedule(now, self.wanted.rank_of)
        num_rows = {each.key: each.num_rows for each in encodes.inputs}
        num_rows.update((key, load.ticket.num_rows) for key, load in loads.items() if self.ec.may_read_in_this_step(load))
        return PlannedItems(encodes, loads, num_rows)

    def update(
        self, output: SchedulerOutput, result: ModelRunnerOutput, requests: Mapping[str, Request], now: float
    ) -> list[EngineEvent]:
        ec_output = result.ec_connector_output or NO_EC_OUTPUT
        self.ec.finish_loads(ec_output)
        events = [event for key in ec_output.failed_loads for event in self._settle(key)]
        encode_events, encoded = self.encodes.update(output, result)
        events += encode_events
        loaded = sorted(ec_output.finished_loads)  # a set's order would differ from run to run
        events += [event for key in loaded for event in self.encodes.came_from_peer(key)]
        return events + [event for key in (*loaded, *encoded) for event in self._hand_out(key, requests, now)]

    def _settle(self, key: str) -> list[EngineEvent]:
        reason, request_ids = self.wanted.settle(key)
        if reason.is_retryable:
            return [ECNeeded(request_id, key, reason) for request_id in request_ids]
        return [_misfit(request_id, key, reason) for request_id in request_ids]

    def _hand_out(self, key: str, requests: Mapping[str, Request], now: float) -> list[EngineEvent]:
        """The item is resident: pin it for everybody who waited for it."""
        item = self.wanted.finish(key)
        if item is None:
            return []
        events: list[EngineEvent] = []
        for request_id, waiter in item.waiters.items():
            self.cache.pin(key, request_id, waiter.rank)
            has_ticket = item.ticket is not None
            requests[request_id].timeline.ec_load_s = now - item.announced_at if has_ticket else 0.0
            if has_ticket:
                events.append(ECLoaded(request_id, key))
        return events

    # --- the rest

    def next_deadline(self) -> float | None:
        deadlines = (self.wanted.next_deadline(), self.kept.next_deadline(), self.encodes.next_deadline())
        return min((each for each in deadlines if each is not None), default=None)

    def check_invariants(self, requests: Mapping[str, Request]) -> None:
        for owner in (self.cache, self.wanted, self.kept, self.encodes):
            owner.check_invariants()
        assert self.cache.holders() <= {PEERS, *requests}, "a pin is held by nobody"
        loading, encoding = self.wanted.keys(ItemState.LOADING), self.encodes.keys_encoding()
        assert not loading & encoding, "an item is loaded and encoded at once"
        assert self.cache.keys(EntryState.FILLING) == loading | encoding, "pages fill for nobody, or are given up while they do"
        assert all(not self.cache.is_resident(key) for state in ItemState for key in self.wanted.keys(state)), (
            "a wait for what is here"
        )


def _misfit(request_id: str, key: str, reason: FailureReason = FailureReason.MISMATCH) -> Failed:
    message = f"media item {key[:12]} does not fit this model, or its place in the prompt ({reason})."
    return Failed(request_id, message, "ec_unavailable", 503, reason)
