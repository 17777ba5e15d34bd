"""More pictures at once than the server takes: each is answered or told when to come again, and whoever does is answered in the end."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from chat_load import ChatCase, Outcome, answers_of, ask, make_session, picture_url
from chat_parts import user
from server_state import held_at, read_metrics, still_held, total, worker_urls

from triptych.launch.background import BackgroundServer

NUM_REQUESTS, MAX_IN_FLIGHT = 200, 64
FLAGS = ("--layout", "E1P1D1", "--port", "0", "--max-in-flight", str(MAX_IN_FLIGHT))
SMALL_CACHES = ("--encoder-cache-rows", "128", "--num-kv-blocks", "64", "--num-threads", "1")
PATIENCE_S = 120.0
CASES = [
    ChatCase(f"picture {number}", user("describe the picture.", picture_url(f"overload {number}", (112, 112))), max_tokens=12)
    for number in range(NUM_REQUESTS)
]
TEXT = ChatCase("text", user("how are you?"), max_tokens=12)

Answers = dict[str, tuple[str, int]]


@dataclass(frozen=True)
class SmallServer:
    url: str
    workers: dict[str, str]  # name -> URL


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallServer]:
    log = tmp_path / "serve.log"
    with log.open("w") as stderr, BackgroundServer("demo", *FLAGS, *SMALL_CACHES, stderr=stderr) as server:
        yield SmallServer(server.wait_until_ready(), worker_urls(log))


async def ask_until_answered(session: aiohttp.ClientSession, url: str, case: ChatCase) -> list[Outcome]:
    """As a client that comes again when it was told to. All that it heard; the last is no 429."""
    heard: list[Outcome] = []
    async with asyncio.timeout(PATIENCE_S):
        while True:
            heard.append(await ask(session, url, case))
            if heard[-1].status != 429:
                return heard
            assert heard[-1].error == "overloaded_error"
            assert heard[-1].retry_after_s is not None and heard[-1].retry_after_s >= 1.0
            await asyncio.sleep(heard[-1].retry_after_s)


async def test_200_pictures_at_once_are_right_answers_or_429_and_those_are_right_when_they_come_again(
    small: SmallServer, epd1: str
) -> None:
    wanted = await answers_of(epd1, [*CASES, TEXT])
    at_start = {name: await held_at(url) for name, url in small.workers.items()}
    async with make_session() as session:
        asking = [asyncio.create_task(ask_until_answered(session, small.url, case)) for case in CASES]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        text = await ask_until_answered(session, small.url, TEXT)
        assert text[-1].answer == wanted[TEXT.name]
        heard = await asyncio.gather(*asking)
    assert {case.name: outcomes[-1].answer for case, outcomes in zip(CASES, heard, strict=True)} == {
        case.name: wanted[case.name] for case in CASES
    }
    refused = [outcome for outcomes in heard for outcome in outcomes if outcome.status == 429]
    assert refused, "the server was never full"
    assert await total(small.workers["encode-0"], "encoder_cache_evictions") > 0, "the cache was never full"
    assert await still_held(small.workers, at_start) == []
    assert (await read_metrics(small.url))["requests_in_flight"] == 0
