"""Which item may take whose pages, and that no page is ever lost or owned twice."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from every_sequence import follow_every_sequence

from triptych.engine.encoder_cache_manager import LAST, LEASE, EncoderCacheManager, EntryState, Rank


def filled(num_pages: int, *keys: str) -> EncoderCacheManager:
    """Each key with one page of 4 rows, resident, the first used longest ago."""
    cache = EncoderCacheManager(num_pages, 4)
    for key in keys:
        assert cache.allocate(key, 4, LAST) is not None
        cache.mark_resident(key)
    return cache


def test_an_item_takes_whole_pages():
    cache = EncoderCacheManager(5, 4)
    for rows, pages in ((1, 1), (4, 1), (5, 2)):
        taken = cache.allocate(f"rows{rows}", rows, LAST)
        assert taken is not None
        assert len(taken) == pages
    assert cache.num_free_pages == 1
    cache.check_invariants()


def test_the_least_recently_used_goes_first():
    cache = filled(3, "a", "b", "c")
    cache.touch("a")
    assert cache.allocate("d", 4, LAST) is not None
    assert [cache.is_resident(key) for key in "abc"] == [True, False, True]
    assert cache.num_evicted == 1


def test_what_still_fills_is_never_taken():
    cache = EncoderCacheManager(2, 4)
    assert cache.allocate("filling", 8, LAST) is not None
    assert cache.allocate("urgent", 4, (-100, 0)) is None
    assert cache.is_known("filling")
    assert not cache.is_resident("filling")


def test_a_pin_yields_to_who_is_before_it_in_line_and_to_nobody_else():
    cache = filled(1, "a")
    cache.pin("a", "request", (0, 5, 10))
    assert cache.allocate("b", 4, LAST) is None
    assert cache.allocate("b", 4, (0, 5, 10)) is None
    assert cache.allocate("b", 4, (0, 5, 11)) is None
    assert cache.is_resident("a")
    assert cache.allocate("b", 4, (0, 5, 9)) is not None
    assert not cache.is_known("a")


def test_the_strongest_of_several_pins_counts():
    cache = filled(1, "a")
    cache.pin("a", "late", (0, 9))
    cache.pin("a", "early", (0, 1))
    assert cache.allocate("b", 4, (0, 5)) is None
    cache.unpin("a", "early")
    assert cache.allocate("b", 4, (0, 5)) is not None


def test_a_lease_yields_to_nobody():
    cache = filled(1, "a")
    cache.pin("a", "lease")
    assert cache.allocate("b", 4, (-(2**40), 0, 0)) is None


def test_the_last_in_line_gives_way_before_the_others():
    cache = filled(3, "first", "last", "middle")
    for rank, key in enumerate(("first", "middle", "last")):
        cache.pin(key, key, (0, 10 + rank))
    assert cache.allocate("new", 4, (0, 0)) is not None
    assert [cache.is_resident(key) for key in ("first", "middle", "last")] == [True, True, False]


def test_nothing_is_evicted_for_an_item_that_does_not_fit_all_the_same():
    cache = filled(3, "a", "b", "c")
    cache.pin("c", "lease")
    assert cache.allocate("big", 12, LAST) is None
    assert cache.allocate("bigger than all", 16, LAST) is None
    assert all(cache.is_resident(key) for key in "abc")
    assert cache.take_freed_pages() == ()


def test_pages_given_up_are_told_once():
    cache = filled(2, "a", "b")
    pages = cache.pages("a")
    cache.discard("a")
    assert cache.take_freed_pages() == pages
    assert cache.take_freed_pages() == ()


def test_to_unpin_what_is_not_pinned_or_not_there_does_nothing():
    cache = filled(1, "a")
    cache.unpin("a", "nobody")
    cache.unpin("gone", "nobody")
    assert cache.num_pinned == 0


def test_an_entry_is_resident_while_it_is_pinned_and_evictable_before_and_after():
    cache = EncoderCacheManager(1, 4)
    cache.allocate("a", 4, LAST)
    assert cache.state("a") == EntryState.FILLING
    cache.mark_resident("a")
    assert cache.state("a") == EntryState.EVICTABLE
    cache.pin("a", "r", (0, 0))
    assert cache.state("a") == EntryState.RESIDENT
    cache.unpin("a", "r")
    assert cache.state("a") == EntryState.EVICTABLE
    cache.discard("a")
    assert cache.state("a") is None


def test_what_an_entrys_state_does_not_allow_raises():
    cache = EncoderCacheManager(2, 4)
    cache.allocate("a", 4, LAST)
    with pytest.raises(AssertionError):
        cache.pin("a", "r", (0, 0))  # it fills
    with pytest.raises(AssertionError):
        cache.allocate("a", 4, LAST)
    cache.mark_resident("a")
    with pytest.raises(AssertionError):
        cache.mark_resident("a")
    for call in (cache.mark_resident, cache.discard, cache.touch, cache.pages):
        with pytest.raises(KeyError):
            call("never allocated")


def test_pins_can_be_counted_while_another_thread_takes_an_entry_away():
    class Pins(dict[str, Rank]):
        def __bool__(self) -> bool:  # stands for the engine thread, in the middle of the count
            cache.discard("b")
            return True

    cache = filled(2, "a", "b")
    cache._entries["a"].pins = Pins(holder=(0, 0))  # pyright: ignore[reportPrivateUsage]
    assert cache.num_pinned == 1


def test_no_page_is_lost_or_shared_in_any_order_of_calls():
    rng = Random(4)
    cache = EncoderCacheManager(8, 4)
    for number in range(3000):
        known = [key for key in (str(each) for each in range(max(0, number - 40), number)) if cache.is_known(key)]
        key = rng.choice(known) if known else ""
        match rng.randrange(6):
            case 0 | 1:
                cache.allocate(str(number), rng.randrange(1, 20), rng.choice((LAST, (0, rng.randrange(9)))))
            case 2 if key and not cache.is_resident(key):
                cache.mark_resident(key)
            case 3 if key and cache.is_resident(key):
                cache.pin(key, str(rng.randrange(3)), (0, rng.randrange(9)))
            case 4 if key:
                cache.unpin(key, str(rng.randrange(3)))
            case 5 if key and not cache.is_resident(key):
                cache.discard(key)
            case _:
                pass
        cache.check_invariants()


# --- every sequence of calls, beside a model that knows only who holds what


@dataclass
class Pages:
    """A cache of three pages; `held`: key -> (pages, is filled, holder -> rank)."""

    cache: EncoderCacheManager = field(default_factory=lambda: EncoderCacheManager(3, 4))
    held: dict[str, tuple[int, bool, dict[str, Rank]]] = field(default_factory=dict[str, tuple[int, bool, dict[str, Rank]]])

    def allocate(self, key: str, num_pages: int, rank: Rank) -> None:
        if key in self.held:
            return
        free = 3 - sum(pages for pages, _, _ in self.held.values())
        yields = {
            name: pages
            for name, (pages, is_filled, pins) in self.held.items()
            if is_filled and all(other > rank for other in pins.values())
        }
        freed_before = self.cache.num_free_pages
        assert freed_before == free
        pages = self.cache.allocate(key, num_pages * 4, rank)
        assert (pages is not None) == (free + sum(yields.values()) >= num_pages), "room was not found, or taken from who keeps it"
        gone = {name for name in self.held if not self.cache.is_known(name)}
        assert gone <= set(yields)
        assert pages is not None or not gone, "something made room in vain"
        pinned = {name for name in yields if self.held[name][2]}
        assert not gone & pinned or set(yields) - pinned <= gone, "a pin yields while something is evictable"
        for name in gone:
            del self.held[name]
        if pages is not None:
            self.held[key] = (num_pages, False, {})

    def fill(self, key: str) -> None:
        if key in self.held and not self.held[key][1]:
            self.cache.mark_resident(key)
            self.held[key] = (self.held[key][0], True, {})

    def give_up(self, key: str) -> None:
        if key in self.held and not self.held[key][1]:
            self.cache.discard(key)
            del self.held[key]

    def pin(self, key: str, holder: str, rank: Rank) -> None:
        if key in self.held and self.held[key][1]:
            self.cache.pin(key, holder, rank)
            self.held[key][2][holder] = rank

    def unpin(self, key: str, holder: str) -> None:
        self.cache.unpin(key, holder)
        if key in self.held:
            self.held[key][2].pop(holder, None)

    def check(self) -> None:
        self.cache.check_invariants()
        for key in "XYZ":
            _, is_filled, pins = self.held.get(key, (0, False, {}))
            resident = EntryState.RESIDENT if pins else EntryState.EVICTABLE
            filling = EntryState.FILLING if key in self.held else None
            assert self.cache.state(key) == (resident if is_filled else filling)


def test_every_sequence_of_calls_takes_pages_only_from_who_yields():
    events: dict[str, Callable[[Pages], None]] = {
        "X for the second in line": lambda m: m.allocate("X", 1, (0, 2)),
        "Y for the first in line": lambda m: m.allocate("Y", 2, (0, 1)),
        "Z for nobody": lambda m: m.allocate("Z", 1, LAST),
        "X is here": lambda m: m.fill("X"),
        "Y is here": lambda m: m.fill("Y"),
        "Z is here": lambda m: m.fill("Z"),
        "X failed": lambda m: m.give_up("X"),
        "the second pins X": lambda m: m.pin("X", "second", (0, 2)),
        "the third pins Z": lambda m: m.pin("Z", "third", (0, 3)),
        "peers keep Z": lambda m: m.pin("Z", "peers", LEASE),
        "the second lets go of X": lambda m: m.unpin("X", "second"),
        "peers let go of Z": lambda m: m.unpin("Z", "peers"),
    }
    assert follow_every_sequence(Pages(), events, depth=10) > 10_000
