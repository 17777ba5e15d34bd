"""Several answers, penalties, biases and what they report, through real processes with the official client."""

from typing import Any

import aiohttp
import openai
import pytest
from chat_parts import data_url, fresh_picture, png, user
from openai import AsyncOpenAI, OpenAI
from server_state import held_at, still_held
from tokenizers import Tokenizer

from triptych.demo import CHECKPOINT

QUESTION = "describe the picture."
LONG = {"ignore_eos": True}
ORACLE = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def picture(name: str) -> list[Any]:
    return user(QUESTION, data_url(png(fresh_picture(name))))


def alone(client: OpenAI, messages: list[Any], seed: int) -> str | None:
    answer = client.chat.completions.create(
        model="demo", messages=messages, temperature=2, seed=seed, max_tokens=30, extra_body=LONG
    )
    return answer.choices[0].message.content


def test_three_answers_are_those_of_the_seeds_that_follow_streamed_or_not(client: OpenAI):
    messages = picture("three")
    wanted = [alone(client, messages, seed) for seed in (21, 22, 23)]
    assert len(set(wanted)) == 3
    asked: dict[str, Any] = {
        "model": "demo", "messages": messages, "temperature": 2, "seed": 21, "max_tokens": 30, "n": 3, "extra_body": LONG,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == wanted
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 90
    texts = ["", "", ""]
    reasons: list[str | None] = [None, None, None]
    usages: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == wanted
    assert reasons == ["length"] * 3
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [(whole.usage.prompt_tokens, 90)]


async def test_a_client_that_leaves_a_stream_of_three_answers_leaves_nothing(e1p1d1: str):
    async with aiohttp.ClientSession() as session, session.get(f"{e1p1d1}/workers") as response:
        workers = {worker["id"]: worker["url"] for worker in (await response.json())["workers"]}
    assert len(workers) == 3
    at_start = {name: await held_at(url) for name, url in workers.items()}
    async with AsyncOpenAI(base_url=f"{e1p1d1}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="demo", messages=picture("leaves"), n=3, max_tokens=2000, stream=True, extra_body=LONG
        )
        seen: set[int] = set()
        async for chunk in stream:
            seen |= {choice.index for choice in chunk.choices if choice.delta.content}
            if len(seen) == 3:
                break
        await stream.close()
    assert await still_held(workers, at_start) == []


def test_cached_tokens_are_always_told(client: OpenAI):
    for _ in range(2):
        usage = client.chat.completions.create(model="demo", messages=picture("cached"), temperature=0, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens is not None
        assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def chosen(client: OpenAI, **sampling: Any) -> list[str]:
    """The tokens of a greedy answer."""
    answer = client.chat.completions.create(model="demo", messages=user("how are you?"), temperature=0, logprobs=True, **sampling)
    assert answer.choices[0].logprobs is not None
    return [entry.token for entry in answer.choices[0].logprobs.content or ()]


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it(client: OpenAI):
    first, second = (ORACLE.decode([token_id]) for token_id in (500, 501))
    assert chosen(client, logit_bias={"500": 100}, max_tokens=3) == [first] * 3
    assert chosen(client, logit_bias={"500": -100, "501": 100}, max_tokens=3) == [second] * 3


def test_penalties_are_taken_and_a_strong_one_changes_the_second_token(client: OpenAI):
    both = {ORACLE.decode([token_id]) for token_id in (500, 501)}
    biases = {"500": 100, "501": 100}
    assert set(chosen(client, logit_bias=biases, max_tokens=2, extra_body={"repetition_penalty": 2})) == both
    assert len(chosen(client, presence_penalty=2, frequency_penalty=-2, max_tokens=3, extra_body={"min_p": 0.1, **LONG})) == 3


def test_prompt_logprobs_have_an_entry_per_token_of_the_prompt(client: OpenAI):
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": picture("prompt"),
        "max_tokens": 1,
        "extra_body": {"prompt_logprobs": 2},
    }
    answer = client.chat.completions.create(**asked)
    assert answer.usage is not None
    entries: list[dict[str, dict[str, Any]] | None] = (answer.model_extra or {})["prompt_logprobs"]
    assert len(entries) == answer.usage.prompt_tokens
    assert entries[0] is None
    for entry in entries[1:]:
        assert entry is not None
        own, *_ = entry.values()
        best = [each for each in entry.values() if each["rank"] in (1, 2)]
        assert len(best) == 2
        assert own["rank"] >= 1
        assert own["logprob"] <= max(each["logprob"] for each in best) <= 0
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs cannot be streamed"):
        client.chat.completions.create(**asked, stream=True)


def test_more_answers_than_openai_gives_are_a_400(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="at least 1 and at most 128"):
        client.chat.completions.create(model="demo", messages=user("hello"), n=129)
