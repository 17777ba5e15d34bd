"""The router's idea of which beginnings of prompts a worker has kept: what it is taken from, what it is used for, how it heals."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from triptych.config import Role, Stage
from triptych.engine.arithmetic_runner import Fabric
from triptych.errors import FailureReason
from triptych.media.item import MediaItem
from triptych.router.fake_worker_client import CONFIG, FakeCosts, FakeWorkerClient
from triptych.router.media_feed import MediaFeed
from triptych.router.pool import PooledWorker
from triptych.router.prefix_hints import PrefixHints
from triptych.router.releases import Releases
from triptych.router.running_request import GenerateJob, RunningRequest
from triptych.router.shared_encodes import SharedEncodes
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import run_virtual
from triptych.sampling_params import SamplingParams
from triptych.worker.protocol import WorkerInfo

Make = Callable[..., Any]
Expected = Callable[[GenerateJob], list[int]]

BLOCK = 16  # tokens, the default
TEXT = range(100, 140)  # two full blocks and a half


def hashes(text: str) -> list[bytes]:
    return [each.encode() for each in text]


def make_worker(name: str = "P0", *, num_blocks: int = 100) -> PooledWorker:
    client = FakeWorkerClient(name, "P", Fabric())
    info = msgspec.structs.replace(client.info, prefix_cache_tokens=num_blocks * BLOCK)
    return PooledWorker(FakeWorkerClient(name, "P", Fabric(), info=info))


# --- the hints alone


@pytest.mark.parametrize(("asked", "num_blocks"), [("abc", 3), ("abcde", 3), ("ab", 2), ("abX", 2), ("Xbc", 0), ("", 0)])
def test_a_prompt_is_held_up_to_the_first_block_that_is_not(asked: str, num_blocks: int) -> None:
    hints, worker = PrefixHints(), make_worker()
    hints.remember(worker, hashes("abc"))
    assert hints.num_tokens_held(worker, hashes(asked)) == num_blocks * BLOCK
    assert hints.num_tokens_held(make_worker("P1"), hashes(asked)) == 0


def test_no_more_is_remembered_than_the_worker_can_keep_and_a_prompts_last_block_goes_first() -> None:
    hints, worker = PrefixHints(), make_worker(num_blocks=5)
    hints.remember(worker, hashes("abcd"))
    hints.remember(worker, hashes("xyz"))
    assert hints.num_tokens_held(worker, hashes("abcd")) == 2 * BLOCK
    assert hints.num_tokens_held(worker, hashes("xyz")) == 3 * BLOCK
    hints.remember(worker, hashes("ab"))
    hints.remember(worker, hashes("m"))
    assert hints.num_tokens_held(worker, hashes("abcd")) == 2 * BLOCK, "used again, so that another's last block goes"
    assert hints.num_tokens_held(worker, hashes("xyz")) == 2 * BLOCK


def test_of_a_worker_that_keeps_nothing_nothing_is_remembered() -> None:
    hints, worker = PrefixHints(), make_worker(num_blocks=0)
    hints.remember(worker, hashes("abc"))
    assert hints.num_tokens_held(worker, hashes("abc")) == 0


def test_what_is_forgotten_ends_the_prefix_of_all_who_share_it() -> None:
    hints, worker = PrefixHints(), make_worker()
    hints.remember(worker, hashes("abcd"))
    hints.remember(worker, hashes("abxy"))
    hints.forget(worker, hashes("bcd"))
    assert hints.num_tokens_held(worker, hashes("abxy")) == BLOCK
    hints.forget_worker(worker)
    assert hints.num_tokens_held(worker, hashes("a")) == 0
    hints.forget(worker, hashes("a"))


def test_a_lost_worker_is_not_remembered_again() -> None:
    async def run() -> None:
        hints, worker = PrefixHints(), make_worker()
        worker.lose("killed")
        hints.remember(worker, hashes("a"))
        assert hints.num_tokens_held(worker, hashes("a")) == 0

    run_virtual(run())


# --- what a request counts


def running(job: GenerateJob) -> RunningRequest:
    return RunningRequest(job, Stopwatch())


@pytest.mark.parametrize(("num_tokens", "num_held"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_last_token_is_always_left_to_compute(num_tokens: int, num_held: int, make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("P1D1")
        worker, request = cluster.pool.workers[0], running(make_job(range(100, 100 + num_tokens)))
        cluster.placement.remember_prefix(worker, request)
        assert cluster.placement.num_tokens_held(worker, request) == num_held

    run_virtual(run())


def test_a_request_that_wants_log_probabilities_of_its_prompt_computes_all_of_it(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("P1D1")
        worker = cluster.pool.workers[0]
        cluster.placement.remember_prefix(worker, running(make_job(TEXT)))
        assert cluster.placement.num_tokens_held(worker, running(make_job(TEXT))) == 32
        assert cluster.placement.num_tokens_held(worker, running(make_job(TEXT, prompt_logprobs=0))) == 0

    run_virtual(run())


def test_another_picture_or_tenant_at_the_same_place_shares_only_what_stands_before(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        worker = cluster.pool.workers[1]
        job = make_job(TEXT, pictures=[4], num_rows=40)  # 40 tokens of text, rows 40 to 80, one token

        def held(job: GenerateJob) -> int:
            return cluster.placement.num_tokens_held(worker, running(job))

        cluster.placement.remember_prefix(worker, running(job))
        assert held(job) == 80
        assert held(make_job(TEXT, pictures=[5], num_rows=40)) == 32
        assert held(replace(job, cache_salt="another")) == 0

    run_virtual(run())


# --- what a feed makes of it


def key_of(number: int) -> str:
    return f"{number:08x}" + "0" * 56


def job_with(places: Sequence[tuple[int, int]], num_tokens: int = 100, name: str = "r") -> GenerateJob:
    """`places`: (number of the picture, first token), ten rows each."""
    items = tuple(MediaItem(key_of(number), "image", ((start, 10),), 10, (1, 2, 5)) for number, start in places)
    return GenerateJob(name, tuple(range(num_tokens)), SamplingParams(max_tokens=1), items, {each.key: b"file" for each in items})


class Feeds:
    """Of requests at P0, without its engine: the test says what the worker says."""

    def __init__(self, cluster: Any) -> None:
        self.placement = cluster.placement
        self.encoder: FakeWorkerClient = cluster["E0"]
        self.worker: PooledWorker = next(each for each in cluster.pool.workers if each.can(Stage.PREFILL))
        self._cluster = cluster
        self._encodes = SharedEncodes(cluster.pool, cluster.placement, Releases(), cluster.metrics, 20.0)

    @asynccontextmanager
    async def at_worker(self, job: GenerateJob) -> AsyncGenerator[MediaFeed]:
        feed = MediaFeed(running(job), self._encodes, self.placement, self._cluster.metrics)
        async with feed.at(self.worker, f"{job.request_id}-1", is_eager=True):
            await asyncio.sleep(0.1)  # its encodes are on their way
            yield feed
        await feed.close()

    def encoded(self) -> list[int]:
        return [int(request.key[:8], 16) for request in self.encoder.record.encodes]


def held(feed: MediaFeed) -> list[int]:
    return [int(ticket.key[:8], 16) for ticket in feed.tickets]


def test_only_an_item_that_the_prefix_covers_whole_is_not_encoded_unasked(make_cluster: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        feeds = Feeds(cluster)
        known = job_with([(1, 0), (2, 22), (3, 25)], 40)
        feeds.placement.remember_prefix(feeds.worker, running(known))  # 32 tokens
        async with feeds.at_worker(known):
            assert feeds.encoded() == [3], "of which rows 7 to 9 are to be computed"
        assert cluster.count("triptych_encodes_total", kind="saved") == 2
        assert cluster.count("triptych_prefix_hints_total") == 1
        assert cluster.count("triptych_prefix_hint_tokens_total") == 32

    run_virtual(run())


@pytest.mark.parametrize("reason", [FailureReason.MISSING, FailureReason.EVICTED])
def test_a_wrong_hint_costs_one_question_and_does_not_mislead_the_next_request(make_cluster: Make, reason: FailureReason) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        feeds = Feeds(cluster)
        job = job_with([(1, 0), (2, 40)])
        feeds.placement.remember_prefix(feeds.worker, running(job))
        async with feeds.at_worker(job) as feed:
            feed.need(key_of(2), reason)
            await asyncio.sleep(1)
            assert held(feed) == [2]
            assert feeds.placement.num_tokens_held(feeds.worker, running(job)) == 48, "not the block with row 9, token 49"
        async with feeds.at_worker(job_with([(1, 0), (2, 40)], name="next")):
            assert feeds.encoded() == [2, 2]
        assert cluster.count("triptych_encode_retries_total", reason=reason) == 0

    run_virtual(run())


def test_an_encode_that_a_hit_covers_is_called_off_and_one_that_reaches_beyond_it_is_not(make_cluster: Make) -> None:
    async def run() -> None:
        feeds = Feeds(make_cluster("E1P1D1", costs=FakeCosts(encode_s=5.0, preparation_s=1.0)))
        async with feeds.at_worker(job_with([(1, 0), (2, 22), (3, 23)])) as feed:
            feed.covered(32)
            await asyncio.sleep(0.5)
            first, second, third = (request.encode_id for request in feeds.encoder.record.encodes)
            assert feeds.encoder.record.aborted == [first, second]
            await asyncio.sleep(10)
            assert held(feed) == [3]
            assert third not in feeds.encoder.record.released
            feed.covered(48)
            assert held(feed) == []
            await asyncio.sleep(0.1)
            assert third in feeds.encoder.record.released

    run_virtual(run())


def test_a_picture_that_stands_twice_is_needed_as_long_as_one_of_them_is(make_cluster: Make) -> None:
    async def run() -> None:
        feeds = Feeds(make_cluster("E1P1D1", costs=FakeCosts(encode_s=5.0)))
        async with feeds.at_worker(job_with([(1, 0), (1, 50)])) as feed:
            feed.covered(48)
            await asyncio.sleep(10)
            assert held(feed) == [1]
            feed.covered(64)
            assert held(feed) == []

    run_virtual(run())


def test_an_encode_that_one_request_calls_off_goes_on_for_the_other(make_cluster: Make) -> None:
    async def run() -> None:
        feeds = Feeds(make_cluster("E1P1D1", costs=FakeCosts(encode_s=5.0)))
        job = job_with([(1, 0)])
        async with feeds.at_worker(job) as first, feeds.at_worker(replace(job, request_id="other")) as second:
            first.covered(16)
            await asyncio.sleep(10)
            assert (held(first), held(second)) == ([], [1])
            assert (feeds.encoded(), feeds.encoder.record.aborted) == ([1], [])

    run_virtual(run())


@pytest.mark.parametrize("reason", [FailureReason.MISSING, FailureReason.EVICTED])
@pytest.mark.parametrize("wait_s", [0.0, 10.0])  # the encode is under way, or answered
def test_what_was_called_off_is_encoded_when_it_is_asked_for_after_all(
    make_cluster: Make, reason: FailureReason, wait_s: float
) -> None:
    async def run() -> None:
        feeds = Feeds(make_cluster("E1P1D1", costs=FakeCosts(encode_s=5.0)))
        async with feeds.at_worker(job_with([(1, 0)])) as feed:
            await asyncio.sleep(wait_s)
            feed.covered(16)
            feed.covered(0)
            feed.need(key_of(1), reason)
            await asyncio.sleep(10)
            assert held(feed) == [1]
            assert feeds.encoded() == [1, 1]

    run_virtual(run())


def test_a_worker_that_computed_a_prompt_holds_its_beginning_and_the_items_that_it_needed(make_cluster: Make) -> None:
    async def run() -> None:
        feeds = Feeds(make_cluster("E1P1D1"))
        job = job_with([(1, 0), (2, 40)])
        async with feeds.at_worker(job) as feed:
            feed.covered(32)
            assert feeds.placement.num_tokens_held(feeds.worker, running(job)) == 0
            feed.read_by(feeds.worker)
            assert feeds.placement.num_tokens_held(feeds.worker, running(job)) == 96
        assert [feeds.placement.probably_holds(feeds.worker, key_of(number)) for number in (1, 2)] == [False, True]

    run_virtual(run())


# --- requests, with the real engine at the workers


def test_where_prefixes_are_not_kept_a_wrong_hint_costs_one_encode_and_the_answer_is_right(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    """The worker claims to keep them: as if all had been evicted."""

    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        config = replace(CONFIG, cache=replace(CONFIG.cache, enable_prefix_caching=False))
        info = WorkerInfo.of(replace(CONFIG, role=Role.parse("P")), "P0")
        cluster.workers["P0"] = FakeWorkerClient("P0", "P", cluster.fabric, config=config, info=info)
        cluster.pool.join(cluster["P0"])
        for number in range(3):
            job = make_job(TEXT, pictures=[4], num_rows=40, name=f"r{number}")
            assert await cluster.generate(job) == expected(job)
            cluster["P0"].lose(job.items[0].key)
        assert len(cluster["E0"].record.encodes) == 3
        assert cluster.count("triptych_prefix_hints_total") == 2
        cluster.assert_idle()

    run_virtual(run())


def test_a_worker_that_keeps_no_prefixes_says_so_and_gets_no_hints(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        config = replace(CONFIG, cache=replace(CONFIG.cache, enable_prefix_caching=False))
        cluster.workers["P0"] = FakeWorkerClient("P0", "P", cluster.fabric, config=config)
        cluster.pool.join(cluster["P0"])
        for number in range(2):
            await cluster.generate(make_job(TEXT, name=f"r{number}"))
        assert cluster.count("triptych_prefix_hints_total") == 0

    run_virtual(run())


def test_what_a_worker_answered_is_a_part_of_what_it_holds_and_a_restarted_one_holds_nothing(
    make_cluster: Make, make_job: Make
) -> None:
    async def run() -> None:
        cluster = make_cluster("PD1")
        job = make_job(TEXT, max_tokens=25)
        tokens = await cluster.generate(job)
        next_turn = running(replace(job, token_ids=(*job.token_ids, *tokens, 1)))
        (worker,) = cluster.pool.workers
        assert cluster.placement.num_tokens_held(worker, next_turn) == 64  # 40 + 25 tokens, the last one not computed
        cluster["PD0"].die()
        await asyncio.sleep(1)
        cluster.add("PD0")
        (worker,) = cluster.pool.workers
        assert cluster.placement.num_tokens_held(worker, next_turn) == 0

    run_virtual(run())
