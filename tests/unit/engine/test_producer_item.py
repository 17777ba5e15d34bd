"""An item that is kept for peers: by whom, until when, and that it is evictable as soon as, and only when, nobody holds it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from engine_rig import TurnedClock, key_of
from every_sequence import follow_every_sequence

from triptych.engine.encoder_cache_manager import EncoderCacheManager, EntryState
from triptych.engine.producer_item import ProducerItems, ProducerState

CAT, DOG = key_of("cat"), key_of("dog")
FIRST_IN_LINE = (-(2**40), 0)
LEASE_S = 5.0


def kept_in(num_pages: int, *keys: str) -> tuple[ProducerItems, EncoderCacheManager, TurnedClock]:
    """Each key resident, in a page of its own."""
    cache, clock = EncoderCacheManager(num_pages, 4), TurnedClock()
    for key in keys:
        cache.allocate(key, 4, FIRST_IN_LINE)
        cache.mark_resident(key)
    return ProducerItems(cache, LEASE_S, clock), cache, clock


def test_an_item_is_kept_until_the_last_of_its_leases_is_released():
    kept, cache, _ = kept_in(1, CAT)
    for name in "ab":
        kept.lease(CAT, name)
    assert kept.state(CAT) == ProducerState.PUBLISHED
    kept.leave("a")
    assert cache.allocate(DOG, 4, FIRST_IN_LINE) is None
    kept.leave("b")
    assert kept.state(CAT) is None
    assert cache.state(CAT) == EntryState.EVICTABLE
    assert cache.allocate(DOG, 4, FIRST_IN_LINE) is not None


def test_each_lease_lapses_at_its_own_time_and_is_counted():
    kept, cache, clock = kept_in(1, CAT)
    kept.lease(CAT, "a")
    clock.now += 3.0
    kept.lease(CAT, "b")
    assert kept.next_deadline() == clock.now + 2.0
    clock.now += 2.0
    kept.expire()
    assert (kept.num_leases, kept.num_leases_expired) == (1, 1)
    assert cache.state(CAT) == EntryState.RESIDENT
    clock.now += 3.0
    kept.expire()
    assert (kept.num_leases, kept.num_leases_expired) == (0, 2)
    assert cache.state(CAT) == EntryState.EVICTABLE
    assert kept.next_deadline() is None


def test_an_item_is_kept_from_the_moment_its_ticket_is_asked_for():
    kept, cache, _ = kept_in(1, CAT)
    kept.ask(CAT, "a")
    assert kept.asked() == (CAT,)
    assert cache.allocate(DOG, 4, FIRST_IN_LINE) is None
    assert kept.take_callers(CAT) == ["a"]
    assert kept.asked() == ()
    assert cache.state(CAT) == EntryState.EVICTABLE


def test_who_leaves_while_it_asks_is_named_by_its_item_and_who_holds_a_lease_is_not():
    kept, _, _ = kept_in(1, CAT)
    kept.ask(CAT, "asks")
    kept.lease(CAT, "holds")
    assert kept.leave("asks") == CAT
    assert kept.leave("holds") is None
    assert kept.leave("unknown") is None


def test_an_id_that_is_used_again_gives_up_what_it_held():
    kept, cache, _ = kept_in(2, CAT, DOG)
    kept.lease(CAT, "a")
    kept.lease(DOG, "a")
    assert cache.state(CAT) == EntryState.EVICTABLE
    assert cache.state(DOG) == EntryState.RESIDENT
    assert kept.num_leases == 1


def test_what_is_not_resident_cannot_be_kept():
    kept, cache, _ = kept_in(1)
    with pytest.raises(KeyError):
        kept.lease(CAT, "a")
    cache.allocate(CAT, 4, FIRST_IN_LINE)
    with pytest.raises(AssertionError):
        kept.lease(CAT, "a")


# --- every sequence of events, beside a model that only knows who holds what


@dataclass
class Keeping:
    """Two items in a cache of two pages; `holds`: encode id -> (item, when its lease lapses, or None while it asks)."""

    clock: TurnedClock = field(default_factory=TurnedClock)
    cache: EncoderCacheManager = field(default_factory=lambda: EncoderCacheManager(2, 4))
    holds: dict[str, tuple[str, float | None]] = field(default_factory=dict[str, tuple[str, float | None]])
    num_lapsed: int = 0
    kept: ProducerItems = field(init=False)

    def __post_init__(self) -> None:
        self.kept = ProducerItems(self.cache, LEASE_S, self.clock)

    def encode(self, key: str, encode_id: str) -> None:
        """As the encode scheduler does with what is resident, and with what its step has published."""
        if self.cache.is_resident(key):
            self.kept.ask(key, encode_id)
            self.holds[encode_id] = (key, None)
        elif self.cache.allocate(key, 4, FIRST_IN_LINE) is not None:
            self.cache.mark_resident(key)
            self.kept.lease(key, encode_id)
            self.holds[encode_id] = (key, self.clock.now + LEASE_S)
        else:
            assert len({held for held, _ in self.holds.values()}) == 2, "there was room"

    def step(self) -> None:
        """Publishes what is asked for."""
        asked = {key for key, lapses_at in self.holds.values() if lapses_at is None}
        assert set(self.kept.asked()) == asked
        for key in self.kept.asked():
            for encode_id in self.kept.take_callers(key):
                assert self.holds[encode_id] == (key, None)
                self.kept.lease(key, encode_id)
                self.holds[encode_id] = (key, self.clock.now + LEASE_S)

    def leave(self, encode_id: str) -> None:
        key, lapses_at = self.holds.pop(encode_id, (None, None))
        assert self.kept.leave(encode_id) == (key if lapses_at is None else None)

    def pass_time(self) -> None:
        self.clock.now += 3.0
        self.kept.expire()
        lapsed = [name for name, (_, at) in self.holds.items() if at is not None and at <= self.clock.now]
        self.num_lapsed += len(lapsed)
        for name in lapsed:
            del self.holds[name]

    def check(self) -> None:
        self.kept.check_invariants()
        self.cache.check_invariants()
        deadlines = [at for _, at in self.holds.values() if at is not None]
        assert self.kept.num_leases == len(deadlines)
        assert self.kept.next_deadline() == min(deadlines, default=None)
        assert self.kept.num_leases_expired == self.num_lapsed
        for key in "XYZ":
            held = [lapses_at for each, lapses_at in self.holds.values() if each == key]
            asked = ProducerState.ASKED if None in held else None
            assert self.kept.state(key) == (asked or (ProducerState.PUBLISHED if held else None))
            assert (self.cache.state(key) == EntryState.RESIDENT) == bool(held)


def test_every_sequence_of_events_keeps_an_item_as_long_as_somebody_holds_it():
    events: dict[str, Callable[[Keeping], None]] = {
        "a encodes X": lambda m: m.encode("X", "a"),
        "b encodes X": lambda m: m.encode("X", "b"),
        "a encodes Y": lambda m: m.encode("Y", "a"),
        "c encodes Y": lambda m: m.encode("Y", "c"),
        "d encodes Z": lambda m: m.encode("Z", "d"),
        "step": Keeping.step,
        "a leaves": lambda m: m.leave("a"),
        "b leaves": lambda m: m.leave("b"),
        "d leaves": lambda m: m.leave("d"),
        "time": Keeping.pass_time,
    }
    assert follow_every_sequence(Keeping(), events, depth=6) > 10_000
