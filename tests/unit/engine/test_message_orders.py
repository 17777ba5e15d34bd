"""Messages in unusual orders, and prompts at the edges: what the engine makes of them, worked by hand."""

from dataclasses import replace

import msgspec
import pytest
from engine_rig import Engine, assert_nothing_is_held, item_of, key_of, make_engine, tickets_of, wanted

from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import ECNeeded, EncodeFailed, Failed, Finished, HandedOver
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import ECTicket
from triptych.sampling_params import SamplingParams


def text(n: int, seed: int = 1) -> list[int]:
    return [(seed * 37 + 11 * i) % 900 for i in range(n)]


def with_gaps(name: str, *runs: tuple[int, int]) -> MediaItem:
    return MediaItem(key_of(name), "image", runs, sum(length for _, length in runs))


def spec_of(name: str, tokens: list[int], items: tuple[MediaItem, ...] = (), n: int = 4, **more: object) -> RequestSpec:
    sampling = SamplingParams(max_tokens=n, temperature=0.0)
    return RequestSpec(name, tuple(tokens), len(tokens), sampling, items, **more)  # type: ignore[arg-type]


def encoded_elsewhere(fabric: Fabric, item: MediaItem) -> ECTicket:
    encoder = make_engine("E", fabric=fabric, worker_id="elsewhere")
    encoder.encode("x", item)
    encoder.run()
    ticket = encoder.encoded["x"].ticket
    assert ticket is not None
    return ticket


def asked_for(engine: Engine) -> list[tuple[str, str]]:
    return [(event.id, event.reason) for event in engine.events if isinstance(event, ECNeeded)]


# --- prompts


@pytest.mark.parametrize("chunk", (1, 3, 6, 64))
@pytest.mark.parametrize(
    "items",
    (
        (item_of("first", 0, 6),),
        (item_of("last", 14, 6),),
        (item_of("all", 0, 20),),
        (item_of("a", 3, 4), item_of("b", 7, 4)),
        (with_gaps("g", (2, 2), (6, 3), (12, 1)),),
        (with_gaps("woven", (1, 2), (8, 2)), with_gaps("into", (4, 2), (12, 2))),
        (item_of("same", 2, 4), item_of("same", 9, 4)),
    ),
)
def test_items_anywhere_in_the_prompt_give_the_tokens_worked_by_hand(items: tuple[MediaItem, ...], chunk: int):
    engine = make_engine(is_alone=True, chunk=chunk)
    engine.add("r", text(20), items)
    for index, item in enumerate(items):
        engine.encode(f"e{index}", item)
    engine.run()
    assert engine.tokens["r"] == wanted(text(20), items)
    assert_nothing_is_held(engine)


def test_a_prompt_of_exactly_one_chunk_is_sampled_in_its_step():
    engine = make_engine(is_alone=True, chunk=16)
    engine.add("r", text(16), n=1)
    engine.step()
    assert engine.tokens["r"] == wanted(text(16), n=1)
    assert isinstance(engine.ends["r"], Finished)


def test_a_stop_token_counts_only_after_min_tokens():
    tokens = wanted(text(12), n=4)
    engine = make_engine(is_alone=True)
    sampling = SamplingParams(max_tokens=9, min_tokens=2, temperature=0.0, stop_token_ids=(tokens[1], tokens[2]))
    engine.core.add_request(RequestSpec("r", tuple(text(12)), 12, sampling))
    engine.run()
    assert engine.tokens["r"] == tokens[:2]


def test_an_item_lost_between_two_of_its_runs_does_not_keep_the_gap_from_being_computed():
    engine = make_engine(is_alone=True, chunk=4, encoder_rows=8)
    item, big = with_gaps("gap", (2, 2), (10, 2)), item_of("big", 0, 8)
    engine.add("r", text(20), (item,))
    engine.encode("e", item)
    engine.step()
    engine.core.scheduler.prepared(item.key, None, 0.0)
    engine.preparations.clear()
    engine.step()  # tokens 0 to 3
    engine.core.add_request(spec_of("first in line", text(12), (big,), priority=-1))
    engine.encode("b", big)
    engine.run()
    assert engine.tokens["first in line"] == wanted(text(12), (big,))
    engine.encode("again", item)
    engine.run()
    assert engine.tokens["r"] == wanted(text(20), (item,))
    assert_nothing_is_held(engine)


def test_a_gap_longer_than_the_budget_is_computed_within_the_budget():
    engine = make_engine(is_alone=True, chunk=4, encoder_rows=8)
    item = with_gaps("gap", (2, 2), (30, 2))
    engine.add("r", text(40), (item,))
    engine.encode("e", item)
    engine.step()
    engine.core.scheduler.prepared(item.key, None, 0.0)
    engine.step()
    engine.core.scheduler.cache.discard(item.key)
    assert engine.core.scheduler.schedule().num_scheduled_tokens == {"r": 4}


def test_a_picture_that_comes_again_after_another_does_not_keep_the_other_out_of_a_small_cache():
    engine = make_engine(is_alone=True, chunk=8, encoder_rows=12)
    items = (item_of("K", 1, 10), item_of("B", 12, 10), item_of("K", 23, 10))
    engine.add("r", text(40), items)
    for attempt in range(3):
        for item in items[:2]:
            engine.encode(f"{item.key[:4]}-{attempt}", item)
        engine.run()
    assert engine.tokens["r"] == wanted(text(40), items)
    assert_nothing_is_held(engine)


# --- one item, from here and from there


@pytest.mark.parametrize("is_slow", (False, True))
def test_an_item_that_a_load_brings_while_the_tower_is_asked_for_it_answers_both(is_slow: bool):
    fabric = Fabric()
    engine = make_engine("EP", fabric=fabric)
    item = item_of("cat", 5, 6)
    engine.add("r", text(20), (item,), hands_over=True)
    engine.encode("stays", item, will_stay=True)
    engine.encode("goes", item)
    engine.step()
    fabric.is_holding = is_slow
    engine.core.announce(encoded_elsewhere(fabric, item))
    engine.run()
    fabric.is_holding = False
    engine.run()
    assert engine.tokens["r"] == wanted(text(20), (item,), 1)
    assert engine.runner.encoded_keys == []
    assert engine.encoded["stays"].ticket is None
    ticket = engine.encoded["goes"].ticket
    assert ticket is not None
    assert ticket.data.producer == "EP"
    for name in ("goes", "r"):
        engine.core.scheduler.release(name)
    engine.run()
    assert_nothing_is_held(engine)


def test_the_tower_takes_over_when_the_load_fails():
    fabric = Fabric()
    engine = make_engine("EP", fabric=fabric)
    item = item_of("cat", 5, 6)
    engine.add("r", text(20), (item,), hands_over=True)
    engine.encode("e", item, will_stay=True)
    engine.step()
    fabric.failures[item.key] = FailureReason.PEER_LOST
    engine.core.announce(encoded_elsewhere(fabric, item))
    engine.run()
    assert engine.runner.encoded_keys == [item.key]
    assert isinstance(engine.ends["r"], HandedOver)


def test_an_item_that_stayed_gets_its_ticket_when_somebody_asks_for_one():
    engine = make_engine("EP")
    item = item_of("cat", 5, 6)
    engine.encode("stays", item, will_stay=True)
    engine.run()
    engine.encode("goes", item)
    engine.run()
    assert engine.encoded["goes"].ticket is not None
    assert engine.encoded["goes"].was_cached
    assert engine.runner.encoded_keys == [item.key]


def test_a_cached_item_is_published_again_so_that_its_new_ticket_is_as_good_as_its_lease():
    engine = make_engine("E", lease_s=5.0)
    item = item_of("cat", 5, 6)
    engine.encode("first", item)
    engine.run()
    engine.clock.now += 6.0
    engine.encode("second", item)
    assert engine.core.scheduler.schedule().ec_connector_metadata.republish == (item.key,)


def test_an_item_whose_caller_left_is_not_published():
    engine = make_engine("EP", encoder_rows=8)
    item = item_of("cat", 5, 6)
    engine.encode("stays", item, will_stay=True)
    engine.run()
    engine.encode("leaves", item)
    engine.core.scheduler.abort("leaves")
    assert engine.core.scheduler.schedule().ec_connector_metadata.republish == ()
    assert engine.core.scheduler.cache.num_pinned == 0


def test_a_request_asks_for_its_item_though_the_tower_is_at_it_for_somebody_who_may_leave():
    engine = make_engine("EPD")
    item = item_of("cat", 5, 6)
    engine.encode("others", item)
    engine.step()
    engine.add("r", text(20), (item,))
    engine.step()
    assert asked_for(engine) == [("r", FailureReason.MISSING)]
    engine.core.scheduler.abort("others")
    engine.encode("own", item)
    engine.run()
    assert engine.tokens["r"] == wanted(text(20), (item,))


def test_an_encode_id_that_is_used_again_holds_one_item_only():
    engine = make_engine("E")
    for name in ("a", "b"):
        engine.encode("same id", item_of(name, 0, 6))
        engine.run()
    assert engine.core.scheduler.cache.num_pinned == 1
    engine.core.scheduler.release("same id")
    engine.core.scheduler.release("same id")
    engine.run()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("num_rows", (-1, 0, 4, 7, 10**9))
@pytest.mark.parametrize("comes_first", (False, True))
def test_a_ticket_of_another_size_ends_its_request_and_does_not_stand_in_the_way_of_others(num_rows: int, comes_first: bool):
    fabric = Fabric()
    engine = make_engine("PD", fabric=fabric)
    cat, dog = item_of("cat", 5, 6), item_of("dog", 5, 6)
    wrong = msgspec.structs.replace(encoded_elsewhere(fabric, cat), num_rows=num_rows)
    if comes_first:
        engine.core.announce(wrong)
    engine.add("wrong", text(20), (cat,))
    engine.add("right", text(20), (dog,))
    if not comes_first:
        engine.core.announce(wrong)
    engine.core.announce(encoded_elsewhere(fabric, dog))
    engine.run()
    end = engine.ends["wrong"]
    assert isinstance(end, Failed)
    assert (end.status, end.type, end.reason) == (503, "ec_unavailable", FailureReason.MISMATCH)
    assert engine.tokens["right"] == wanted(text(20), (dog,))
    assert_nothing_is_held(engine)


def test_two_requests_with_one_picture_have_it_encoded_once():
    engine = make_engine(is_alone=True)
    item = item_of("cat", 5, 6)
    for name, seed in (("a", 1), ("b", 2)):
        engine.encode(f"e{name}", item)
        engine.add(name, text(20, seed), (item,))
    engine.run()
    assert engine.runner.encoded_keys == [item.key]
    for name, seed in (("a", 1), ("b", 2)):
        assert engine.tokens[name] == wanted(text(20, seed), (item,))


# --- leaving between any two steps


@pytest.mark.parametrize("steps_before", range(12))
@pytest.mark.parametrize("role", ("EPD", "EP"))
def test_an_abort_between_any_two_steps_leaves_nothing_and_does_not_disturb_a_neighbour(role: str, steps_before: int):
    engine = make_engine(role, chunk=4, is_alone=False)
    hands_over = role == "EP"
    item = item_of("cat", 5, 6)
    for name in ("leaves", "stays"):
        engine.add(name, text(20), (item,), hands_over=hands_over)
        engine.encode(f"e-{name}", item)
    for _ in range(steps_before):
        for key in engine.preparations:
            engine.core.scheduler.prepared(key, None, 0.0)
        engine.preparations.clear()
        engine.step()
    for name in ("leaves", "e-leaves", "leaves", "never known"):
        engine.core.scheduler.abort(name)
        engine.core.scheduler.release(name)
    engine.run()
    assert engine.tokens["stays"] == wanted(text(20), (item,), 1 if hands_over else 4)
    for name in ("stays", "e-stays"):
        engine.core.scheduler.release(name)
    engine.run()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("has_failed", (False, True))
def test_the_end_of_a_copy_for_a_request_that_left_says_nothing_about_the_next_of_its_id(has_failed: bool):
    fabric = Fabric()
    p, d = make_engine("P", fabric=fabric), make_engine("D", fabric=fabric)

    def prefilled(seed: int) -> RequestSpec:
        p.tokens.clear()
        p.ends.clear()
        p.add("r", text(12, seed), hands_over=True)
        p.run()
        spec = spec_of("r", text(12, seed), kv_tickets=tickets_of(p, "r"))
        return moved_on(spec, p.tokens["r"])

    fabric.is_holding = True
    d.core.add_request(prefilled(1))
    d.run()
    d.core.scheduler.abort("r")
    if has_failed:
        fabric.failures["r"] = FailureReason.PEER_LOST
    d.core.add_request(prefilled(2))
    d.step()
    fabric.is_holding = False
    d.run()
    assert [*p.tokens["r"], *d.tokens["r"]] == wanted(text(12, 2))
    assert_nothing_is_held(d)


def moved_on(spec: RequestSpec, generated: list[int]) -> RequestSpec:
    return replace(spec, token_ids=(*spec.token_ids, *generated))


def test_what_loads_its_kv_counts_among_those_that_run():
    fabric = Fabric()
    p, mixed = make_engine("P", fabric=fabric), make_engine("EPD", fabric=fabric, max_num_seqs=2)
    for name in "ab":
        p.add(name, text(12), n=6, hands_over=True)
    p.run()
    fabric.is_holding = True
    for name in "ab":
        moved = spec_of(name, text(12), n=6, kv_tickets=tickets_of(p, name))
        mixed.core.add_request(moved_on(moved, p.tokens[name]))
    mixed.step()
    for name in "cd":
        mixed.add(name, text(12), n=6)
    mixed.step()
    fabric.is_holding = False
    for _ in range(30):
        mixed.step()
        assert mixed.core.scheduler.num_running <= 2
    for name in "ab":
        assert p.tokens[name] + mixed.tokens[name] == wanted(text(12), n=6)
    for name in "cd":
        assert mixed.tokens[name] == wanted(text(12), n=6)


def test_an_item_that_cannot_be_prepared_while_a_request_waits_leaves_the_request_waiting_for_another_try():
    engine = make_engine(is_alone=True)
    item = item_of("cat", 5, 6)
    engine.add("r", text(20), (item,))
    engine.encode("e", item)
    engine.step()
    engine.preparations.clear()
    engine.core.scheduler.preparation_failed(item.key, "the pool is full", FailureReason.INTERNAL)
    engine.run()
    assert [event.id for event in engine.events if isinstance(event, EncodeFailed)] == ["e"]
    assert "r" not in engine.ends
    engine.encode("again", item)
    engine.run()
    assert engine.tokens["r"] == wanted(text(20), (item,))
    assert_nothing_is_held(engine)


def test_a_request_that_finds_its_item_evicted_goes_on_at_once_with_a_ticket_that_came_before_it_looked():
    fabric = Fabric()
    engine = make_engine("PD", fabric=fabric, chunk=4, encoder_rows=8)
    item, big = item_of("item", 0, 8), item_of("big", 0, 8)
    encoder = make_engine("E", fabric=fabric, worker_id="elsewhere")
    for each in (item, big):
        encoder.encode(each.key, each)
    encoder.run()
    ticket, tickets_of_big = (encoder.encoded[each.key].ticket for each in (item, big))
    assert ticket is not None and tickets_of_big is not None
    engine.add("brings it", text(12), (item,), 1)
    engine.core.announce(ticket)
    engine.run()
    engine.add("r", text(12), (item,), 1)
    engine.core.add_request(spec_of("busy", text(12), n=1, priority=-2))
    engine.core.add_request(spec_of("first in line", text(12), (big,), n=1, priority=-1))
    engine.core.announce(tickets_of_big)
    engine.step()  # the step's budget is spent before it comes to "r", whose item has to make room
    engine.core.announce(ticket)
    engine.run()
    assert engine.tokens["r"] == wanted(text(12), (item,), 1)
    assert [reason for request_id, reason in asked_for(engine) if request_id == "r"] == []
