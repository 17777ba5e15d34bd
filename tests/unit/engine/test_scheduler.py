"""Scenarios worked by hand on the arithmetic runner: what is computed when, and what is held at the end."""

import pytest
from engine_rig import Engine, assert_nothing_is_held, item_of, make_engine, tickets_of, wanted

from triptych.engine.arithmetic_runner import Fabric, expected_prompt_logprob
from triptych.engine.events import (
    ECLoaded,
    ECNeeded,
    Encoded,
    EncodeFailed,
    Failed,
    Finished,
    HandedOver,
    NewTokens,
    PromptLogprobs,
)
from triptych.engine.request import RequestSpec
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.output import ECTicket, KVTicket, ModelRunnerOutput, SchedulerOutput
from triptych.sampling_params import SamplingParams


def text(n: int, seed: int = 1) -> list[int]:
    return [(seed * 37 + 11 * i) % 900 for i in range(n)]


def test_a_text_request_gives_the_tokens_worked_by_hand_in_chunks_of_any_size():
    for chunk in (1, 3, 7, 64):
        engine = make_engine(is_alone=True, chunk=chunk)
        engine.add("r", text(13), n=5)
        engine.run()
        assert engine.tokens["r"] == wanted(text(13), n=5)
        assert_nothing_is_held(engine)


def test_a_window_is_cut_at_the_first_row_of_an_item_that_is_not_here():
    engine = make_engine(is_alone=True)
    item = item_of("cat", 5, 6)
    engine.add("r", text(20), (item,))
    output = engine.core.scheduler.schedule()
    assert output.num_scheduled_tokens == {"r": 5}


def test_tokens_before_a_missing_item_are_computed_and_the_rest_when_it_arrives():
    engine = make_engine(is_alone=True, chunk=4)
    item = item_of("cat", 5, 6)
    engine.add("r", text(20), (item,))
    engine.run()
    assert "r" not in engine.tokens
    engine.encode("e", item)
    engine.run()
    assert engine.tokens["r"] == wanted(text(20), (item,))
    assert isinstance(engine.encoded["e"], Encoded)
    assert_nothing_is_held(engine)


def test_a_text_request_passes_one_that_waits_for_its_picture():
    engine = make_engine(is_alone=True)
    engine.add("picture", text(20), (item_of("cat", 0, 6),))
    engine.add("text", text(9, 2))
    engine.run()
    assert engine.tokens["text"] == wanted(text(9, 2))
    assert "picture" not in engine.ends


def test_an_item_of_two_requests_is_encoded_once():
    engine = make_engine(is_alone=True)
    first, second = item_of("cat", 2, 6), item_of("cat", 7, 6)
    engine.add("a", text(20), (first,))
    engine.add("b", text(30, 3), (second,))
    engine.encode("ea", first)
    engine.encode("eb", second)
    engine.run()
    assert engine.runner.encoded_keys == [first.key]
    assert engine.tokens["a"] == wanted(text(20), (first,))
    assert engine.tokens["b"] == wanted(text(30, 3), (second,))
    assert_nothing_is_held(engine)


def test_an_item_in_the_cache_is_neither_prepared_nor_encoded_again():
    engine = make_engine("E")
    item = item_of("cat", 0, 6)
    engine.encode("first", item)
    engine.run()
    engine.encode("second", item)
    engine.step()
    assert engine.preparations == []
    assert engine.encoded["second"].was_cached
    assert engine.encoded["second"].ticket == engine.encoded["first"].ticket
    assert engine.runner.encoded_keys == [item.key]


def test_an_encode_whose_only_caller_left_is_not_started():
    engine = make_engine("E")
    engine.encode("e", item_of("cat", 0, 6))
    engine.step()
    engine.core.scheduler.abort("e")
    engine.run()
    assert engine.runner.encoded_keys == []
    assert_nothing_is_held(engine)


def test_an_encode_goes_on_while_one_of_two_callers_is_left():
    engine = make_engine("E")
    item = item_of("cat", 0, 6)
    engine.encode("left", item)
    engine.encode("stays", item)
    engine.step()
    engine.core.scheduler.abort("left")
    engine.run()
    assert set(engine.encoded) == {"stays"}


def test_encode_prefill_and_decode_apart_give_the_tokens_of_one_worker():
    fabric = Fabric()
    e, p, d = (make_engine(role, fabric=fabric, chunk=7) for role in "EPD")
    item = item_of("cat", 5, 10)
    p.add("r", text(30), (item,), n=6, hands_over=True)
    p.run()
    e.encode("e", item)
    e.run()
    ticket = e.encoded["e"].ticket
    assert ticket is not None
    p.core.announce(ticket)
    p.run()
    assert isinstance(p.ends["r"], HandedOver)
    first = p.tokens["r"]
    d.core.add_request(
        spec := _moved(text(30), first, (item,), 6, tickets_of(p, "r")),
    )
    d.run()
    assert first + d.tokens[spec.request_id] == wanted(text(30), (item,), 6)
    e.core.scheduler.release("e")
    p.core.scheduler.release("r")
    for engine in (e, p, d):
        engine.run()
        assert_nothing_is_held(engine)


def _moved(
    prompt: list[int], generated: list[int], items: tuple[MediaItem, ...], n: int, tickets: tuple[KVTicket, ...], name: str = "r"
) -> RequestSpec:
    sampling = SamplingParams(max_tokens=n, temperature=0.0)
    return RequestSpec(name, (*prompt, *generated), len(prompt), sampling, items, kv_tickets=tickets)


def test_a_ticket_that_comes_before_its_request_is_not_lost():
    fabric = Fabric()
    e, p = make_engine("E", fabric=fabric), make_engine("PD", fabric=fabric)
    item = item_of("cat", 5, 10)
    e.encode("e", item)
    e.run()
    ticket = e.encoded["e"].ticket
    assert ticket is not None
    p.core.announce(ticket)
    p.run()
    p.add("r", text(30), (item,))
    p.run()
    assert p.tokens["r"] == wanted(text(30), (item,))
    assert not [event for event in p.events if isinstance(event, ECNeeded)]


def test_a_failed_load_asks_for_the_item_again_and_the_request_survives():
    fabric = Fabric()
    e, p = make_engine("E", fabric=fabric), make_engine("PD", fabric=fabric)
    item = item_of("cat", 5, 10)
    p.add("r", text(30), (item,))
    e.encode("e", item)
    e.run()
    ticket = e.encoded["e"].ticket
    assert ticket is not None
    fabric.failures[item.key] = FailureReason.PEER_LOST
    p.core.announce(ticket)
    p.run()
    reasons = [event.reason for event in p.events if isinstance(event, ECNeeded)]
    assert reasons == [FailureReason.MISSING, FailureReason.PEER_LOST]
    p.core.announce(ticket)
    p.run()
    assert p.tokens["r"] == wanted(text(30), (item,))
    assert_nothing_is_held(p)


def test_a_ticket_of_another_shape_fails_its_request_alone():
    fabric = Fabric()
    p = make_engine("PD", fabric=fabric)
    item = item_of("cat", 5, 10)
    e = make_engine("E", fabric=fabric)
    e.encode("e", item)
    e.run()
    ticket = e.encoded["e"].ticket
    assert ticket is not None
    fabric.failures[item.key] = FailureReason.MISMATCH
    p.add("r", text(30), (item,))
    p.add("t", text(9))
    p.core.announce(ticket)
    p.run()
    end = p.ends["r"]
    assert isinstance(end, Failed)
    assert (end.type, end.reason) == ("ec_unavailable", FailureReason.MISMATCH)
    assert p.tokens["t"] == wanted(text(9))
    assert_nothing_is_held(p)


def test_an_item_that_never_comes_fails_its_request_at_its_deadline():
    engine = make_engine("PD")
    engine.add("r", text(30), (item_of("cat", 5, 10),))
    engine.run()
    engine.clock.now += 9.9
    engine.run()
    assert "r" not in engine.ends
    engine.clock.now += 0.2
    engine.run()
    end = engine.ends["r"]
    assert isinstance(end, Failed)
    assert (end.status, end.type, end.reason) == (503, "ec_unavailable", FailureReason.TIMEOUT)
    assert_nothing_is_held(engine)


def test_recycled_pages_are_never_delivered():
    fabric = Fabric()
    e = make_engine("E", fabric=fabric, encoder_rows=12, lease_s=5.0)
    p = make_engine("PD", fabric=fabric)
    item = item_of("cat", 5, 10)
    e.encode("e", item)
    e.run()
    ticket = e.encoded["e"].ticket
    assert ticket is not None
    e.clock.now += 6.0  # the lease lapses, and another item takes the pages
    e.encode("other", item_of("dog", 0, 12))
    e.run()
    p.add("r", text(30), (item,))
    p.core.announce(ticket)
    p.run()
    reasons = [event.reason for event in p.events if isinstance(event, ECNeeded)]
    assert reasons[-1] == FailureReason.STALE
    assert "r" not in p.tokens


def test_a_leased_item_is_not_evicted_and_the_next_encode_waits_for_its_release():
    e = make_engine("E", encoder_rows=12)
    e.encode("first", item_of("cat", 0, 10))
    e.run()
    e.encode("second", item_of("dog", 0, 10))
    e.run()
    assert "second" not in e.encoded
    e.core.scheduler.release("first")
    e.run()
    assert "second" in e.encoded


def test_two_requests_whose_pictures_fit_one_at_a_time_both_end():
    engine = make_engine(is_alone=True, encoder_rows=16, chunk=8)
    a = (item_of("a1", 1, 10), item_of("a2", 12, 10))
    b = (item_of("b1", 1, 10), item_of("b2", 12, 10))
    engine.add("a", text(30), a)
    engine.add("b", text(30, 2), b)
    backlog = [a[1], b[0], b[1], a[0]]  # the worst order
    for round_number in range(40):
        for index, item in enumerate(backlog):
            engine.encode(f"e{round_number}-{index}", item)
        engine.run()
        backlog = [item for item in (*a, *b) if _is_asked_for(engine, item.key)]
        if len(engine.ends) == 2:
            break
    assert engine.tokens["a"] == wanted(text(30), a)
    assert engine.tokens["b"] == wanted(text(30, 2), b)
    assert_nothing_is_held(engine)


def _is_asked_for(engine: Engine, key: str) -> bool:
    asked = [event for event in engine.events if isinstance(event, ECNeeded) and event.key == key]
    return bool(asked)


def test_the_last_in_line_gives_up_its_blocks_and_still_ends_right():
    engine = make_engine(is_alone=True, num_kv_blocks=8, block_size=4)
    engine.add("a", text(12), n=12)
    engine.add("b", text(12, 2), n=12)
    engine.run()
    assert engine.tokens["a"] == wanted(text(12), n=12)
    assert engine.tokens["b"] == wanted(text(12, 2), n=12)
    assert_nothing_is_held(engine)


def test_a_decode_worker_without_blocks_sends_the_last_request_back():
    fabric = Fabric()
    p, d = make_engine("P", fabric=fabric), make_engine("D", fabric=fabric, num_kv_blocks=8)
    for name, seed in (("a", 1), ("b", 2)):
        p.add(name, text(12, seed), n=12, hands_over=True)
    p.run()
    for name, seed in (("a", 1), ("b", 2)):
        d.core.add_request(_moved(text(12, seed), p.tokens[name], (), 12, tickets_of(p, name), name))
    d.run()
    assert p.tokens["a"] + d.tokens["a"] == wanted(text(12), n=12)
    end = d.ends["b"]
    assert isinstance(end, Failed)
    assert (end.type, end.reason) == ("kv_unavailable", FailureReason.EVICTED)
    assert_nothing_is_held(d)


def test_blocks_of_a_request_that_left_during_its_kv_load_come_back_when_the_copy_ends():
    fabric = Fabric()
    p, d = make_engine("P", fabric=fabric), make_engine("D", fabric=fabric)
    p.add("r", text(12), n=4, hands_over=True)
    p.run()
    fabric.is_holding = True
    d.core.add_request(_moved(text(12), p.tokens["r"], (), 4, tickets_of(p, "r")))
    d.run()
    d.core.scheduler.abort("r")
    d.run()
    held = d.core.scheduler.kv
    assert held.num_free_blocks < held.num_blocks, "blocks that a copy writes are not free"
    fabric.is_holding = False
    d.run()
    assert_nothing_is_held(d)


def test_published_blocks_are_kept_until_the_lease_lapses():
    p = make_engine("P", lease_s=5.0)
    p.add("r", text(12), n=4, hands_over=True)
    p.run()
    assert p.core.scheduler.kv.num_free_blocks == 61
    p.clock.now += 5.1
    p.run()
    assert_nothing_is_held(p)


def test_a_request_that_ends_with_its_first_token_is_not_handed_over():
    p = make_engine("P")
    p.add("r", text(12), n=1, hands_over=True)
    p.run()
    end = p.ends["r"]
    assert isinstance(end, Finished)
    assert end.reason == "length"
    assert_nothing_is_held(p)


def test_a_stop_token_ends_the_request_and_is_not_sent():
    third = wanted(text(12), n=3)[2]
    engine = make_engine(is_alone=True)
    engine.add("r", text(12), n=9, stops=(third,))
    engine.run()
    assert engine.tokens["r"] == wanted(text(12), n=2)
    end = engine.ends["r"]
    assert isinstance(end, Finished)
    assert end.reason == "stop"


def test_decodes_run_in_every_step_beside_a_long_prompt():
    engine = make_engine(is_alone=True, chunk=8, num_kv_blocks=200)
    engine.add("short", text(4), n=30)
    engine.step()
    engine.add("long", text(160, 2), n=2)
    for _ in range(15):
        before = len(engine.tokens["short"])
        engine.step()
        assert len(engine.tokens["short"]) == before + 1


def test_an_item_that_cannot_be_prepared_fails_its_callers_alone():
    engine = make_engine("E")
    bad, good = item_of("bad", 0, 6), item_of("good", 0, 6)
    engine.encode("bad", bad)
    engine.encode("good", good)
    engine.step()
    engine.preparations.remove(bad.key)
    engine.core.scheduler.preparation_failed(bad.key, "not a picture", FailureReason.BAD_MEDIA)
    engine.run()
    failures = [event for event in engine.events if isinstance(event, EncodeFailed)]
    assert [(event.id, event.reason) for event in failures] == [("bad", FailureReason.BAD_MEDIA)]
    assert "good" in engine.encoded


def test_calls_that_a_role_cannot_serve_are_refused_by_name():
    for role in ("E", "D", "P"):  # P cannot decode, and is not asked to hand over
        engine = make_engine(role)
        engine.add("r", text(5))
        engine.run()
        end = engine.ends["r"]
        assert isinstance(end, Failed)
        assert end.status == 400
        assert f"role is {role}" in end.message


def test_a_request_that_could_never_fit_is_refused_at_once():
    engine = make_engine(is_alone=True, num_kv_blocks=4)
    engine.add("r", text(10), n=100)
    engine.step()
    end = engine.ends["r"]
    assert isinstance(end, Failed)
    assert end.status == 400
    assert "--kv-cache-mib" in end.message
    engine = make_engine(is_alone=True, encoder_rows=8)
    engine.add("r", text(40), (item_of("big", 0, 20),))
    engine.step()
    end = engine.ends["r"]
    assert isinstance(end, Failed)
    assert "--encoder-cache-rows" in end.message


def test_a_step_that_raises_ends_its_own_requests_and_the_engine_goes_on():
    engine = make_engine(is_alone=True)
    engine.add("r", text(5))
    execute = engine.runner.execute_model

    def broken(_: SchedulerOutput) -> ModelRunnerOutput:
        raise RuntimeError("out of memory")

    engine.runner.execute_model = broken  # type: ignore[method-assign]
    engine.step()
    engine.runner.execute_model = execute  # type: ignore[method-assign]
    end = engine.ends["r"]
    assert isinstance(end, Failed)
    assert end.status == 500
    engine.add("next", text(7))
    engine.run()
    assert engine.tokens["next"] == wanted(text(7))


def test_an_abort_that_comes_just_after_the_answer_leaves_no_lease():
    e, p = make_engine("E"), make_engine("P")
    e.encode("e", item_of("cat", 0, 6))
    e.run()
    p.add("r", text(12), hands_over=True)
    p.run()
    assert isinstance(p.ends["r"], HandedOver)
    for engine, name in ((e, "e"), (p, "r")):
        engine.core.scheduler.abort(name)
        engine.run()
        assert_nothing_is_held(engine)


def test_caches_that_are_tight_on_both_sides_delay_requests_but_stop_none():
    """Running requests hold the places and blocks, waiting ones the consumer's cache, unread tickets the producer's: somebody must yield."""
    fabric = Fabric()
    e = make_engine("E", fabric=fabric, encoder_rows=24)
    p = make_engine("PD", fabric=fabric, encoder_rows=24, num_kv_blocks=12, max_num_seqs=3)
    items = {f"r{index}": item_of(f"pic{index}", 6, 12) for index in range(30)}
    for index, (name, item) in enumerate(items.items()):
        p.add(name, text(20, index), (item,), n=2)
    names = list(items)
    encodes = {f"{name}#0": name for name in names[3:] + names[:3]}  # the worst order: what runs first is encoded last
    for encode_id, name in encodes.items():
        e.encode(encode_id, items[name])
    for _ in range(3000):
        for key in e.preparations:
            e.core.scheduler.prepared(key, None, 0.0)
        e.preparations.clear()
        e.step()
        for encode_id in [each for each in encodes if each in e.encoded]:
            ticket = e.encoded.pop(encode_id).ticket
            assert ticket is not None
            p.core.announce(ticket)
        p.step()
        for event in p.events:
            if isinstance(event, ECLoaded):
                for encode_id in [each for each, name in encodes.items() if name == event.id]:
                    e.core.scheduler.release(encode_id)
            if isinstance(event, ECNeeded) and event.reason == FailureReason.EVICTED:
                encode_id = f"{event.id}#{len(encodes)}"
                encodes[encode_id] = event.id
                e.encode(encode_id, items[event.id])
        p.events.clear()
    assert {name: p.tokens.get(name) for name in items} == {
        name: wanted(text(20, index), (item,), 2) for index, (name, item) in enumerate(items.items())
    }
    assert_nothing_is_held(p)


def test_a_request_whose_item_takes_the_room_that_all_running_ones_wait_for_runs_in_the_place_of_the_last():
    fabric = Fabric()
    e = make_engine("E", fabric=fabric)
    p = make_engine("PD", fabric=fabric, encoder_rows=8, max_num_seqs=2)
    big, missing, small = item_of("big", 0, 8), item_of("missing", 10, 4), item_of("small", 4, 4)
    tickets: dict[str, ECTicket] = {}
    for item in (big, small):
        e.encode("e", item)
        e.run()
        ticket = e.encoded["e"].ticket
        assert ticket is not None
        tickets[item.key] = ticket
    p.add("first", text(16), (big, missing))
    for name in ("second", "third"):  # both run up to the picture
        p.add(name, text(12), (small,), n=1)
    p.run()
    p.core.announce(tickets[big.key])
    p.run()
    p.core.announce(tickets[small.key])
    p.run()
    assert {name: p.tokens.get(name) for name in ("second", "third")} == dict.fromkeys(
        ("second", "third"), wanted(text(12), (small,), 1)
    )
    assert "first" not in p.ends, "nobody has brought its second picture yet"


def add_with_prompt_logprobs(engine: Engine, request_id: str, tokens: list[int], n: int = 4) -> None:
    sampling = SamplingParams(max_tokens=n, temperature=0.0, prompt_logprobs=2)
    engine.core.add_request(RequestSpec(request_id, tuple(tokens), len(tokens), sampling))


def told_of(engine: Engine, request_id: str) -> list[PromptLogprobs | NewTokens]:
    return [each for each in engine.events if isinstance(each, PromptLogprobs | NewTokens) and each.id == request_id]


def test_a_prompts_logprobs_are_told_chunk_by_chunk_from_its_second_token_on_and_before_the_answer():
    for chunk in (1, 3, 5, 12, 13, 64):
        engine = make_engine(is_alone=True, chunk=chunk)
        add_with_prompt_logprobs(engine, "r", text(13))
        engine.run()
        told = told_of(engine, "r")
        prompt = [event for event in told if isinstance(event, PromptLogprobs)]
        assert told[: len(prompt)] == prompt, "all before the first token"
        # Each chunk tells of the token after each of its positions: of a last chunk of one position, nothing.
        assert [event.start for event in prompt] == [start + 1 for start in range(0, 12, chunk)]
        wanted_logprobs = [expected_prompt_logprob(place, text(13)[place], 2) for place in range(1, 13)]
        assert [token for event in prompt for token in event.tokens] == wanted_logprobs


@pytest.mark.parametrize(("chunk", "n", "is_told_again"), [(7, 1, True), (32, 6, False)])
def test_a_prompt_preempted_before_its_answer_is_told_again_under_the_same_numbers_and_after_it_is_not(
    chunk: int, n: int, is_told_again: bool
):
    # 6 blocks of 4 tokens: `early` grows to 20 tokens, so that `late` gives up its blocks, in its prompt or in its answer.
    engine = make_engine(is_alone=True, block_size=4, num_kv_blocks=6, chunk=chunk)
    late = text(11, seed=2)
    add_with_prompt_logprobs(engine, "early", text(11), n=9)
    add_with_prompt_logprobs(engine, "late", late, n=n)
    engine.run()
    assert engine.core.scheduler.num_preempted > 0
    told = told_of(engine, "late")
    prompt = [event for event in told if isinstance(event, PromptLogprobs)]
    assert told[: len(prompt)] == prompt, "all before the first token, however often"
    numbered = [(number, token) for event in prompt for number, token in enumerate(event.tokens, event.start)]
    assert (len(numbered) > 10) == is_told_again
    assert set(numbered) == {(place, expected_prompt_logprob(place, late[place], 2)) for place in range(1, 11)}
    assert engine.tokens["late"] == wanted(late, n=n)


def test_a_request_that_is_handed_over_tells_its_prompts_logprobs_on_the_prefill_worker_only():
    fabric = Fabric()
    prefill, decode = make_engine("P", fabric=fabric), make_engine("D", fabric=fabric)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0)
    prefill.core.add_request(RequestSpec("r", tuple(text(9)), 9, sampling, hands_over=True))
    prefill.run()
    known = (*text(9), *prefill.tokens["r"])
    decode.core.add_request(RequestSpec("r", known, 9, sampling, kv_tickets=tickets_of(prefill, "r")))
    decode.run()
    assert prefill.tokens["r"] + decode.tokens["r"] == wanted(text(9))
    assert sum(len(event.tokens) for event in told_of(prefill, "r") if isinstance(event, PromptLogprobs)) == 8
    assert not any(isinstance(event, PromptLogprobs) for event in decode.events)


def complete_at(engine: Engine, num_tokens: int, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
    """The runner says so of request "r" with its token of that number; of number 0, without one."""
    execute = engine.runner.execute_model

    def execute_model(output: SchedulerOutput) -> ModelRunnerOutput:
        result = execute(output)
        if "r" in result.sampled and len(engine.tokens.get("r", ())) + 1 >= num_tokens:
            (result.refused_requests.setdefault("r", "too costly.") if refuses else result.completed.add("r"))
            if num_tokens == 0 or refuses:
                del result.sampled["r"]
        return result

    monkeypatch.setattr(engine.runner, "execute_model", execute_model)


@pytest.mark.parametrize("num_tokens", (0, 1, 3, 4))
def test_an_answer_that_the_runner_calls_complete_ends_with_stop(num_tokens: int, monkeypatch: pytest.MonkeyPatch):
    """Also with its first token, where prefill would hand it over, and with the last that it may have."""
    for hands_over in (False, True) if num_tokens <= 1 else (False,):
        engine = make_engine("P" if hands_over else "EPD", is_alone=not hands_over)
        complete_at(engine, num_tokens, monkeypatch)
        engine.add("r", text(9), n=4, hands_over=hands_over)
        engine.run()
        end = engine.ends["r"]
        assert isinstance(end, Finished)
        assert end.reason == "stop"
        assert engine.tokens.get("r", []) == wanted(text(9), n=4)[:num_tokens]
        assert_nothing_is_held(engine)


def test_a_request_that_the_runner_refuses_in_its_middle_ends_with_a_400_and_its_neighbour_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = make_engine(is_alone=True)
    complete_at(engine, 3, monkeypatch, refuses=True)
    engine.add("r", text(9), n=6)
    engine.add("n", text(9, 2), n=6)
    engine.run()
    end = engine.ends["r"]
    assert isinstance(end, Failed)
    assert (end.status, end.type, end.message, end.reason) == (400, "invalid_request_error", "too costly.", None)
    assert engine.tokens["n"] == wanted(text(9, 2), n=6)
    assert_nothing_is_held(engine)
