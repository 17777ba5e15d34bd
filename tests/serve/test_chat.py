"""Chat through real processes with the official client: right answers, right numbers, and errors that help."""

import io
import json
import threading
import time
import urllib.request
from typing import Any

import openai
import pytest
from chat_parts import data_url, fresh_picture, png, user
from openai import OpenAI
from oracle import MixedRequest, Oracle
from PIL import Image

QUESTION = "describe the picture."


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def wanted_text(oracle: Oracle, question: str, *pictures: bytes) -> str:
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    answer = oracle.answer(MixedRequest(messages, pictures, max_tokens=24, has_stop=True))
    return oracle.tokenizer.decode(answer.tokens, skip_special_tokens=True)


def test_answers_equal_transformers_for_no_one_and_three_pictures(client: OpenAI, oracle: Oracle):
    pictures = [png(fresh_picture(f"equal {index}", size)) for index, size in enumerate(((112, 112), (168, 224), (150, 201)))]
    for question, chosen in (("how are you?", []), (QUESTION, pictures[:1]), ("in picture two, what shape is red?", pictures)):
        answer = client.chat.completions.create(
            model="demo", messages=user(question, *map(data_url, chosen)), temperature=0, max_tokens=24
        )
        assert answer.choices[0].message.content == wanted_text(oracle, question, *chosen)


def test_a_stream_says_the_same_as_one_answer_with_the_same_usage(client: OpenAI):
    messages = user(QUESTION, data_url(png(fresh_picture("stream"))))
    whole = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_the_parts_of_a_requests_time_are_within_what_the_client_waited(client: OpenAI):
    messages = user(QUESTION, data_url(png(fresh_picture("timing"))))
    started = time.perf_counter()
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    waited_ms = (time.perf_counter() - started) * 1000
    timing: dict[str, float] = (answer.model_extra or {})["timing"]
    before_prefill = ("preprocess", "encode_queue", "encode", "ec_transfer")
    assert list(timing) == [
        *before_prefill, "prefill_queue", "prefill", "kv_transfer", "decode", "router", "encode_retries", "replays",
    ]  # fmt: skip
    assert timing["encode_retries"] == timing["replays"] == 0
    assert min(timing.values()) >= 0
    assert sum(timing[name] for name in before_prefill) > 0, "prefill had to wait for the picture"
    assert min(timing["prefill"], timing["kv_transfer"], timing["decode"]) > 0
    assert sum(timing.values()) < waited_ms


def test_a_seed_gives_the_same_tokens_in_every_layout(e1p1d1: str, epd1: str):
    texts: set[str | None] = set()
    for url in (e1p1d1, epd1):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        messages = user(QUESTION, data_url(png(fresh_picture("seed"))))
        for _ in range(2):
            answer = client.chat.completions.create(
                model="demo", messages=messages, temperature=1.5, seed=11, max_tokens=20, extra_body={"ignore_eos": True}
            )
            texts.add(answer.choices[0].message.content)
    assert len(texts) == 1


def test_limits_and_stops_are_kept(client: OpenAI):
    messages = user(QUESTION, data_url(png(fresh_picture("limits"))))
    whole = client.chat.completions.create(model="demo", messages=messages, temperature=0).choices[0].message.content or ""
    stop = whole.split()[1]
    stopped = client.chat.completions.create(model="demo", messages=messages, temperature=0, stop=[stop])
    assert stopped.choices[0].message.content == whole.split(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_completion_tokens=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 2
    long = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=30, extra_body={"ignore_eos": True}
    )
    assert long.usage is not None
    assert long.usage.completion_tokens == 30


def test_logprobs_are_those_of_the_tokens(client: OpenAI):
    messages = user(QUESTION, data_url(png(fresh_picture("logprobs"))))
    answer = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3


SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["shape", "count"],
    "additionalProperties": False,
}


def test_an_answer_has_the_schema_that_was_asked_for_streamed_or_not_and_a_wrong_one_is_a_400(client: OpenAI):
    messages = user(QUESTION, data_url(png(fresh_picture("schema"))))
    form: Any = {"type": "json_schema", "json_schema": {"name": "shapes", "schema": SCHEMA, "strict": True}}
    whole = client.chat.completions.create(model="demo", messages=messages, seed=5, temperature=1, response_format=form)
    text = whole.choices[0].message.content or ""
    answer = json.loads(text)
    assert list(answer) == ["shape", "count"]
    assert answer["shape"] in ("circle", "square")
    assert 1 <= answer["count"] <= 99
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="demo", messages=messages, seed=5, temperature=1, response_format=form, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text
    chosen = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].message.content in ("yes", "no")
    form["json_schema"]["schema"] = {"type": "objekt"}
    for is_streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="demo", messages=messages, response_format=form, stream=is_streamed)
        assert_is_a_helpful_error(caught.value, "the json_schema cannot be used: Invalid type: objekt.")


def bomb() -> bytes:
    """9,000 x 9,000 pixels of one colour: a few kilobytes as they come, 243 MB as pixels."""
    buffer = io.BytesIO()
    Image.new("1", (9000, 9000)).save(buffer, "PNG")
    return buffer.getvalue()


BROKEN = (
    ("data:image/png;base64,@@@", "base64"),
    ("data:image/png;base64," + "aGVsbG8=", "picture"),
    ("file:///etc/passwd", "data"),
    ("http://example.com/a.png", "--allow-media-domain"),
)


@pytest.mark.parametrize(("url", "word"), BROKEN)
def test_a_broken_picture_is_a_400_that_says_why(client: OpenAI, url: str, word: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=user(QUESTION, url))
    assert_is_a_helpful_error(caught.value, word)


def test_a_picture_cut_off_in_the_middle_is_a_400(client: OpenAI):
    whole = png(fresh_picture("cut"))
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=user(QUESTION, data_url(whole[: len(whole) // 2])))


def test_a_picture_bomb_is_refused_by_its_header(client: OpenAI):
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="demo", messages=user(QUESTION, data_url(bomb())))
    assert caught.value.status_code in (400, 413)
    assert_is_a_helpful_error(caught.value, "pixels")


def test_an_unknown_model_is_a_404(client: OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=user("hello"))
    assert_is_a_helpful_error(caught.value, "demo")


def test_a_context_overflow_is_a_400(client: OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=user("circle " * 6000))
    assert_is_a_helpful_error(caught.value, "4096")
    assert caught.value.code == "context_length_exceeded"


def test_a_picture_on_a_text_only_layout_is_a_400(pd1: str):
    client = OpenAI(base_url=f"{pd1}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=user(QUESTION, data_url(png(fresh_picture("text only")))))
    assert_is_a_helpful_error(caught.value, "encode")
    assert client.chat.completions.create(model="demo", messages=user("hello"), max_tokens=2).choices


def assert_is_a_helpful_error(error: openai.APIStatusError, word: str) -> None:
    body: Any = error.response.json()
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    assert word in body["error"]["message"]
    assert "Traceback" not in json.dumps(body)


def test_streams_do_not_notice_wrong_requests_beside_them(client: OpenAI):
    messages = user(QUESTION, data_url(png(fresh_picture("beside"))))

    def texts() -> str:
        stream = client.chat.completions.create(
            model="demo", messages=messages, temperature=0, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    alone = texts()
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(texts())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for url, _ in BROKEN:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="demo", messages=user(QUESTION, url))
    for thread in threads:
        thread.join(60.0)
    assert answers == [alone] * 3


def get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=10.0) as response:
        return response.status, response.read().decode()


def test_models_health_and_metrics_answer(e1p1d1: str):
    client = OpenAI(base_url=f"{e1p1d1}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["demo"]
    assert get(f"{e1p1d1}/health")[0] == 200
    status, text = get(f"{e1p1d1}/metrics")
    assert status == 200
    assert "triptych_requests_total" in text
