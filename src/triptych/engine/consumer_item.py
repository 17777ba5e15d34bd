"""`ConsumerItems`: the media items that requests of this worker wait for, each from the first want until it is here.

              wanted            announced (ticket)     pages reserved            rows here
    absent ----------> REQUESTED ---------> ARRIVED ---------> LOADING ---------------> absent: the encoder cache has it,
       |                   ^                 ^   ^                |                     RESIDENT, then EVICTABLE
       |    announced      |                 |   |                | load failed
       +-------------------|-----------------+   |                v
                           +---------------------+-------- FAILED(reason) ------------> absent, and who waits for it ends
                 asks again, or goes on with a ticket that came meanwhile

An item that is not in the table is absent. RESIDENT and EVICTABLE are the encoder cache's to know (`EntryState`): what has come, be it by a
load or from this worker's own tower, is forgotten here. While the tower is at an item, those who wait for it are here as well, and a ticket
that comes meanwhile is kept: the tower may fail.

Each wait has its own deadline, at which the request ends. A waiter that leaves takes an item with it that nobody else waits for, unless a load
still writes pages for it. A ticket that comes before anybody waits for its item (messages overtake one another) is kept for as long as
a wait lasts.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from triptych.engine.encoder_cache_manager import LAST, Rank
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import ECTicket


class ItemState(Enum):
    REQUESTED = auto()  # somebody waits; there is no ticket
    ARRIVED = auto()  # there is a ticket; there may be nobody who waits yet
    LOADING = auto()  # there is a ticket, and pages FILLING, which are not given up before the load has ended
    FAILED = auto()  # there is a reason; settled before the step's update ends


LEGAL_ITEM_CHANGES = {
    ItemState.REQUESTED: {ItemState.ARRIVED},
    ItemState.ARRIVED: {ItemState.LOADING},
    ItemState.LOADING: {ItemState.FAILED},
    ItemState.FAILED: {ItemState.REQUESTED, ItemState.ARRIVED},
}

MAX_UNWANTED = 1024  # announcements kept for requests that have not come yet


@dataclass(frozen=True, slots=True)
class Waiter:
    rank: Rank
    num_rows: int  # what the request's placeholders expect
    deadline: float


@dataclass(slots=True)
class ConsumerItem:
    key: str
    state: ItemState = ItemState.REQUESTED
    ticket: ECTicket | None = None
    later_ticket: ECTicket | None = None  # came after `ticket`, and is tried if that fails
    announced_at: float = 0.0
    keep_until: float = 0.0  # how long a ticket waits for its first waiter
    reason: FailureReason | None = None
    waiters: dict[str, Waiter] = field(default_factory=dict[str, Waiter])  # by request id

    @property
    def rank(self) -> Rank:
        """Of the first in line who waits; LAST if nobody does."""
        return min((waiter.rank for waiter in self.waiters.values()), default=LAST)

    @property
    def is_unwanted(self) -> bool:
        return self.state == ItemState.ARRIVED and not self.waiters

    def change_state(self, state: ItemState) -> None:
        assert state in LEGAL_ITEM_CHANGES[self.state], f"item {self.key[:12]}: {self.state} -> {state}"
        self.state = state

    def take_ticket(self, ticket: ECTicket) -> None:
        """A ticket of another size than the one at hand is ignored, as is one that is told again."""
        if self.ticket is None:
            self.ticket = ticket
            self.change_state(ItemState.ARRIVED)
        elif ticket != self.ticket and ticket.num_rows == self.ticket.num_rows:
            self.later_ticket = ticket

    def check_invariants(self) -> None:
        assert self.waiters or self.state != ItemState.REQUESTED, "an item is requested for nobody"
        assert (self.ticket is None) == (self.state == ItemState.REQUESTED), "a ticket without arrival, or the reverse"
        assert (self.reason is not None) == (self.state == ItemState.FAILED), "a reason without failure, or the reverse"
        assert self.later_ticket is None or self.ticket is not None, "a later ticket without an earlier one"


class ConsumerItems:
    """Deadlines are instants of the engine's monotonic clock, which comes in as `now`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._items: dict[str, ConsumerItem] = {}

    @property
    def num_waits(self) -> int:
        return sum(len(item.waiters) for item in list(self._items.values()))  # a copy: /metrics asks from another thread

    def get(self, key: str) -> ConsumerItem | None:
        return self._items.get(key)

    def keys(self, state: ItemState) -> set[str]:
        return {key for key, item in self._items.items() if item.state == state}

    def rank_of(self, key: str) -> Rank:
        item = self._items.get(key)
        return item.rank if item is not None else LAST

    def want(self, media: MediaItem, request_id: str, rank: Rank, now: float) -> bool:
        """Wait for an item that is not here; who waits already goes on under the old deadline, at the place in line of its next use.

        True if the request must ask for it: this is its first want, and no ticket is here.
        """
        item = self._items.get(media.key)
        if item is None or (item.is_unwanted and item.keep_until <= now):
            item = self._items[media.key] = ConsumerItem(media.key)
        waiter = item.waiters.get(request_id)
        if waiter is not None and waiter.rank == rank:
            return False  # in most steps of who waits
        item.waiters[request_id] = Waiter(rank, media.num_rows, now + self._timeout_s if waiter is None else waiter.deadline)
        return waiter is None and item.ticket is None

    def leave(self, request_id: str, key: str) -> None:
        """The request does not wait for the item (any more). Idempotent."""
        item = self._items.get(key)
        if item is None or item.waiters.pop(request_id, None) is None or item.waiters:
            return
        if item.state in (ItemState.REQUESTED, ItemState.ARRIVED):
            del self._items[key]

    def announce(self, ticket: ECTicket, now: float) -> None:
        """A ticket for an item that is not resident. As long as nobody waits for it, the latest counts."""
        item = self._items.get(ticket.key)
        if item is None or item.is_unwanted:
            self._items.pop(ticket.key, None)
            self._make_room_for_unwanted()
            item = self._items[ticket.key] = ConsumerItem(ticket.key)
        if item.ticket is None:
            item.announced_at = now
        item.keep_until = now + self._timeout_s
        item.take_ticket(ticket)

    def misfits(self) -> list[tuple[str, str]]:
        """(request id, key) of the waits for an item whose ticket promises another number of rows than the request expects."""
        tickets = [(item, item.ticket.num_rows) for item in self._items.values() if item.ticket is not None and item.waiters]
        waits = [(name, item.key, each.num_rows, rows) for item, rows in tickets for name, each in item.waiters.items()]
        return [(request_id, key) for request_id, key, expected, promised in waits if expected != promised]

    def arrived(self) -> list[ConsumerItem]:
        """What can be loaded, first in line first."""
        ready = [item for item in self._items.values() if item.state == ItemState.ARRIVED and item.waiters]
        return sorted(ready, key=lambda item: item.rank)

    def start_loading(self, key: str) -> None:
        self._items[key].change_state(ItemState.LOADING)

    def finish(self, key: str) -> ConsumerItem | None:
        """The item is resident: forget it. With whoever waited for it; None if it was not in the table."""
        item = self._items.pop(key, None)
        assert item is None or item.state != ItemState.FAILED, "an item that failed is resident"
        return item

    def fail(self, key: str, reason: FailureReason) -> None:
        """The load has ended, and its pages are given up. To be settled in the same step."""
        item = self._items[key]
        item.change_state(ItemState.FAILED)
        item.reason = reason

    def settle(self, key: str) -> tuple[FailureReason, tuple[str, ...]]:
        """Decide by the reason what comes of an item that failed. With the requests that ask for it again, under their old deadlines, or, if
        the reason is not retryable, that end: none, if a later ticket is tried instead."""
        item = self._items[key]
        assert item.reason is not None, "an item is settled that did not fail"
        reason, item.reason = item.reason, None
        item.ticket, item.later_ticket = item.later_ticket, None
        if reason.is_retryable and item.ticket is not None:
            item.change_state(ItemState.ARRIVED)
            return reason, ()
        if reason.is_retryable and item.waiters:
            item.change_state(ItemState.REQUESTED)
        else:
            del self._items[key]
        return reason, tuple(item.waiters)

    def expire(self, now: float) -> list[tuple[str, str]]:
        """(request id, key) of the waits that are over: the caller has these requests leave. Drops what nobody came for."""
        for item in [each for each in self._items.values() if each.is_unwanted and each.keep_until <= now]:
            del self._items[item.key]
        waits = [(item.key, item.waiters) for item in self._items.values()]
        return [(name, key) for key, waiters in waits for name, each in waiters.items() if each.deadline <= now]

    def next_deadline(self) -> float | None:
        """Of the waits. Announcements that nobody came for are dropped whenever a step is made, and are few: they wake nobody."""
        return min((waiter.deadline for item in self._items.values() for waiter in item.waiters.values()), default=None)

    def _make_room_for_unwanted(self) -> None:
        unwanted = [item.key for item in self._items.values() if item.is_unwanted]
        for key in unwanted[: max(0, len(unwanted) + 1 - MAX_UNWANTED)]:
            del self._items[key]

    def check_invariants(self) -> None:
        for item in self._items.values():
            item.check_invariants()
