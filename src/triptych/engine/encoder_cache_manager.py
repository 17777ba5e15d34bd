"""`EncoderCacheManager`: which item lies in which pages of this worker's encoder cache, and who keeps it there.

An entry's life: allocated (FILLING: the tower or a load writes it) -> RESIDENT -> evicted. While it fills, nobody else may have its
pages. Resident, it is kept by pins: a request's (it still has to compute tokens of the item) or a lease's (a peer may read it). Without a pin it is
evictable, least recently used first.

A request's pin yields to whoever is before it in line: an earlier request, or an earlier item of the same request. So two that each hold what
the other lacks cannot wait for each other for ever: who is first in line always gets its next item. A lease's pin yields to nobody.

    pages:  | free | FILLING (owner: the step that writes) | RESIDENT, pinned | RESIDENT, evictable |
"""

from collections import OrderedDict
from dataclasses import dataclass, field

Rank = tuple[int, ...]  # (priority, arrival[, first token of the item]): smaller is served first
LEASE: Rank = (-(2**62),)  # the rank of a pin that never yields
LAST: Rank = (2**62,)  # the rank of who takes free or unpinned pages only


@dataclass(slots=True)
class CacheEntry:
    key: str
    num_rows: int
    pages: tuple[int, ...]
    is_resident: bool = False
    pins: dict[str, Rank] = field(default_factory=dict[str, Rank])  # holder -> rank


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

    def is_resident(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_resident

    def is_known(self, key: str) -> bool:
        return key in self._entries

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
        self._entries[key].is_resident = True

    def discard(self, key: str) -> None:
        """Give up an entry: its content never came, or is not wanted. Nobody may be writing its pages any more."""
        entry = self._entries.pop(key)
        self._free.extend(entry.pages)
        self._freed_pages.extend(entry.pages)

    def touch(self, key: str) -> None:
        """Somebody is about to want it: the last to be evicted."""
        self._entries.move_to_end(key)

    def pin(self, key: str, holder: str, rank: Rank = LEASE) -> None:
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

    def _in_order_of_eviction(self, rank: Rank) -> list[CacheEntry]:
        resident = [entry for entry in self._entries.values() if entry.is_resident]
        unpinned = [entry for entry in resident if not entry.pins]
        yielding = [entry for entry in resident if entry.pins and min(entry.pins.values()) > rank]
        return unpinned + sorted(yielding, key=lambda entry: min(entry.pins.values()), reverse=True)

    def check_invariants(self) -> None:
        used = [page for entry in self._entries.values() for page in entry.pages]
        assert len(used) == len(set(used)), "a page belongs to two items"
        assert sorted(used + self._free) == list(range(self.num_pages)), "a page is lost or free twice"
        for entry in self._entries.values():
            assert entry.is_resident or not entry.pins, "an item is pinned before it is resident"
            assert len(entry.pages) == -(-entry.num_rows // self.rows_per_page)
