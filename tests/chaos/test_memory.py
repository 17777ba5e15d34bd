"""Memory is flat: many requests with more pictures than fit, through small caches, and no process grows.

An encode worker's heap would grow by fragmentation alone (2.3 % from request 2,000 to 19,000, with nothing more in use by `mallinfo2`), if
it did not give its holes back now and then (media/processor.py).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median

import aiohttp
import pytest
from chat_load import ChatCase, ask, make_session, picture_url
from chat_parts import user
from server_state import held_at, processes_of, still_held, total, worker_urls

from triptych.launch.background import BackgroundServer

NUM_REQUESTS, NUM_PICTURES, NUM_CLIENTS = 20_000, 500, 16
SAMPLE_EVERY = 1_000
MAX_GROWTH = 0.02  # from the end of the first tenth on
SIZES = (56, 84, 112)  # pixels: 4 to 16 rows
CACHES = ("--encoder-cache-rows", "256", "--num-kv-blocks", "64")
QUESTIONS = ("what colour is it?", "describe the picture.", "how many shapes are there?")


def memory_case(number: int) -> ChatCase:
    rng = Random(f"memory {number}")
    url = picture_url(f"memory {number}", (rng.choice(SIZES), rng.choice(SIZES)))
    return ChatCase(f"picture {number}", user(rng.choice(QUESTIONS), url), max_tokens=rng.randint(1, 2))


class Soak:
    """Asks one of `cases` after another, and looks at the processes' memory in between."""

    def __init__(self, url: str, cases: list[ChatCase], server: BackgroundServer) -> None:
        self._url = url
        self._cases = cases
        self._processes = {name: process for name, process in processes_of(server).items() if name != "fork-server"}
        self._num_done = 0
        self.answers: dict[str, set[tuple[str, int]]] = {case.name: set() for case in cases}
        self.samples: dict[int, dict[str, float]] = {}  # requests done -> process -> MiB of RSS

    async def run(self) -> None:
        order = iter(Random("soak").choices(self._cases, k=NUM_REQUESTS))
        async with make_session() as session:
            await asyncio.gather(*(self._client(session, order) for _ in range(NUM_CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, order: Iterator[ChatCase]) -> None:
        for case in order:
            outcome = await ask(session, self._url, case)
            assert outcome.answer is not None, outcome
            self.answers[case.name].add(outcome.answer)
            self._num_done += 1
            if self._num_done % SAMPLE_EVERY == 0:
                self.samples[self._num_done] = {name: each.memory_info().rss / 2**20 for name, each in self._processes.items()}
                print(
                    f"{self._num_done:6}",
                    *(f"{name} {mib:.1f} MiB" for name, mib in self.samples[self._num_done].items()),
                    sep="  ",
                )

    def growth(self) -> dict[str, float]:
        """By process, from the end of the first tenth to the last quarter: its median, as a sample has what happens to be in flight, too."""
        baseline = self.samples[NUM_REQUESTS // 10]
        late = [sample for num_done, sample in self.samples.items() if num_done > NUM_REQUESTS * 3 // 4]
        return {name: median(sample[name] for sample in late) / mib - 1 for name, mib in baseline.items()}


@pytest.mark.timeout(3600)
async def test_20000_requests_with_500_pictures_through_small_caches_leave_memory_flat(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    flags = ("--layout", "E1P1D1", "--port", "0", "--num-threads", "1", *CACHES)
    with log.open("w") as stderr, BackgroundServer("demo", *flags, stderr=stderr) as server:
        soak = Soak(server.wait_until_ready(), [memory_case(number) for number in range(NUM_PICTURES)], server)
        urls = worker_urls(log)
        at_start = {name: await held_at(url) for name, url in urls.items()}
        await soak.run()
        assert {name: growth for name, growth in soak.growth().items() if growth >= MAX_GROWTH} == {}
        assert {name: answers for name, answers in soak.answers.items() if len(answers) > 1} == {}
        assert await total(urls["encode-0"], "encoder_cache_evictions") > NUM_REQUESTS / 2, "the caches were not small"
        assert await still_held(urls, at_start) == []
