"""Prompts that begin alike: what is shared, what is not, and what of their pictures is still needed."""

import pytest
from engine_rig import Engine, assert_nothing_is_held, item_of, make_engine, wanted

from triptych.engine.events import ECNeeded, Finished, PrefixHit
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.sampling_params import SamplingParams

BLOCK = 4


def text(n: int, seed: int = 1) -> list[int]:
    return [(seed * 37 + 11 * i) % 900 for i in range(n)]


def hits(engine: Engine, request_id: str) -> list[int]:
    return [event.num_tokens for event in engine.events if isinstance(event, PrefixHit) and event.id == request_id]


def needs(engine: Engine, request_id: str) -> list[tuple[str, FailureReason]]:
    return [(event.key, event.reason) for event in engine.events if isinstance(event, ECNeeded) and event.id == request_id]


def num_computed(engine: Engine) -> int:
    return engine.core.counters.tokens_computed


def ask(engine: Engine, request_id: str, tokens: list[int], items: tuple[MediaItem, ...] = (), n: int = 4) -> int:
    """Answered to its end; the tokens that were computed for it."""
    before = num_computed(engine)
    engine.add(request_id, tokens, items, n=n)
    engine.run()
    assert engine.tokens[request_id] == wanted(tokens, items, n=n)
    return num_computed(engine) - before


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_prompt_that_comes_again_computes_what_is_not_in_full_blocks_and_at_least_one_token(length: int, chunk: int):
    engine = make_engine(is_alone=True, block_size=BLOCK, chunk=chunk)
    assert ask(engine, "a", text(length)) == length + 3, "the last token of an answer is not computed"
    found = (length - 1) // BLOCK * BLOCK
    assert ask(engine, "b", text(length)) == length - found + 3
    assert hits(engine, "b") == ([found] if found else [])
    assert_nothing_is_held(engine)


def test_the_same_text_after_another_beginning_shares_nothing():
    engine = make_engine(is_alone=True, block_size=BLOCK)
    ask(engine, "a", [1, *text(12)])
    ask(engine, "b", [2, *text(12)])
    assert hits(engine, "b") == []


def test_tenants_share_no_blocks():
    engine = make_engine(is_alone=True, block_size=BLOCK)
    for request_id, salt in (("a", "one"), ("b", "two"), ("c", "two")):
        engine.add(request_id, text(13), cache_salt=salt)
        engine.run()
    assert (hits(engine, "a"), hits(engine, "b"), hits(engine, "c")) == ([], [], [12])


def test_with_caching_off_everything_is_computed():
    engine = make_engine(is_alone=True, block_size=BLOCK, prefix_caching=False)
    assert ask(engine, "a", text(13)) == ask(engine, "b", text(13))
    assert hits(engine, "b") == []


def test_prompt_logprobs_are_computed_for_the_whole_prompt():
    engine = make_engine(is_alone=True, block_size=BLOCK)
    ask(engine, "a", text(13))
    engine.add("b", text(13), sampling=SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0))
    engine.run()
    assert hits(engine, "b") == []


# --- pictures


def picture_engine(encoder_rows: int = 64, num_kv_blocks: int = 64, chunk: int = 64, max_num_seqs: int = 8) -> Engine:
    return make_engine(
        is_alone=True,
        block_size=BLOCK,
        encoder_rows=encoder_rows,
        num_kv_blocks=num_kv_blocks,
        chunk=chunk,
        max_num_seqs=max_num_seqs,
    )


def test_the_same_text_with_another_picture_shares_what_stands_before_the_picture():
    engine = picture_engine()
    cat, dog = item_of("cat", 9, 6), item_of("dog", 9, 6)
    engine.encode("e1", cat)
    ask(engine, "a", text(20), (cat,))
    engine.encode("e2", dog)
    ask(engine, "b", text(20), (dog,))
    assert hits(engine, "b") == [8]
    assert engine.tokens["a"] != engine.tokens["b"]


def test_a_picture_that_a_hit_covers_is_neither_asked_for_nor_encoded_again():
    engine = picture_engine(encoder_rows=8)
    cat, dog = item_of("cat", 1, 6), item_of("dog", 1, 8)
    engine.encode("e1", cat)
    ask(engine, "a", text(20), (cat,))
    engine.encode("e2", dog)  # takes the cat's place in the encoder cache
    ask(engine, "b", text(20), (dog,))
    assert not engine.core.scheduler.cache.is_resident(cat.key)
    ask(engine, "c", text(20), (cat,))
    assert needs(engine, "c") == []
    assert hits(engine, "c") == [16]
    assert engine.runner.encoded_keys == [cat.key, dog.key]


def test_of_a_picture_in_which_a_hit_ends_the_rest_is_computed_from_its_own_rows():
    """Tokens 0-9, a picture of 8 rows at 5 .. 12: the prompts differ from token 13 on, so the hit ends at 12, in the picture."""
    engine = picture_engine(encoder_rows=8)
    cat = item_of("cat", 5, 8)
    engine.encode("e1", cat)
    ask(engine, "a", text(20), (cat,))
    dog = item_of("dog", 0, 8)
    engine.encode("e2", dog)
    ask(engine, "other", text(20, 3), (dog,))
    tokens = [*text(13), *text(5, seed=8)]
    engine.add("b", tokens, (cat,))
    engine.run()
    assert needs(engine, "b") == [(cat.key, FailureReason.MISSING)]
    engine.encode("e3", cat)
    engine.run()
    assert engine.tokens["b"] == wanted(tokens, (cat,))
    assert hits(engine, "b") == [12]
    assert_nothing_is_held(engine)


def test_a_picture_that_comes_again_after_the_hit_is_still_needed():
    engine = picture_engine(encoder_rows=8)
    first, again = item_of("cat", 0, 4), item_of("cat", 14, 4)
    engine.encode("e1", first)
    ask(engine, "a", text(12), (first,))
    other = item_of("dog", 0, 8)
    engine.encode("e2", other)
    ask(engine, "other", text(20, 3), (other,))
    engine.add("b", text(20), (first, again))
    engine.run()
    assert needs(engine, "b") == [(first.key, FailureReason.MISSING)]
    engine.encode("e3", first)
    engine.run()
    assert engine.tokens["b"] == wanted(text(20), (first, again))
    assert_nothing_is_held(engine)


def test_the_router_hears_on_arrival_what_is_covered_and_that_it_is_gone_when_the_request_starts():
    """Two places: while two others run, the blocks that the third counts on are taken."""
    engine = picture_engine(num_kv_blocks=12, max_num_seqs=2, encoder_rows=8)
    cat = item_of("cat", 1, 6)
    engine.encode("e1", cat)
    ask(engine, "a", text(20), (cat,))
    engine.add("big", text(14, 5), n=8)
    engine.add("big too", text(14, 6), n=8)
    engine.step()
    engine.add("b", text(20), (cat,))
    assert hits(engine, "b") == []
    engine.step()
    (on_arrival,) = hits(engine, "b")
    assert on_arrival >= cat.end
    dog = item_of("dog", 0, 8)
    engine.encode("e2", dog)  # and the picture's rows go as well
    engine.run()
    assert hits(engine, "b") == [on_arrival, 0] or needs(engine, "b") == [(cat.key, FailureReason.EVICTED)]
    engine.encode("e3", cat)
    engine.run()
    assert engine.tokens["b"] == wanted(text(20), (cat,))
    assert_nothing_is_held(engine)


def test_a_wait_for_a_picture_ends_when_somebody_else_has_computed_it():
    """Both wait for the cat; the first computes past it while the second has no place to run; then its blocks are all that the second needs."""
    engine = picture_engine(max_num_seqs=1)
    cat = item_of("cat", 1, 6)
    engine.add("a", text(20), (cat,))
    engine.add("b", text(20), (cat,))
    engine.run()
    engine.encode("e1", cat)
    engine.run()
    assert engine.tokens["a"] == engine.tokens["b"] == wanted(text(20), (cat,))
    assert hits(engine, "b") == [16]
    assert_nothing_is_held(engine)


# --- at the same time


@pytest.mark.parametrize("chunk", [5, 64])
def test_prompts_that_arrive_together_are_computed_once(chunk: int):
    engine = make_engine(is_alone=True, block_size=BLOCK, chunk=chunk)
    for index in range(5):
        engine.add(f"r{index}", text(33))
    engine.run()
    assert all(engine.tokens[f"r{index}"] == wanted(text(33)) for index in range(5))
    assert num_computed(engine) == 33 + 4 * 1 + 5 * 3
    assert [hits(engine, f"r{index}") for index in range(5)] == [[], [32], [32], [32], [32]]


def test_prompts_that_wait_for_one_picture_compute_it_once():
    engine = picture_engine()
    cat = item_of("cat", 2, 30)
    for index in range(3):
        engine.add(f"r{index}", text(41), (cat,))
    engine.run()
    engine.encode("e", cat)
    engine.run()
    assert all(engine.tokens[f"r{index}"] == wanted(text(41), (cat,)) for index in range(3))
    assert num_computed(engine) == 41 + 2 * 1 + 3 * 3
    assert_nothing_is_held(engine)


def test_nobody_waits_for_a_block_of_somebody_behind():
    """The first in line is not held up by a request of worse priority that is further with the same prompt but gets no tokens."""
    engine = picture_engine(chunk=8, max_num_seqs=3)
    cat = item_of("cat", 8, 6)
    engine.add("late", text(20), (cat,), priority=5)
    engine.step()  # computes up to the picture, and waits
    engine.add("early", text(20), (cat,), priority=0)
    engine.encode("e", cat)
    engine.run()
    order = [event.id for event in engine.events if isinstance(event, Finished)]
    assert order == ["early", "late"]


# --- preemption


def test_a_preempted_request_goes_on_from_what_is_left_of_its_blocks():
    engine = make_engine(is_alone=True, block_size=BLOCK, num_kv_blocks=10)
    engine.add("a", text(16), n=12)
    engine.add("b", text(16, 2), n=12)
    engine.run()
    assert engine.core.scheduler.num_preempted > 0
    assert engine.tokens["a"] == wanted(text(16), n=12)
    assert engine.tokens["b"] == wanted(text(16, 2), n=12)
    assert num_computed(engine) < 2 * (16 + 11) + 16, "not all of the second prompt was computed again"
    assert_nothing_is_held(engine)
