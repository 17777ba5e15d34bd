"""Which item may take whose pages, and that no page is ever lost or owned twice."""

from random import Random

from triptych.engine.encoder_cache_manager import LAST, EncoderCacheManager


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


def test_pins_can_be_counted_while_another_thread_takes_an_entry_away():
    class Pins(dict[str, tuple[int, ...]]):
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
