"""`EncoderCacheManager`: which item lies in which pages of this worker's encoder cache, and who keeps it there.

             allocate             mark_resident          unpin, the last
    absent ----------> FILLING ----------------> RESIDENT ----------> EVICTABLE ----------> absent
       ^                  | discard                 |      <----------    |     room is needed
       +------------------+                         |          pin        |
       +--------------------------------------------+---------------------+

While an entry fills, the tower or a load writes its pages, and nobody else may have them before that has ended. Then it is kept by pins: a
request's (it still has to compute tokens of the item), or the one that stands for all peers who may read it. An entry without a pin goes
first, the least recently used before the others.

A request's pin yields to whoever is before it in line: an earlier request, or an earlier item of the same request. So two that each hold what
the other lacks cannot wait for each other for ever: who is first in line always gets its next item. The peers' pin yields to nobody.

    pages:  | free | FILLING (owner: the step that writes) | RESIDENT (pinned) | EVICTABLE |
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

Rank = tuple[
    float, ...
]  # (virtual arrival, number of arrival[, first token of the item]): smaller is served first; see docs/scheduler.md
LEASE: Rank = (-(2**62),)  # the rank of a pin that never yields
LAST: Rank = (2**62,)  # the rank of who takes free or unpinned pages only


class EntryState(Enum):
    FILLING = auto()
    RESIDENT = auto()
    EVICTABLE = auto()  # resident, and nobody keeps it


@dataclass(slots=True)
class CacheEntry:
    key: str
    num_rows: int
    pages: tuple[int, ...]
    is_filled: bool = False
    pins: dict[str, Rank] = field(default_factory=dict[str, Rank])  # holder -> rank

    @property
    def state(self) -> EntryState:
        if not self.is_filled:
            return EntryState.FILLING
        return EntryState.RESIDENT if self.pins else EntryState.EVICTABLE


class EncoderCacheManager:
    def __init__(self, num_pages: int, rows_per_page: int) -> None:
        self.num_pages = num_pages
        self.rows_per_page = rows_per_page
        self._free: list[int] = list(reversed(range(num_pages)))
        self._entries: OrderedDict[str, CacheEntry] = OrderedDict()  # least recently used first
        self._freed_pages: list[int] = []  # given up since the last `take_freed_pages`
        self.num_evicted = 0

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        return sum(1 for entry in list(self._entries.values()) if entry.pins)  # a copy: /metrics asks from another thread

    def state(self, key: str) -> EntryState | None:
        """None if the item is absent."""
        entry = self._entries.get(key)
        return None if entry is None else entry.state

    def is_resident(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_filled

    def is_known(self, key: str) -> bool:
        return key in self._entries

    def holds(self, key: str, num_rows: int) -> bool:
        """Whether an item is resident with as many rows as expected."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_filled and entry.num_rows == num_rows

    def keys(self, state: EntryState) -> set[str]:
        return {key for key, entry in self._entries.items() if entry.state == state}

    def holders(self) -> set[str]:
        return {holder for entry in self._entries.values() for holder in entry.pins}

    def keys_pinned_by(self, holder: str) -> set[str]:
        return {key for key, entry in self._entries.items() if holder in entry.pins}

    def pages(self, key: str) -> tuple[int, ...]:
        return self._entries[key].pages

    def allocate(self, key: str, num_rows: int, rank: Rank) -> tuple[int, ...] | None:
        """Pages for a new item, FILLING. None (and nothing changed) if what may yield to `rank` does not make enough room.

        Within a step all allocations come before the first window is chosen, so nothing is evicted that a window reads.
        """
        assert key not in self._entries, "an item is allocated once"
        needed = -(-num_rows // self.rows_per_page)
        if not self._make_room(needed, rank):
            return None
        pages = tuple(self._free.pop() for _ in range(needed))
        self._entries[key] = CacheEntry(key, num_rows, pages)
        return pages

    def mark_resident(self, key: str) -> None:
        assert not self._entries[key].is_filled, "an item becomes resident once"
        self._entries[key].is_filled = True

    def discard(self, key: str) -> None:
        """Give up an entry: its content never came, or is not wanted. Nobody may be writing its pages any more."""
        entry = self._entries.pop(key)
        self._free.extend(entry.pages)
        self._freed_pages.extend(entry.pages)

    def touch(self, key: str) -> None:
        """Somebody is about to want it: the last to be evicted."""
        self._entries.move_to_end(key)

    def pin(self, key: str, holder: str, rank: Rank = LEASE) -> None:
        assert self._entries[key].is_filled, "an item is pinned before it is resident"
        self._entries[key].pins[holder] = rank
        self._entries.move_to_end(key)

    def unpin(self, key: str, holder: str) -> None:
        """Idempotent, also when the item is gone."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.pins.pop(holder, None)

    def take_freed_pages(self) -> tuple[int, ...]:
        """Pages given up since the last call: their readers must notice before they are written again."""
        freed, self._freed_pages = tuple(self._freed_pages), []
        return freed

    def _make_room(self, needed: int, rank: Rank) -> bool:
        if needed > self.num_pages:
            return False
        missing = needed - len(self._free)
        if missing <= 0:
            return True
        victims: list[str] = []
        for entry in self._in_order_of_eviction(rank):
            victims.append(entry.key)
            missing -= len(entry.pages)
            if missing <= 0:
                break
        if missing > 0:
            return False
        for key in victims:
            self.discard(key)
            self.num_evicted += 1
        return True

    def _in_order_of_eviction(self, rank: Rank) -> Iterator[CacheEntry]:
        yield from (entry for entry in self._entries.values() if entry.is_filled and not entry.pins)
        pinned = [entry for entry in self._entries.values() if entry.is_filled and entry.pins]
        yielding = [entry for entry in pinned if min(entry.pins.values()) > rank]
        yield from sorted(yielding, key=lambda entry: min(entry.pins.values()), reverse=True)

    def check_invariants(self) -> None:
        used = [page for entry in self._entries.values() for page in entry.pages]
        assert len(used) == len(set(used)), "a page belongs to two items"
        assert sorted(used + self._free) == list(range(self.num_pages)), "a page is lost or free twice"
        for entry in self._entries.values():
            assert entry.is_filled or not entry.pins, "an item is pinned before it is resident"
            assert len(entry.pages) == -(-entry.num_rows // self.rows_per_page)
