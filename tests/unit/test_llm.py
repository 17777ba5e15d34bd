"""`LLM` on the demo checkpoint. That the answers are right is tests/engine's business; here: what goes in and what comes out."""

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from triptych import LLM
from triptych.demo.pictures import draw, random_picture
from triptych.errors import ConfigError, ContextOverflowError, RequestError
from triptych.worker.worker import Worker


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_threads=1, kv_cache_mib=32, device="cpu") as llm:
        yield llm


def picture() -> Image.Image:
    return draw(random_picture(Random(7), (112, 112)))


def test_a_conversation_gives_an_answer_with_usage_and_timing(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "what is it?"}]}]
    output = llm.chat(messages, max_tokens=5, temperature=0, ignore_eos=True, logprobs=1)
    assert output.finish_reason == "length"
    assert output.usage.num_completion_tokens == len(output.token_ids) == len(output.logprobs) == 5
    assert output.usage.num_rows == {"image": 16}
    assert all(token.top[0][1] >= token.logprob for token in output.logprobs)
    assert min(output.timing.values()) >= 0
    assert output.timing["encode"] > 0


def test_a_list_of_conversations_gives_each_the_answer_it_has_alone(llm: LLM) -> None:
    prompts = ["hello", "what colour is the circle?", "count the shapes."]
    together = llm.chat(prompts, max_tokens=4, temperature=0, ignore_eos=True)
    assert [output.token_ids for output in together] == [
        llm.chat(prompt, max_tokens=4, temperature=0, ignore_eos=True).token_ids for prompt in prompts
    ]


def test_n_answers_are_those_of_the_seeds_that_follow_and_the_first_is_the_answer(llm: LLM) -> None:
    sampling: dict[str, Any] = {"max_tokens": 30, "temperature": 2, "ignore_eos": True}
    alone = [llm.chat("describe the picture.", seed=seed, **sampling) for seed in (5, 6, 7)]
    assert len({each.token_ids for each in alone}) == 3
    output = llm.chat("describe the picture.", seed=5, n=3, logprobs=0, **sampling)
    assert [choice.token_ids for choice in output.choices] == [each.token_ids for each in alone]
    assert [choice.text for choice in output.choices] == [each.text for each in alone]
    assert (output.text, output.token_ids, output.finish_reason) == (alone[0].text, alone[0].token_ids, "length")
    assert [len(choice.logprobs) for choice in output.choices] == [30, 30, 30]
    assert output.logprobs == output.choices[0].logprobs
    assert output.usage.num_completion_tokens == 90
    assert output.usage.num_prompt_tokens == alone[0].usage.num_prompt_tokens


def test_more_answers_than_there_are_places_wait_for_each_other(llm: LLM) -> None:
    outputs = llm.chat(["hello"] * 5, n=60, max_tokens=1, temperature=0)  # 300 answers; 128 at once
    assert {len(output.choices) for output in outputs} == {60}
    assert len({choice.token_ids for output in outputs for choice in output.choices}) == 1


def test_conversations_of_one_salt_share_a_pictures_embeddings_and_those_of_two_do_not(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": draw(random_picture(Random(8), (112, 112)))}]}]
    (worker,) = llm._serving.pool.workers  # pyright: ignore[reportPrivateUsage]
    num_encoded: list[Any] = []
    answers: set[tuple[int, ...]] = set()
    for salt in ("a", "a", "b", "b", "a", None, None):
        answers.add(llm.chat(messages, max_tokens=3, temperature=0, ignore_eos=True, cache_salt=salt).token_ids)
        assert isinstance(worker.client, Worker)
        num_encoded.append(worker.client.counters()["items_encoded"])
    assert [count - num_encoded[0] for count in num_encoded] == [0, 0, 1, 1, 1, 2, 2]
    assert len(answers) == 1
    with pytest.raises(RequestError, match=r"cache_salt is 5 .*; it must be a string"):
        llm.chat("hello", cache_salt=5)


def test_modes_that_png_does_not_know_are_taken_as_rgb(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": picture().convert("CMYK")}]}]
    assert llm.chat(messages, max_tokens=1).usage.num_rows == {"image": 16}


def test_a_16_bit_grey_picture_is_seen_as_its_8_bit_version(llm: LLM) -> None:
    grey = np.asarray(picture().convert("L"))

    def answer(pixels: Any) -> Any:
        messages = [{"role": "user", "content": [{"type": "image", "image": Image.fromarray(pixels)}]}]
        return llm.chat(messages, max_tokens=4, temperature=0, ignore_eos=True, logprobs=1).logprobs

    assert answer(grey.astype(np.uint16) * 257) == answer(grey)


def test_an_answer_has_the_form_that_is_asked_for_by_either_name(llm: LLM) -> None:
    assert llm.chat("hello", structured_outputs={"choice": ["yes", "no"]}, temperature=1).text in ("yes", "no")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}, [2]]}}}
    assert json.loads(llm.chat("hello", response_format=form, temperature=1).text) in ({"a": 1}, [2])
    with pytest.raises(RequestError, match="the regex cannot be used: unclosed group"):
        llm.chat("hello", structured_outputs={"regex": "a("})
    with pytest.raises(RequestError, match="did you mean 'structured_outputs'"):
        llm.chat("hello", structured_output={"regex": "a"})


def test_it_can_be_called_within_a_running_loop(llm: LLM) -> None:
    async def run() -> int:
        return llm.chat("hello", max_tokens=1, ignore_eos=True).usage.num_completion_tokens

    assert asyncio.run(run()) == 1


def test_mistakes_are_typed_and_say_what_is_right(llm: LLM) -> None:
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        llm.chat("hello", max_token=1)
    with pytest.raises(RequestError, match="'system', 'user' or 'assistant'"):
        llm.chat([{"role": "tool", "content": "x"}])
    with pytest.raises(RequestError, match="PIL image"):
        llm.chat([{"role": "user", "content": [{"type": "picture"}]}])
    with pytest.raises(ContextOverflowError):
        llm.chat("hello " * 5000)
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM("demo", max_num_seq=3)


def test_close_ends_its_threads_and_may_be_called_twice() -> None:
    before = set(threading.enumerate())
    llm = LLM("demo", num_threads=1, kv_cache_mib=16, device="cpu")
    llm.close()
    llm.close()
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


@pytest.mark.parametrize(
    ("messages", "sampling", "sentence"),
    [
        (5, {}, "messages is 5 .* a list of messages"),
        (b"hello", {}, "messages is b'hello'"),
        ({"role": "user", "content": "hello"}, {}, "messages is {"),
        ([], {}, "at least one message"),
        (["hello", []], {}, "at least one message"),
        (["hello", 5], {}, "a conversation is 5"),
        ([["hello"]], {}, "a message is 'hello'"),
        ("hello", {"max_tokens": "x"}, "max_tokens is 'x' .* an integer"),
        ("hello", {"max_tokens": True}, "max_tokens is True .* an integer"),
        ("hello", {"min_tokens": None}, "min_tokens is None .* an integer"),
        ("hello", {"seed": "a"}, "seed is 'a' .* an integer"),
        ("hello", {"temperature": "hot"}, "temperature is 'hot' .* a number"),
        ("hello", {"temperature": 10**400}, "temperature is 1000.* at most 2"),
        ("hello", {"stop": 5}, "stop is 5 .* a list of strings"),
        ("hello", {"stop": 0}, "stop is 0 .* a list of strings"),
        ("hello", {"stop": [""]}, "stop is .* none of them empty"),
        ("hello", {"stop_token_ids": "12"}, "stop_token_ids is '12' .* a list of integers"),
        ("hello", {"n": None}, "n is None .* an integer"),
        ("hello", {"n": 0}, "n is 0; it must be at least 1 and at most 128"),
        ("hello", {"min_p": "a"}, "min_p is 'a' .* a number"),
        ("hello", {"repetition_penalty": 0.0}, "repetition_penalty is 0; .* greater than 0"),
        ("hello", {"logit_bias": {"5": 1}}, "logit_bias is .* a dict from token ids to numbers"),
        ("hello", {"logit_bias": {5: "a"}}, "logit_bias is .* a dict from token ids to numbers"),
        ("hello", {"logit_bias": {5: 10**400}}, r"logit_bias\[5\] is 1000.* at most 100"),
        ("hello", {"logit_bias": {10**6: 1}}, "logit_bias has token id 1000000; the model's are 0 to 1023"),
        ("hello", {"prompt_logprobs": 1.5}, "prompt_logprobs is 1.5 .* an integer"),
        ("hello", {"ignore_eos": 1}, "ignore_eos is 1 .* True or False"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_in_a_sentence(
    llm: LLM, messages: Any, sampling: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.chat(messages, **sampling)


def test_numpys_integers_are_integers(llm: LLM) -> None:
    assert llm.chat("hello", max_tokens=np.int64(2), seed=np.uint8(3), ignore_eos=True).usage.num_completion_tokens == 2


@pytest.mark.filterwarnings("error")
def test_a_closed_one_says_so() -> None:
    llm = LLM("demo", num_threads=1, kv_cache_mib=16, device="cpu")
    llm.close()
    for messages in ("hello", ["hello", "you"]):
        with pytest.raises(RequestError, match="this LLM is closed"):
            llm.chat(messages)
    gc.collect()
