"""Kinds of failure that stopped other schedulers, where KV blocks are in it: read after they were freed, given to two, asked for in vain."""

import logging
from dataclasses import replace

import pytest
from engine_rig import Engine, TurnedClock, assert_nothing_is_held, item_of, make_engine, tickets_of, wanted

from triptych.engine.arithmetic_runner import ArithmeticRunner, Fabric
from triptych.engine.core import EngineCore
from triptych.engine.events import ECNeeded, Failed, Finished, PrefixHit
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.output import KVLoad, KVTicket, ModelRunnerOutput, SchedulerOutput
from triptych.sampling_params import SamplingParams


def text(n: int, seed: int = 1) -> list[int]:
    return [(seed * 37 + 11 * place) % 900 for place in range(n)]


def prefilled(prefill: Engine, name: str, tokens: list[int], n: int) -> RequestSpec:
    """The request as a decode worker gets it."""
    prefill.add(name, tokens, n=n, hands_over=True)
    prefill.run()
    return moved(tokens, prefill.tokens[name], n, tickets_of(prefill, name), name)


def moved(tokens: list[int], generated: list[int], n: int, tickets: tuple[KVTicket, ...], name: str) -> RequestSpec:
    sampling = SamplingParams(max_tokens=n, temperature=0.0)
    return RequestSpec(name, (*tokens, *generated), len(tokens), sampling, kv_tickets=tickets)


def hits(engine: Engine, request_id: str) -> list[int]:
    return [event.num_tokens for event in engine.events if isinstance(event, PrefixHit) and event.id == request_id]


def failure_of(engine: Engine, request_id: str) -> FailureReason | None:
    end = engine.ends[request_id]
    assert isinstance(end, Failed)
    return end.reason


# --- read after they were freed


@pytest.mark.parametrize("end", ["preempted", "aborted", "finished"])
def test_blocks_that_two_share_stay_as_they_are_for_the_one_when_the_other_leaves(end: str):
    """a and b begin alike: whatever frees b's blocks, a goes on to read the 4 that they share, and c takes what is free. There are 18: a needs 8, c
    10, b 5 more, unless it has a short answer."""
    engine = make_engine(is_alone=True, num_kv_blocks=18)
    engine.add("a", text(16), n=16)
    engine.step()
    engine.add("b", [*text(16), 5, 6, 7], n=2 if end == "finished" else 16)
    engine.step()
    assert hits(engine, "b") == [16]
    if end == "aborted":
        engine.core.scheduler.abort("b")
    engine.add("c", text(20, 3), n=20, priority=-1 if end == "preempted" else 0)
    engine.run()
    assert engine.tokens["a"] == wanted(text(16), n=16)
    assert engine.tokens["c"] == wanted(text(20, 3), n=20)
    assert (engine.core.scheduler.num_preempted > 0) == (end == "preempted")
    assert_nothing_is_held(engine)


def test_a_prefix_that_others_need_the_room_of_is_found_as_far_as_it_is_left():
    """The 8 blocks hold a's 7 full ones; c takes 4 of them from the end, in the very step before b counts on all of them."""
    engine = make_engine(is_alone=True, num_kv_blocks=8)
    engine.add("a", text(28), n=1)
    engine.run()
    engine.add("c", text(17, 2), n=1, priority=-1)
    engine.add("b", text(29), n=1)
    engine.run()
    assert engine.tokens["b"] == wanted(text(29), n=1)
    assert hits(engine, "b") == [12]
    assert_nothing_is_held(engine)


def test_a_prefix_that_ends_inside_an_item_which_is_gone_waits_for_the_item_also_where_windows_take_items_whole():
    """Tokens 0 .. 15, the cat at 6 .. 10; the dog has put it out of the cache. b's hit ends at 8, in the cat."""
    engine = make_engine(is_alone=True, encoder_rows=8)
    config = engine.core._config  # pyright: ignore[reportPrivateUsage]
    engine.core = EngineCore(config, engine.runner, engine.clock, has_atomic_items=True)
    cat, dog = item_of("cat", 6, 5), item_of("dog", 0, 8)
    engine.encode("e1", cat)
    engine.add("a", text(16), (cat,))
    engine.run()
    engine.encode("e2", dog)
    engine.run()
    ends_otherwise = [*text(11), *text(5, seed=9)]
    engine.add("b", ends_otherwise, (cat,))
    engine.run()
    assert "b" not in engine.tokens
    engine.encode("e3", cat)
    engine.run()
    assert hits(engine, "b") == [8]
    assert engine.tokens["b"] == wanted(ends_otherwise, (cat,))
    assert_nothing_is_held(engine)


# --- freed and written in one step


def test_a_published_block_is_good_until_its_memory_is_given_to_another_and_stale_in_that_very_step():
    fabric, clock = Fabric(), TurnedClock()
    prefill = make_engine("EP", fabric=fabric, clock=clock, num_kv_blocks=6)
    decode = make_engine("D", fabric=fabric, clock=clock, prefix_caching=False)  # else it would need to read nothing twice
    spec = prefilled(prefill, "r", text(8), n=3)
    prefill.core.scheduler.release("r")
    prefill.run()
    decode.core.add_request(spec)  # released, and not overwritten yet
    decode.run()
    assert prefill.tokens["r"] + decode.tokens["r"] == wanted(text(8), n=3)
    prefill.add("other", text(22, 2), n=2, hands_over=True)  # all 6 blocks
    prefill.step()
    decode.core.add_request(replace(spec, request_id="late"))
    decode.run()
    assert failure_of(decode, "late") == FailureReason.STALE
    assert_nothing_is_held(decode)


# --- what failed was never noted


def test_blocks_of_a_step_that_failed_are_found_by_nobody():
    """The first chunk runs, the second fails: only the first's block is known afterwards."""
    engine = make_engine(is_alone=True, chunk=4)
    steps: list[SchedulerOutput] = []

    def fail_second(output: SchedulerOutput) -> ModelRunnerOutput:
        steps.append(output)
        if len(steps) == 2:
            raise RuntimeError("the device is gone for a moment")
        return ArithmeticRunner.execute_model(engine.runner, output)

    engine.runner.execute_model = fail_second
    logging.disable(logging.ERROR)
    engine.add("a", text(13), n=2)
    engine.run()
    logging.disable(logging.NOTSET)
    assert isinstance(engine.ends["a"], Failed)
    engine.add("b", text(13), n=2)
    engine.run()
    assert engine.tokens["b"] == wanted(text(13), n=2)
    assert hits(engine, "b") == [4]
    assert_nothing_is_held(engine)


def test_a_copy_that_failed_leaves_nothing_that_a_later_prompt_could_find():
    fabric = Fabric()
    prefill, decode = make_engine("EP", fabric=fabric), make_engine("EPD", fabric=fabric, worker_id="other")
    fabric.failures["r"] = FailureReason.CORRUPT
    decode.core.add_request(prefilled(prefill, "r", text(12), n=3))
    decode.run()
    assert failure_of(decode, "r") == FailureReason.CORRUPT
    decode.add("again", text(12), n=3)
    decode.run()
    assert decode.tokens["again"] == wanted(text(12), n=3)
    assert hits(decode, "again") == []
    assert_nothing_is_held(decode)


# --- references that nobody knows


def test_to_release_or_abort_what_nobody_knows_does_nothing():
    fabric = Fabric()
    for role in ("EP", "D", "EPD", "PD"):
        engine = make_engine(role, fabric=fabric)
        for name in ("never", "was"):
            engine.core.scheduler.release(name)
            engine.core.scheduler.abort(name)
        assert not engine.step()
        assert engine.events == []
        assert_nothing_is_held(engine)


def test_kv_of_a_producer_that_nobody_knows_fails_its_request_alone():
    fabric = Fabric()
    prefill, decode = make_engine("EP", fabric=fabric), make_engine("D", fabric=fabric)
    lost, kept = prefilled(prefill, "lost", text(12), n=4), prefilled(prefill, "kept", text(12, 2), n=4)
    del fabric.runners["EP"]
    decode.core.add_request(lost)
    decode.step()
    fabric.runners["EP"] = prefill.runner
    decode.core.add_request(kept)
    decode.run()
    assert failure_of(decode, "lost") == FailureReason.PEER_LOST
    assert isinstance(decode.ends["kept"], Finished)
    assert prefill.tokens["kept"] + decode.tokens["kept"] == wanted(text(12, 2), n=4)
    assert_nothing_is_held(decode)


# --- asked for once


def test_kv_is_pulled_once_however_many_steps_the_copy_takes_and_a_decode_step_asks_for_nothing():
    fabric = Fabric()
    prefill, decode = make_engine("EP", fabric=fabric), make_engine("D", fabric=fabric)
    loads: list[KVLoad] = []

    def watch(output: SchedulerOutput) -> ModelRunnerOutput:
        loads.extend(output.kv_connector_metadata.loads)
        return ArithmeticRunner.execute_model(decode.runner, output)

    decode.runner.execute_model = watch
    decode.core.add_request(prefilled(prefill, "r", text(12), n=10))
    decode.runner.held.add(("r", 0))
    for _ in range(20):
        decode.step()
    decode.runner.held.clear()
    decode.run()
    assert prefill.tokens["r"] + decode.tokens["r"] == wanted(text(12), n=10)
    assert len(loads) == 1
    assert not [event for event in decode.events if isinstance(event, ECNeeded | PrefixHit)]


def test_the_prefix_is_told_once_however_often_it_is_looked_up():
    """One place; b is looked at in each of a's steps, and starts when a has ended."""
    engine = make_engine(is_alone=True, max_num_seqs=1)
    cat = item_of("cat", 1, 6)
    engine.encode("e", cat)
    engine.add("a", text(14), (cat,), n=20)
    engine.step()
    engine.step()
    engine.add("b", text(14), (cat,), n=2)
    engine.run()
    assert hits(engine, "b") == [12]


# --- identity does not depend on cache settings


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_a_hand_over_does_not_depend_on_who_caches_prefixes(here: bool, there: bool):
    fabric = Fabric()
    prefill = make_engine("EP", fabric=fabric, prefix_caching=here)
    decode = make_engine("D", fabric=fabric, prefix_caching=there)
    for name in ("first", "second"):  # the second is found where prefixes are kept
        decode.core.add_request(prefilled(prefill, name, text(13), n=5))
        decode.run()
        assert prefill.tokens[name] + decode.tokens[name] == wanted(text(13), n=5)
        prefill.core.scheduler.release(name)
    assert hits(prefill, "second") == ([12] if here else [])
    prefill.run()
    for engine in (prefill, decode):
        assert_nothing_is_held(engine)


# --- larger than the cache


@pytest.mark.parametrize("role", ["EP", "PD", "D", "EPD"])
def test_what_no_kv_cache_of_this_size_could_hold_is_refused_at_once_on_every_path(role: str):
    """2 blocks hold 8 tokens: 6 of prompt and 3 of answer are one too many, 2 of answer are not."""
    fabric = Fabric()
    big = make_engine("EP", fabric=fabric, worker_id="big")
    engine = make_engine(role, fabric=fabric, num_kv_blocks=2)
    for name, n in (("fits", 2), ("large", 3)):
        if role == "D":
            engine.core.add_request(prefilled(big, name, text(6), n))
        else:
            engine.add(name, text(6), n=n, hands_over=role == "EP")
    engine.step()
    end = engine.ends["large"]
    assert isinstance(end, Failed)
    assert end.status == 400
    engine.run()
    assert not isinstance(engine.ends["fits"], Failed)
