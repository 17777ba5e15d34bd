"""The runner gives what the whole model gives in `transformers`, however the scheduler cuts and places the work."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.runner.conftest import HandScheduler, Picture, Prompt, TinyModel, oracle_logprobs, text_of

from triptych.config import EngineConfig
from triptych.errors import FailureReason
from triptych.models.loader import Parts
from triptych.output import (
    ECConnectorMetadata,
    ECConnectorOutput,
    ECLoad,
    KVConnectorMetadata,
    KVLoad,
    KVSave,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprob,
)
from triptych.runner.ec_connector import ECConnector
from triptych.runner.input_batch import InputBatch
from triptych.runner.language_model import LanguageModel
from triptych.runner.model_runner import ModelRunner, make_runner
from triptych.sampling_params import SamplingParams
from triptych.transfer.fake import FakeDataPlane, FakeNetwork

CATS = Picture((1, 6, 8), seed=1)  # 12 rows
DOGS = Picture((1, 4, 4), seed=2)  # 4 rows


def assert_close(expected: torch.Tensor, token: TokenLogprob) -> None:
    """`expected` [vocabulary] is what the oracle says; the greedy token and 20 alternatives must agree with it to 1e-4."""
    assert token.token_id == int(expected.argmax())
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-4)


def run(
    hand: HandScheduler, chunks: dict[str, list[int]], pictures: tuple[Picture, ...], num_new: int
) -> dict[str, list[TokenLogprob]]:
    """Prefill in the given chunks, one of each request per step, then decode together."""
    sampled: dict[str, list[TokenLogprob]] = {request_id: [] for request_id in chunks}
    encode = pictures
    while any(len(tokens) < num_new for tokens in sampled.values()):
        scheduled: dict[str, int] = {}
        for request_id, plan in chunks.items():
            if len(sampled[request_id]) < num_new:
                scheduled[request_id] = min(plan.pop(0) if plan else 512, hand.remaining(request_id))
        output = hand.step(scheduled, encode)
        encode = ()
        assert not output.failed_requests and not output.failed_encodes and not output.stalled_requests
        for request_id, token in output.sampled.items():
            sampled[request_id].append(token)
    return sampled


@pytest.mark.parametrize("block_size", [4, 16])
def test_ragged_chunked_batches_with_pictures_give_the_logprobs_of_the_whole_model(
    tiny: TinyModel, engine_config: Callable[..., EngineConfig], block_size: int
) -> None:
    hand = HandScheduler(make_runner(engine_config(block_size=block_size), tiny.parts[Parts.FULL]), seed=block_size)
    prompts = {
        "one": Prompt([text_of(1, 5), CATS, text_of(2, 7)]),
        "two": Prompt([text_of(3, 3), DOGS, CATS, text_of(4, 2)]),
        "text": Prompt([text_of(5, 30)]),
        "short": Prompt([text_of(6, 1)]),
    }
    for request_id, prompt in prompts.items():
        hand.add(request_id, prompt)
    # 5 + 1 + 12: the first chunks of `one` end inside CATS; those of `two` inside DOGS, then inside CATS.
    chunks = {"one": [9, 1, 6], "two": [6, 7, 1], "text": [13], "short": []}
    sampled = run(hand, chunks, (CATS, DOGS), num_new=6)
    for request_id, prompt in prompts.items():
        expected = oracle_logprobs(tiny, prompt, hand.tokens[request_id])
        first = len(prompt.render()[0]) - 1
        for offset, token in enumerate(sampled[request_id]):
            assert_close(expected[first + offset], token)


def test_a_request_in_a_batch_samples_what_it_samples_alone(tiny: TinyModel, engine_config: Callable[..., EngineConfig]) -> None:
    settings: dict[str, dict[str, Any]] = {
        "hot": {"temperature": 1.0, "seed": 5},
        "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 6},
        "greedy": {"temperature": 0.0},
    }
    prompts = {"hot": Prompt([text_of(1, 4), DOGS]), "filtered": Prompt([text_of(2, 9)]), "greedy": Prompt([CATS, text_of(3, 2)])}
    config = engine_config()

    def tokens_of(request_ids: list[str], seed: int) -> dict[str, list[int]]:
        hand = HandScheduler(make_runner(config, tiny.parts[Parts.FULL]), seed)
        for request_id in request_ids:
            hand.add(request_id, prompts[request_id], **{"logprobs": None, **settings[request_id]})
        pictures = tuple(picture for request_id in request_ids for picture in prompts[request_id].pictures)
        run(hand, {request_id: [] for request_id in request_ids}, pictures, num_new=8)
        return {request_id: hand.tokens[request_id] for request_id in request_ids}

    together = tokens_of(list(prompts), seed=1)
    alone = {request_id: tokens_of([request_id], seed=2)[request_id] for request_id in prompts}
    assert together == alone
    assert len(set(together["hot"][-8:])) > 2


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(hand: HandScheduler) -> None:
    prompt = Prompt([text_of(1, 5), CATS, text_of(2, 3)])
    for request_id in ("kept", "preempted"):
        hand.add(request_id, prompt, temperature=1.0, seed=3)
    run(hand, {"kept": [], "preempted": []}, (CATS,), num_new=4)
    before = hand.tokens["preempted"]
    hand.step({}, finished_request_ids=("preempted",))
    hand.add("preempted", Prompt([text_of(1, 5), CATS, [*text_of(2, 3), *before[-4:]]]), len(before) - 4, temperature=1.0, seed=3)
    run(hand, {"kept": [], "preempted": [7, 9]}, (), num_new=4)
    assert hand.tokens["preempted"][: len(before) + 4] == hand.tokens["kept"][: len(before) + 4]


def test_a_request_that_starts_again_takes_no_second_row_of_the_block_table(hand: HandScheduler) -> None:
    free_rows = hand.runner.block_table.num_free_rows
    for _ in range(3):
        hand.add("r", Prompt([text_of(1, 5)]))
        hand.step({"r": 5})
    assert hand.runner.block_table.num_free_rows == free_rows - 1
    hand.step({}, finished_request_ids=("r", "never seen"))
    assert hand.runner.block_table.num_free_rows == free_rows


# --- logprobs of the prompt ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[], [1] * 40, [5, 1, 7], [13, 12], [24]], ids=str)
def test_a_prompts_logprobs_are_the_whole_models_wherever_it_is_cut(
    tiny: TinyModel, hand: HandScheduler, chunks: list[int]
) -> None:
    """With pictures in it and neighbours beside it: every token but the first is told once, of each chunk's last position too."""
    prompt = Prompt([text_of(1, 4), CATS, text_of(2, 3), DOGS])
    hand.add("r", prompt, prompt_logprobs=3)
    hand.add("silent", Prompt([text_of(3, 9)]))
    told: list[TokenLogprob] = []
    plan, encode = list(chunks), (CATS, DOGS)
    while hand.computed["r"] < len(prompt.render()[0]):
        start = hand.computed["r"]
        output = hand.step(
            {"r": min(plan.pop(0) if plan else 512, hand.remaining("r")), "silent": hand.remaining("silent")}, encode
        )
        assert output.prompt_logprobs.keys() <= {"r"}
        assert len(told) == start, "the window from `start` tells of token start + 1 on"
        told += output.prompt_logprobs.get("r", ())
        encode = ()
    ids = hand.tokens["r"][: len(prompt.render()[0])]
    expected = oracle_logprobs(tiny, prompt, ids)
    assert [token.token_id for token in told] == ids[1:]
    for row, token in zip(expected, told, strict=False):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert [value for _, value in token.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert token.rank == pytest.approx(int((row > row[token.token_id]).sum()) + 1, abs=1)


def test_a_prompt_of_one_token_has_no_logprobs_and_an_answer_adds_none(hand: HandScheduler) -> None:
    hand.add("short", Prompt([[20]]), prompt_logprobs=1)
    hand.add("r", Prompt([[20, 30, 40]]), prompt_logprobs=0)
    first = hand.step({"short": 1, "r": 3})
    assert {request_id: len(tokens) for request_id, tokens in first.prompt_logprobs.items()} == {"r": 2}
    assert hand.step({"short": 1, "r": 1}).prompt_logprobs == {}


def test_a_prompt_computed_again_after_its_answer_began_is_not_told_again(hand: HandScheduler) -> None:
    hand.add("r", Prompt([[20, 30, 40, 50]]), num_prompt_tokens=3, prompt_logprobs=2)
    assert hand.step({"r": 2}).prompt_logprobs == {}
    assert hand.step({"r": 2}).sampled.keys() == {"r"}


def test_a_prompt_with_a_position_that_gives_nan_fails_alone_though_its_last_position_is_sound(
    hand: HandScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.add("bad", Prompt([text_of(1, 5)]), prompt_logprobs=0)
    hand.add("good", Prompt([text_of(2, 4)]), prompt_logprobs=0)
    forward = LanguageModel.forward

    def poisoned(self: LanguageModel, batch: InputBatch, rows: torch.Tensor) -> torch.Tensor:
        hidden = forward(self, batch, rows)
        hidden[2] = float("nan")
        return hidden

    monkeypatch.setattr(LanguageModel, "forward", poisoned)
    output = hand.step({"bad": 5, "good": 4})
    assert output.failed_requests == {"bad": "the model gave NaN or infinity for a token of the prompt."}
    assert output.sampled.keys() == output.prompt_logprobs.keys() == {"good"}


# --- what goes wrong for one goes wrong for it alone ---------------------------------------------------------------------


def test_an_item_that_is_not_where_the_scheduler_says_fails_its_request_with_key_and_state(hand: HandScheduler) -> None:
    hand.add("bad", Prompt([text_of(1, 3), CATS]))
    hand.add("good", Prompt([text_of(2, 3)]))
    output = hand.step({"bad": 17, "good": 3})
    assert set(output.failed_requests) == {"bad"}
    assert CATS.key in output.failed_requests["bad"] and "absent" in output.failed_requests["bad"]
    assert set(output.sampled) == {"good"}


def test_text_before_an_item_that_is_not_there_is_computed(hand: HandScheduler) -> None:
    hand.add("r", Prompt([text_of(1, 3), CATS]))
    assert hand.step({"r": 4}).failed_requests == {}
    assert hand.step({"r": 13}, (CATS,)).sampled.keys() == {"r"}


def test_pages_other_than_the_items_own_are_not_read(hand: HandScheduler) -> None:
    hand.add("r", Prompt([CATS]))
    output = hand.output({"r": 14}, (CATS,))
    output.item_pages[CATS.key] = tuple(reversed(output.item_pages[CATS.key]))
    assert "resident" in hand.runner.execute_model(output).failed_requests["r"]


def test_pages_given_up_and_written_in_one_step_hold_the_new_item(hand: HandScheduler) -> None:
    """The order within a step: what is freed goes first, so that it cannot take the newcomer with it."""
    hand.step({}, encode=(CATS,))
    pages = hand.item_pages.pop(CATS.key)
    hand.free_pages += pages
    generations = hand.runner.encoder_cache.arena.generations_of(pages)
    hand.add("r", Prompt([[10], DOGS, [11]]))
    output = hand.step({"r": DOGS.num_rows + 4}, encode=(DOGS,), freed_pages=pages)
    assert set(hand.item_pages[DOGS.key]) <= set(pages)
    assert not output.failed_encodes and not output.failed_requests and not output.stalled_requests
    assert CATS.key not in hand.runner.encoder_cache
    assert DOGS.key in hand.runner.encoder_cache
    assert hand.runner.encoder_cache.arena.generations_of(pages) == tuple(each + 1 for each in generations)


def test_a_request_whose_item_fails_to_encode_is_stalled_and_runs_when_the_item_is_there(hand: HandScheduler) -> None:
    broken = Picture((1, 6, 8), seed=1)
    broken.inputs = {"pixel_values": CATS.inputs["pixel_values"][:-1], "image_grid_thw": CATS.inputs["image_grid_thw"]}
    hand.add("bad", Prompt([text_of(1, 3), CATS]))
    hand.add("good", Prompt([text_of(2, 3), DOGS]))
    output = hand.step({"bad": 17, "good": 9}, (broken, DOGS))
    assert output.stalled_requests == {"bad"} and output.failed_requests == {}
    assert set(output.failed_encodes) == {CATS.key}
    assert set(output.sampled) == {"good"}
    output = hand.step({"bad": 17}, (CATS,))
    assert set(output.sampled) == {"bad"}


@pytest.mark.parametrize("bad_id", [1024, -1, 10**12])
def test_a_token_id_outside_the_vocabulary_fails_its_request_alone(hand: HandScheduler, bad_id: int) -> None:
    hand.add("bad", Prompt([[20, bad_id, 30]]))
    hand.add("good", Prompt([text_of(2, 3)]))
    output = hand.step({"bad": 3, "good": 3})
    assert "1024" in output.failed_requests["bad"]
    assert set(output.sampled) == {"good"}


def test_a_prompt_that_the_family_cannot_place_fails_alone_and_leaves_nothing_behind(hand: HandScheduler) -> None:
    hand.add("bad", Prompt([text_of(1, 3), Picture((1, 6, 8), seed=1)]))
    output = hand.output({"bad": 17})
    wrong = msgspec.structs.replace(output.new_requests[0].items[0], grid=(7, 7))
    bad = dataclasses.replace(output.new_requests[0], items=(wrong,))
    free_rows = hand.runner.block_table.num_free_rows
    failed = hand.runner.execute_model(dataclasses.replace(output, new_requests=(bad,))).failed_requests
    assert "cannot be placed" in failed["bad"]
    assert hand.runner.block_table.num_free_rows == free_rows
    assert "does not know" in hand.step({"bad": 1}).failed_requests["bad"]


@pytest.mark.parametrize(("num_tokens", "why"), [(0, "has 5"), (6, "has 5")])
def test_a_window_outside_the_request_fails_it(hand: HandScheduler, num_tokens: int, why: str) -> None:
    hand.add("r", Prompt([text_of(1, 5)]))
    assert why in hand.step({"r": num_tokens}).failed_requests["r"]


def test_a_window_without_blocks_fails_its_request_alone(hand: HandScheduler) -> None:
    hand.add("bad", Prompt([text_of(1, 5)]))
    hand.add("good", Prompt([text_of(1, 5)]))
    output = hand.output({"bad": 5, "good": 5})
    new = (dataclasses.replace(output.new_requests[0], block_ids=output.new_requests[0].block_ids[:1]), output.new_requests[1])
    result = hand.runner.execute_model(dataclasses.replace(output, new_requests=new))
    assert "blocks hold 4" in result.failed_requests["bad"]
    assert set(result.sampled) == {"good"}


def test_a_request_that_computes_nan_fails_alone_and_its_blocks_harm_nobody_later(hand: HandScheduler) -> None:
    for request_id in ("long", "clean"):
        hand.add(request_id, Prompt([text_of(9, 6 if request_id == "clean" else 30)]))
    hand.step({"long": 30, "clean": 6}, (CATS,))
    hand.add("bad", Prompt([text_of(1, 3), CATS]))
    hand.add("good", Prompt([text_of(9, 6)]))
    hand.runner.encoder_cache.rows.fill_(float("nan"))
    output = hand.step({"bad": 17, "good": 6})
    assert "NaN" in output.failed_requests["bad"]
    assert hand.tokens["good"] == hand.tokens["clean"]
    # `next` gets the blocks that hold NaN now. Padded to the length of `long`, it reads past its own end.
    hand.step({}, finished_request_ids=("bad",))
    hand.free_blocks = hand.blocks["bad"]
    hand.add("next", Prompt([text_of(9, 6)]))
    hand.step({"next": 6})
    hand.free_blocks = [*range(200, 256), *hand.free_blocks]  # the next blocks taken are still those with NaN
    for _ in range(4):
        assert hand.step({"next": 1, "long": 1}).failed_requests == {}
    hand.free_blocks.reverse()
    for _ in range(4):
        hand.step({"clean": 1})
    assert hand.tokens["next"] == hand.tokens["clean"]


def test_the_kv_of_a_request_that_failed_is_not_published(tiny: TinyModel, engine_config: Callable[..., EngineConfig]) -> None:
    plane = FakeDataPlane("P-1", FakeNetwork())
    hand = HandScheduler(make_runner(engine_config("P", is_alone=False), tiny.parts[Parts.LANGUAGE_MODEL], plane))
    hand.add("good", Prompt([text_of(9, 6)]))
    hand.add("bad", Prompt([[20, 5000]]))
    saves = (KVSave("good", 6, (1, 2)), KVSave("bad", 2, (3,)))
    output = hand.step({"good": 6, "bad": 2}, kv_connector_metadata=KVConnectorMetadata(saves=saves, lease_s=9.0))
    assert output.kv_connector_output is not None
    assert set(output.kv_connector_output.published) == {"good"}


# --- roles -------------------------------------------------------------------------------------------------------------


def test_an_encoder_only_worker_has_no_language_model_and_holds_nothing_of_one(
    tiny: TinyModel, engine_config: Callable[..., EngineConfig]
) -> None:
    loaded = tiny.parts[Parts.TOWER]
    assert not [name for name, _ in loaded.model.named_parameters() if "language_model" in name or "lm_head" in name]
    runner = make_runner(engine_config("E", is_alone=False), loaded, FakeDataPlane("E-1", FakeNetwork()))
    assert runner.get_kv_cache_spec() == ()
    assert runner.kv_cache.num_blocks == 0
    assert runner.block_table.num_groups == 0
    assert runner.capture_model() == 0
    runner.warm_up()
    hand = HandScheduler(runner)
    output = hand.step({}, (CATS,), ec_connector_metadata=ECConnectorMetadata(saves=(CATS.key,), lease_s=9.0))
    ec_output = output.ec_connector_output
    assert ec_output is not None and set(ec_output.published) == {CATS.key}
    assert output == ModelRunnerOutput(ec_connector_output=ec_output, encode_s=output.encode_s)
    assert runner.profile_run().numel() == 0
    assert CATS.key not in runner.encoder_cache
    runner.close()


def test_a_request_sent_to_an_encoder_only_worker_fails_with_a_sentence(
    tiny: TinyModel, engine_config: Callable[..., EngineConfig]
) -> None:
    runner = make_runner(engine_config("E", is_alone=False), tiny.parts[Parts.TOWER], FakeDataPlane("E-1", FakeNetwork()))
    data = NewRequestData("r", (1, 2), (), SamplingParams(max_tokens=1), 2, 0, ())
    output = runner.execute_model(SchedulerOutput(new_requests=(data,), num_scheduled_tokens={"r": 2}))
    assert "no language model" in output.failed_requests["r"]


def test_a_worker_that_serves_alone_reports_nothing_of_connectors(hand: HandScheduler) -> None:
    output = hand.step({})
    assert output == ModelRunnerOutput()


def test_profiling_leaves_the_caches_empty_and_runs_as_many_tokens_as_a_step_may_have(hand: HandScheduler) -> None:
    hand.step({}, (CATS,))
    hidden = hand.runner.profile_run()
    assert hidden.shape == (1024, 64)  # all 256 blocks of 4: fewer than the step's 2048 tokens
    assert CATS.key not in hand.runner.encoder_cache


def test_warm_up_leaves_no_trace(hand: HandScheduler) -> None:
    free_rows = hand.runner.block_table.num_free_rows
    hand.runner.warm_up()
    assert hand.runner.block_table.num_free_rows == free_rows
    hand.add("r", Prompt([text_of(1, 5)]))
    assert set(hand.step({"r": 5}).sampled) == {"r"}


def test_encode_prefill_and_decode_on_three_workers_give_the_logprobs_of_the_whole_model(
    tiny: TinyModel, engine_config: Callable[..., EngineConfig]
) -> None:
    network = FakeNetwork()
    hands = {
        role: HandScheduler(
            make_runner(engine_config(role, is_alone=False), tiny.parts[part], FakeDataPlane(f"{role}-1", network)), seed
        )
        for seed, (role, part) in enumerate({"E": Parts.TOWER, "P": Parts.LANGUAGE_MODEL, "D": Parts.LANGUAGE_MODEL}.items())
    }
    encode, prefill, decode = hands.values()
    prompt = Prompt([text_of(1, 5), CATS, text_of(2, 4)])  # 23 tokens: the last block of 4 is not full

    output = encode.step({}, (CATS,), ec_connector_metadata=ECConnectorMetadata(saves=(CATS.key,), lease_s=9.0))
    assert output.ec_connector_output is not None
    ticket = output.ec_connector_output.published[CATS.key]

    prefill.add("r", prompt)
    prefill.step({"r": 6})  # the text before the picture does not wait for it
    prefill.step({}, ec_connector_metadata=ECConnectorMetadata(loads=(ECLoad(ticket, prefill.pages_for(CATS), False),)))
    network.deliver()
    prefill.step({})
    scheduler_output = prefill.output({"r": 17})
    saves = (KVSave("r", 23, tuple(prefill.blocks["r"])),)
    output = prefill.runner.execute_model(
        dataclasses.replace(scheduler_output, kv_connector_metadata=KVConnectorMetadata(saves=saves, lease_s=9.0))
    )
    tokens = [output.sampled["r"]]
    assert output.kv_connector_output is not None
    kv_ticket = output.kv_connector_output.published["r"]

    decode.add("r", Prompt([text_of(1, 5), CATS, [*text_of(2, 4), tokens[0].token_id]]), 23)
    decode.computed["r"] = 23
    blocks = decode.grow("r", 23)
    decode.runner.kv_cache.blocks.fill_(float("nan"))
    decode.step({}, kv_connector_metadata=KVConnectorMetadata(loads=(KVLoad("r", kv_ticket, blocks),)))
    network.deliver()
    output = decode.step({})
    assert output.kv_connector_output is not None and output.kv_connector_output.finished_loads == {("r", 0)}
    tokens += [decode.step({"r": 1}).sampled["r"] for _ in range(6)]

    expected = oracle_logprobs(tiny, prompt, decode.tokens["r"])
    for offset, token in enumerate(tokens):
        assert_close(expected[22 + offset], token)


def test_a_request_whose_needed_load_fails_is_stalled_and_the_others_are_computed(
    tiny: TinyModel, engine_config: Callable[..., EngineConfig]
) -> None:
    network = FakeNetwork()
    encode = HandScheduler(
        make_runner(engine_config("E", is_alone=False), tiny.parts[Parts.TOWER], FakeDataPlane("E-1", network))
    )
    plane = FakeDataPlane("P-1", network)
    prefill = HandScheduler(make_runner(engine_config("P", is_alone=False), tiny.parts[Parts.LANGUAGE_MODEL], plane))
    output = encode.step({}, (CATS,), ec_connector_metadata=ECConnectorMetadata(saves=(CATS.key,), lease_s=9.0))
    assert output.ec_connector_output is not None
    ticket = output.ec_connector_output.published[CATS.key]
    network.kill("E-1")
    prefill.add("waits", Prompt([text_of(1, 3), CATS]))
    prefill.add("text", Prompt([text_of(2, 3)]))
    load = ECLoad(ticket, prefill.pages_for(CATS), is_needed=True)
    output = prefill.step(
        {"waits": 17, "text": 3}, ec_connector_metadata=ECConnectorMetadata(loads=(load,), lease_s=9.0, timeout_s=5.0)
    )
    assert output.stalled_requests == {"waits"} and output.failed_requests == {}
    assert set(output.sampled) == {"text"}
    assert output.ec_connector_output is not None
    assert output.ec_connector_output.failed_loads == {CATS.key: FailureReason.PEER_LOST}


def test_loads_begin_also_in_a_step_that_fails(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler waits for the end of each load that it ordered, so that none may get lost."""
    entered: list[SchedulerOutput] = []

    class Recorder(ECConnector):
        def step(self, scheduler_output: SchedulerOutput) -> AbstractContextManager[ECConnectorOutput | None]:
            entered.append(scheduler_output)
            return super().step(scheduler_output)

    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(runner, "ec_connector", Recorder())
    monkeypatch.setattr(runner, "_update_states", broken)
    output = SchedulerOutput()
    with pytest.raises(RuntimeError, match="no memory"):
        runner.execute_model(output)
    assert entered == [output]
