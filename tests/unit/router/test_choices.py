"""n answers to one prompt. Choice i is what a request with the seed plus i gets alone: by hand, from the arithmetic model."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer

from triptych.demo import CHECKPOINT
from triptych.engine.arithmetic_runner import expected_tokens
from triptych.engine.events import Failed, GenerateEvent, PrefixHit, PromptLogprobs
from triptych.errors import FailureReason, OverloadedError, RequestError
from triptych.output import TokenLogprob
from triptych.router.choices import ChatDelta, ChoiceEnd, jobs_of_choices, run_choices
from triptych.router.detokenizer import Detokenizer
from triptych.router.fake_worker_client import FakeCosts, FakeWorkerClient
from triptych.router.prompt_tokenizer import PromptTokenizer
from triptych.router.running_request import RunningRequest
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import run_virtual

Make = Callable[..., Any]
Serve = Callable[..., Any]
TOKENIZER = PromptTokenizer(CHECKPOINT)
ORACLE = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
LENGTH = 6


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "what colour is the circle?"}]
    return {"model": "demo", "messages": messages, "max_tokens": LENGTH, "ignore_eos": True, "seed": 5} | fields


def parts_of(cluster: Any, job: Any, count: int) -> AsyncGenerator[ChatDelta | ChoiceEnd]:
    clock = asyncio.get_running_loop().time
    jobs = [(each, Stopwatch(clock)) for each in jobs_of_choices(job, count)]
    return run_choices(cluster.pipeline, jobs, partial(Detokenizer, TOKENIZER))


def texts_by_hand(served: Any, worker: str, count: int) -> list[str]:
    prompt = served.workers[worker].record.generates[0].token_ids
    return [ORACLE.decode(expected_tokens(prompt, [], LENGTH, 5 + index)) for index in range(count)]


def says_first(worker: FakeWorkerClient, *calls: Sequence[GenerateEvent]) -> None:
    """The worker's next answers begin with these events, those of one call after those of another; in place of its own of their kinds."""
    generate, left = worker.generate, list(calls)

    async def with_events(request: Any) -> AsyncGenerator[GenerateEvent]:
        async with aclosing(generate(request)) as answer:
            for event in left.pop(0) if left else ():
                yield event
            async for event in answer:
                if not isinstance(event, PrefixHit | PromptLogprobs):
                    yield event

    worker.generate = with_events


# --- the choices themselves


@pytest.mark.parametrize("layout", ["EPD1", "E1PD2", "E1P1D1", "E2P2D2"])
def test_each_choice_is_the_answer_of_its_own_seed_and_their_picture_is_encoded_once(
    layout: str, make_cluster: Make, make_job: Make
) -> None:
    async def run() -> None:
        cluster = make_cluster(layout, costs=FakeCosts(encode_s=1.0))
        job = make_job(pictures=[3], seed=7)
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for part in parts_of(cluster, job, 3):
            if isinstance(part, ChatDelta):
                tokens[part.index] += [token.token_id for token in part.tokens]
        assert tokens == {index: expected_tokens(job.token_ids, job.items, 6, 7 + index) for index in range(3)}
        assert len({tuple(each) for each in tokens.values()}) == 3
        assert sum(len(worker.record.encodes) for worker in cluster.workers.values()) == 1
        cluster.assert_idle()

    run_virtual(run())


def test_the_jobs_differ_in_id_and_seed_and_only_the_first_asks_for_the_prompts_logprobs(make_job: Make) -> None:
    job = make_job(pictures=[3], seed=2**63 - 2, prompt_logprobs=2)
    first, second, third = jobs_of_choices(job, 3)
    assert first is job
    assert [each.sampling.seed for each in (second, third)] == [2**63 - 1, 0]  # a seed is below 2**63
    assert [each.sampling.prompt_logprobs for each in (second, third)] == [None, None]
    assert len({job.request_id, second.request_id, third.request_id}) == 3
    assert second.media is third.media is job.media


def test_the_error_of_one_choice_is_the_only_error_of_all_and_the_others_are_aborted_at_once(
    make_cluster: Make, make_job: Make
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1", costs=FakeCosts(prefill_s=1.0, decode_s=10.0))
        cluster["D0"].faults.generates.append(Failed("", "no such thing", "invalid_request_error", 400))
        with pytest.raises(RequestError, match="no such thing"):
            async for _ in parts_of(cluster, make_job(pictures=[3]), 3):
                pass
        failed_at = asyncio.get_running_loop().time()
        assert failed_at < 10.0, "nobody has decoded a token yet"
        cluster.assert_idle()
        await asyncio.sleep(100)
        assert [worker.num_streams for worker in cluster.workers.values()] == [0, 0, 0]
        assert sorted({*cluster["P0"].record.released, *cluster["P0"].record.aborted}) == ["r-1", "r.1-1", "r.2-1"]
        assert len(cluster["D0"].record.aborted) == 2

    run_virtual(run())


def test_a_choice_that_loses_its_worker_goes_on_and_the_others_do_not_notice(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D2", costs=FakeCosts(decode_s=1.0))
        cluster["D0"].faults.die_after_tokens = 3
        job = make_job(pictures=[3], seed=1)
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for part in parts_of(cluster, job, 3):
            if isinstance(part, ChatDelta):
                tokens[part.index] += [token.token_id for token in part.tokens]
        assert tokens == {index: expected_tokens(job.token_ids, job.items, 6, 1 + index) for index in range(3)}

    run_virtual(run())


def test_n_answers_take_n_places_or_none(make_cluster: Make) -> None:
    async def run() -> None:
        pipeline = make_cluster("PD1", max_in_flight=4).pipeline
        with pytest.raises(RequestError, match=r"n is 5, but at most 4 .*--max-in-flight") as refused:
            async with pipeline.admitted(5):
                pass
        assert refused.value.param == "n"
        async with pipeline.admitted(2):
            with pytest.raises(OverloadedError, match="2 answers are under way, of 4"):
                async with pipeline.admitted(3):
                    pass
            async with pipeline.admitted(2):
                assert pipeline.num_in_flight == 4
        assert pipeline.num_in_flight == 0

    run_virtual(run())


# --- as a client sees them


async def test_n_answers_come_in_one_with_the_prompt_counted_once(serve: Serve) -> None:
    async with serve("P1D1") as served:
        status, answer = await served.post(ask(n=3))
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["message"]["content"] for choice in answer["choices"]] == texts_by_hand(served, "P0", 3)
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        num_prompt_tokens = len(served.workers["P0"].record.generates[0].token_ids)
        assert answer["usage"]["prompt_tokens"] == num_prompt_tokens
        assert answer["usage"]["completion_tokens"] == 3 * LENGTH
        metrics = served.serving.metrics.registry
        assert metrics.get_sample_value("triptych_requests_total", {"outcome": "length", "status": "200"}) == 1
        assert metrics.get_sample_value("triptych_prompt_tokens_total") == num_prompt_tokens
        assert metrics.get_sample_value("triptych_ttft_seconds_count") == 1


async def test_a_stream_has_all_choices_each_from_its_role_to_its_reason_and_the_usage_once(serve: Serve) -> None:
    async with serve("P1D1") as served:
        served.workers["D0"].costs = FakeCosts(decode_s=0.002)
        events = await served.stream(ask(n=3, stream_options={"include_usage": True}))
        assert events[-1] == "[DONE]"
        *chunks, usage = [json.loads(event) for event in events[:-1]]
        texts = ["", "", ""]
        for index in range(3):
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            deltas = [chunk["choices"][0]["delta"] for chunk in own]
            assert [delta["role"] for delta in deltas] == ["assistant", *[None] * (len(own) - 1)]
            assert [chunk["choices"][0]["finish_reason"] for chunk in own] == [*[None] * (len(own) - 1), "length"]
            assert [chunk["timing"] is not None for chunk in own] == [*[False] * (len(own) - 1), True]
            texts[index] = "".join(delta["content"] or "" for delta in deltas)
        assert texts == texts_by_hand(served, "P0", 3)
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order != sorted(order), "they come as they are made, not one after the other"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3 * LENGTH


async def test_a_stop_string_ends_its_own_choice_and_not_the_others(serve: Serve) -> None:
    async with serve("PD1") as served:
        await served.post(ask(n=1))
        prompt = served.workers["PD0"].record.generates[0].token_ids
        texts = [ORACLE.decode(expected_tokens(prompt, [], LENGTH, 5 + index)) for index in range(3)]
        third = ORACLE.decode(expected_tokens(prompt, [], 1, 5 + 1)).strip()
        assert [third in text for text in texts] == [False, True, False]
        status, answer = await served.post(ask(n=3, stop=third))
        assert status == 200
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop", "length"]
        assert [choice["message"]["content"] for choice in answer["choices"]] == [texts[0], texts[1].split(third)[0], texts[2]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_leaves_all_its_choices(stream: bool, serve: Serve) -> None:
    async with serve("P1D1") as served:
        served.workers["D0"].costs = FakeCosts(decode_s=0.02)
        body = ask(n=3, max_tokens=2000, stream=stream)
        post = served.session.post(served.url + "/v1/chat/completions", json=body)
        if stream:
            response = await post
            await response.content.readany()
            await until(lambda: len(served.workers["D0"].record.generates) == 3)
            response.close()
        else:
            waiting = asyncio.ensure_future(post)
            await until(lambda: len(served.workers["D0"].record.generates) == 3)
            waiting.cancel()
        await until(lambda: len(served.workers["D0"].record.aborted) == 3)
        await until(lambda: served.serving.pipeline.num_in_flight == 0)
        assert [worker.num_streams for worker in served.workers.values()] == [0, 0]


async def test_an_error_of_one_choice_in_a_stream_is_one_event_and_then_the_end(serve: Serve) -> None:
    async with serve("P1D1") as served:
        served.workers["D0"].costs = FakeCosts(decode_s=0.02)
        served.workers["D0"].faults.generates.append(Failed("", "no such thing", "internal_error", 500))
        events = await served.stream(ask(n=3, max_tokens=2000))
        errors = [event for event in events[:-1] if "error" in json.loads(event)]
        assert [json.loads(error)["error"]["message"] for error in errors] == [json.loads(events[-2])["error"]["message"]]
        assert events[-1] == "[DONE]"
        await until(lambda: len(served.workers["D0"].record.aborted) == 2)


async def until(holds: Callable[[], bool]) -> None:
    """Poll, since what is waited for happens behind a socket; the test's time limit bounds it."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 (nothing there could set an event)
            await asyncio.sleep(0.005)


async def test_more_answers_than_are_left_are_a_429_and_more_than_there_are_a_400(serve: Serve) -> None:
    async with serve("PD1", max_in_flight=4) as served:
        status, answer = await served.post(ask(n=5))
        assert (status, answer["error"]["param"]) == (400, "n")
        served.workers["PD0"].hang()
        waiting = asyncio.ensure_future(served.post(ask(n=2)))
        await until(lambda: len(served.workers["PD0"].record.generates) == 2)
        status, answer = await served.post(ask(n=3))
        assert (status, answer["error"]["type"]) == (429, "overloaded_error")
        assert len(served.workers["PD0"].record.generates) == 2
        served.workers["PD0"].go_on()
        assert (await waiting)[0] == 200


# --- what a prefill worker says of the prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_those_of_the_last_word_before_the_first_token(stream: bool, serve: Serve) -> None:
    async with serve("P1D1") as served:
        says_first(served.workers["P0"], [PrefixHit("", 32), PrefixHit("", 16)])
        for cached in (16, 0):
            if stream:
                events = await served.stream(ask(n=1, stream_options={"include_usage": True}))
                usage = json.loads(events[-2])["usage"]
            else:
                usage = (await served.post(ask(n=1)))[1]["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_what_one_of_three_answers_computes_is_not_called_cached_for_the_others(serve: Serve) -> None:
    message = {"role": "user", "content": "what colour is the circle? " * 8}
    async with serve("PD1") as served:
        usages = [(await served.post(ask(n=3) | {"messages": [message]}))[1]["usage"] for _ in range(2)]
    assert usages[0]["prompt_tokens_details"] == {"cached_tokens": 0}
    in_full_blocks = (usages[1]["prompt_tokens"] - 1) // 16 * 16
    assert in_full_blocks > 0
    assert usages[1]["prompt_tokens_details"] == {"cached_tokens": in_full_blocks}


def test_what_the_first_worker_that_takes_it_finds_counts_and_what_a_replay_finds_does_not(
    make_cluster: Make, make_job: Make
) -> None:
    async def run() -> None:
        cluster = make_cluster("P1D1")
        broken = Failed("", "the step failed", "internal_error", 500, FailureReason.INTERNAL)
        cluster["P0"].faults.generates.extend([OverloadedError("full"), broken])
        says_first(cluster["P0"], [], [PrefixHit("", 2)], [PrefixHit("", 3)])
        async with cluster.pipeline.run(make_job(), Stopwatch()) as running:
            async for _ in running.tokens():
                pass
        assert len(cluster["P0"].record.generates) == 3
        assert running.num_cached_tokens == 2

    run_virtual(run())


def test_what_a_preempted_request_finds_again_does_not_count(make_job: Make) -> None:
    async def run() -> None:
        running = RunningRequest(make_job(), Stopwatch())
        running.stopwatch.begin(is_prefill=True)
        running.see_prefix_hit(2)
        running.add((TokenLogprob(5, 0.0),))
        running.see_prefix_hit(3)
        assert running.num_cached_tokens == 2

    run_virtual(run())


async def test_prompt_logprobs_stand_beside_the_choices_as_in_vllm(serve: Serve) -> None:
    async with serve("P1D1") as served:
        await served.post(ask())
        prompt = served.workers["P0"].record.generates[0].token_ids
        # the prompt's own token is the second most probable at first, then not among the two best; sent in two pieces, one of them twice
        near = TokenLogprob(prompt[1], -1.5, ((400, -0.5), (prompt[1], -1.5)), rank=2)
        far = [TokenLogprob(token_id, float("-inf"), ((400, -0.5), (401, -1.0)), rank=900) for token_id in prompt[2:]]
        pieces = [PromptLogprobs("", 1, (near, *far[:2])), PromptLogprobs("", 3, tuple(far[1:]))]
        says_first(served.workers["P0"], pieces)
        status, answer = await served.post(ask(n=2, prompt_logprobs=2))
        assert status == 200, answer
        entries = answer["prompt_logprobs"]
        assert len(entries) == len(prompt)
        assert entries[0] is None
        assert entries[1] == {
            str(prompt[1]): {"logprob": -1.5, "rank": 2, "decoded_token": ORACLE.decode([prompt[1]], skip_special_tokens=False)},
            "400": {"logprob": -0.5, "rank": 1, "decoded_token": ORACLE.decode([400])},
        }
        assert list(entries[-1]) == [str(prompt[-1]), "400", "401"]
        assert (entries[-1][str(prompt[-1])]["logprob"], entries[-1][str(prompt[-1])]["rank"]) == (-9999.0, 900)
        asked = [request.sampling_params.prompt_logprobs for request in served.workers["P0"].record.generates]
        assert asked == [None, 2, None]


async def test_prompt_logprobs_that_a_worker_leaves_out_are_an_error_and_not_a_gap(serve: Serve) -> None:
    async with serve("P1D1") as served:
        says_first(served.workers["P0"], [PromptLogprobs("", 1, (TokenLogprob(5, -1.0), TokenLogprob(5, -1.0)))])
        status, answer = await served.post(ask(prompt_logprobs=0))
        assert status == 500
        assert "token 3 of the prompt" in answer["error"]["message"]
