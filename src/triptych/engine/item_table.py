"""`ItemTable`: the media items that requests wait for, from the first want to residency.

                 announce            start_loading          finish
    REQUESTED ------------> ARRIVED ---------------> LOADING -------> gone: the encoder cache has it
        ^  ^                   |                        |
        |  +------ fail -------+---------- fail --------+
        +- want                  (fail goes back to REQUESTED: somebody must produce it again)

A waiter that leaves takes an entry with it that nobody else wants, unless a load still writes pages for it. An entry that was announced
before anybody wanted it (messages overtake one another) waits for its waiter until its deadline.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from triptych.engine.encoder_cache_manager import Rank
from triptych.media.item import MediaItem
from triptych.output import ECTicket


class ItemState(Enum):
    REQUESTED = auto()
    ARRIVED = auto()
    LOADING = auto()


LEGAL_ITEM_CHANGES = {
    ItemState.REQUESTED: {ItemState.ARRIVED},
    ItemState.ARRIVED: {ItemState.LOADING, ItemState.REQUESTED},
    ItemState.LOADING: {ItemState.REQUESTED},
}

MAX_UNWANTED = 1024  # announcements kept for requests that have not come yet


@dataclass(frozen=True, slots=True)
class Waiter:
    rank: Rank
    deadline: float


@dataclass(slots=True)
class WantedItem:
    key: str
    keep_until: float  # how long an announcement waits for its first waiter
    num_rows: int | None = None  # what the first waiter expects
    state: ItemState = ItemState.REQUESTED
    ticket: ECTicket | None = None
    announced_at: float = 0.0
    waiters: dict[str, Waiter] = field(default_factory=dict[str, Waiter])  # by request id

    @property
    def rank(self) -> Rank:
        return min(waiter.rank for waiter in self.waiters.values())

    @property
    def fits(self) -> bool:
        """Whether the ticket is of the size that its waiters expect."""
        return self.ticket is not None and self.ticket.num_rows == self.num_rows

    def change_state(self, state: ItemState) -> None:
        assert state in LEGAL_ITEM_CHANGES[self.state], f"item {self.key[:12]}: {self.state} -> {state}"
        self.state = state


class ItemTable:
    """Deadlines are instants of the engine's monotonic clock, which comes in as `now`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._items: dict[str, WantedItem] = {}

    @property
    def num_waits(self) -> int:
        return sum(len(item.waiters) for item in list(self._items.values()))  # a copy: /metrics asks from another thread

    def get(self, key: str) -> WantedItem | None:
        return self._items.get(key)

    def is_wanted_by(self, key: str, request_id: str) -> bool:
        item = self._items.get(key)
        return item is not None and request_id in item.waiters

    def want(self, media: MediaItem, request_id: str, rank: Rank, now: float) -> WantedItem:
        """A request that waits already goes on under its old deadline."""
        item = self._items.setdefault(media.key, WantedItem(media.key, now + self._timeout_s))
        if not item.waiters:
            item.num_rows = media.num_rows
        item.waiters.setdefault(request_id, Waiter(rank, now + self._timeout_s))
        return item

    def leave(self, request_id: str) -> None:
        for item in list(self._items.values()):
            if item.waiters.pop(request_id, None) is not None and not item.waiters and item.state != ItemState.LOADING:
                del self._items[item.key]

    def announce(self, key: str, ticket: ECTicket, now: float) -> None:
        """A ticket for an item that is on its way in already is of no use, and is dropped."""
        item = self._items.get(key)
        if item is None:
            self._make_room_for_unwanted()
            item = self._items[key] = WantedItem(key, now + self._timeout_s)
        if item.state == ItemState.REQUESTED:
            item.ticket, item.announced_at = ticket, now
            item.change_state(ItemState.ARRIVED)

    def arrived(self) -> list[WantedItem]:
        """What can be loaded, first in line first."""
        ready = [item for item in self._items.values() if item.state == ItemState.ARRIVED and item.waiters]
        return sorted(ready, key=lambda item: item.rank)

    def start_loading(self, key: str) -> None:
        self._items[key].change_state(ItemState.LOADING)

    def finish(self, key: str) -> dict[str, Rank]:
        """The item is resident: forget it. Its waiters' ranks, by request id."""
        item = self._items.pop(key, None)
        return {request_id: waiter.rank for request_id, waiter in item.waiters.items()} if item is not None else {}

    def fail(self, key: str) -> tuple[str, ...]:
        """The ticket was of no use: wait for another, under the old deadlines. The waiters (none: forgotten)."""
        item = self._items[key]
        item.change_state(ItemState.REQUESTED)
        item.ticket = None
        if not item.waiters:
            del self._items[key]
        return tuple(item.waiters)

    def expired(self, now: float) -> list[tuple[str, str]]:
        """(request id, key) of the waits that are over. The waiters leave by the caller's `leave`."""
        for item in [each for each in self._unwanted() if each.keep_until <= now]:
            del self._items[item.key]
        waits = [(request_id, item.key, each) for item in self._items.values() for request_id, each in item.waiters.items()]
        return [(request_id, key) for request_id, key, waiter in waits if waiter.deadline <= now]

    def next_deadline(self) -> float | None:
        return min((waiter.deadline for item in self._items.values() for waiter in item.waiters.values()), default=None)

    def _make_room_for_unwanted(self) -> None:
        unwanted = self._unwanted()
        if len(unwanted) >= MAX_UNWANTED:
            del self._items[unwanted[0].key]

    def _unwanted(self) -> list[WantedItem]:
        return [item for item in self._items.values() if not item.waiters and item.state == ItemState.ARRIVED]

    def check_invariants(self) -> None:
        for item in self._items.values():
            assert item.waiters or item.state != ItemState.REQUESTED, "an item is requested for nobody"
            assert (item.ticket is not None) == (item.state != ItemState.REQUESTED), "a ticket without arrival, or the reverse"
