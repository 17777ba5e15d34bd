"""Clients in numbers: questions about pictures over raw HTTP, many at once, each with its outcome and never an exception."""

import asyncio
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
from chat_parts import data_url

from triptych.demo.pictures import draw, random_picture


@dataclass(frozen=True, slots=True)
class ChatCase:
    """One question as a client may ask it any number of times; greedy, so that it has one right answer."""

    name: str
    messages: list[Any]
    max_tokens: int
    ignore_eos: bool = False

    def body(self, *, stream: bool = False) -> dict[str, Any]:
        body = {"model": "demo", "messages": self.messages, "temperature": 0, "max_tokens": self.max_tokens}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` 0: no HTTP answer, or one that broke off; `error` then says why. An error inside a stream keeps its status 200."""

    status: int
    text: str = ""
    num_tokens: int = 0
    error: str = ""  # the type, or what broke
    message: str = ""
    retry_after_s: float | None = None
    timing: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def answer(self) -> tuple[str, int] | None:
        return None if self.error else (self.text, self.num_tokens)


def make_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


async def ask(
    session: aiohttp.ClientSession, url: str, case: ChatCase, *, stream: bool = False, deadline_s: float = 60.0
) -> Outcome:
    """The whole answer, or what came instead of it by the deadline."""
    try:
        async with (
            asyncio.timeout(deadline_s),
            session.post(f"{url}/v1/chat/completions", json=case.body(stream=stream)) as response,
        ):
            text = await response.text()
    except TimeoutError:
        return Outcome(0, error="deadline", message=f"no end within {deadline_s:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Outcome(0, error=type(error).__name__, message=str(error))
    if response.status != 200:
        wait = response.headers.get("retry-after")
        return _failed(response.status, json.loads(text), float(wait) if wait is not None else None)
    return _streamed(text) if stream else _whole(json.loads(text))


def _whole(body: dict[str, Any]) -> Outcome:
    return Outcome(200, body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"], timing=body["timing"])


def _streamed(text: str) -> Outcome:
    *chunks, done = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    bodies: list[dict[str, Any]] = [json.loads(chunk) for chunk in chunks]
    failures = [body for body in bodies if "error" in body]
    if failures:
        return _failed(200, failures[0], None)
    choices = [choice for body in bodies for choice in body["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if done != "[DONE]" or len(ends) != 1:
        return Outcome(200, error="stream", message=f"a stream ended with {done!r} after the finish reasons {ends}")
    pieces = "".join(choice["delta"].get("content") or "" for choice in choices)
    timing = next((body["timing"] for body in bodies if body.get("timing")), {})
    return Outcome(200, pieces, bodies[-1]["usage"]["completion_tokens"], timing=timing)


def _failed(status: int, body: dict[str, Any], retry_after_s: float | None) -> Outcome:
    error = body["error"]
    assert set(error) >= {"message", "type", "param", "code"}, f"not the OpenAI error shape: {body}"
    return Outcome(status, error=error["type"], message=error["message"], retry_after_s=retry_after_s)


def picture_url(name: str, size: tuple[int, int]) -> str:
    """A picture that only this name gives, as a data URL. One smaller than 112 pixels is a larger one scaled down."""
    drawn = draw(random_picture(Random(f"load {name}"), (max(112, size[0]), max(112, size[1]))))
    buffer = io.BytesIO()
    drawn.resize(size).save(buffer, "PNG")
    return data_url(buffer.getvalue())


async def answers_of(url: str, cases: list[ChatCase], *, at_once: int = 4) -> dict[str, tuple[str, int]]:
    """The answers (text, tokens) of a server that nobody disturbs, by the cases' names."""
    gate = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession, case: ChatCase) -> tuple[str, tuple[str, int]]:
        async with gate:
            outcome = await ask(session, url, case)
        assert outcome.answer is not None, f"{case.name}: {outcome}"
        return case.name, outcome.answer

    async with make_session() as session:
        return dict(await asyncio.gather(*(one(session, case) for case in cases)))
