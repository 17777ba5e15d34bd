"""The decode worker takes the KV of a prompt while the prompt is computed, on virtual time: when it begins, and what ends it.

A prompt of 40 tokens in chunks of 8 takes five steps of a second each; blocks have 4 tokens.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from triptych.config import CacheConfig, ClusterLayout, SchedulerConfig
from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import Failed
from triptych.errors import FailureReason, OverloadedError, WorkerLostError
from triptych.router.fake_worker_client import CONFIG, FakeCosts, FakeWorkerClient
from triptych.router.metrics import RouterMetrics
from triptych.router.pipeline import Pipeline
from triptych.router.placement import Placement
from triptych.router.pool import WorkerPool
from triptych.router.running_request import GenerateJob
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import run_virtual

Make = Callable[..., Any]
Expected = Callable[[GenerateJob], list[int]]

CHUNKS_S, NUM_PARTS = 5.0, 5
LONG_PROMPT = tuple(range(100, 140))


class Cluster:
    def __init__(self, layout: str, *, num_kv_blocks: int = 256, transfer_s: float = 0.0) -> None:
        self.fabric, self.metrics = Fabric(), RouterMetrics()
        self.pool = WorkerPool(ClusterLayout.parse(layout))
        self.workers: dict[str, FakeWorkerClient] = {}
        cache = CacheConfig(block_size=4, num_kv_blocks=num_kv_blocks)
        config = replace(CONFIG, cache=cache, scheduler=SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4))
        costs = FakeCosts(prefill_s=1.0, decode_s=0.1, transfer_s=transfer_s)
        for role in ClusterLayout.parse(layout).roles:
            name = f"{role}{sum(str(other.config.role) == str(role) for other in self.workers.values())}"
            self.workers[name] = FakeWorkerClient(name, str(role), self.fabric, costs=costs, config=config)
            self.pool.join(self.workers[name])
        self.pipeline = Pipeline(self.pool, Placement(self.pool, self.metrics), self.metrics)

    def __getitem__(self, name: str) -> FakeWorkerClient:
        return self.workers[name]

    async def generate(self, job: GenerateJob, stopwatch: Stopwatch | None = None) -> list[int]:
        async with self.pipeline.run(job, stopwatch or Stopwatch(asyncio.get_running_loop().time)) as running:
            return [token.token_id async for batch in running.tokens() for token in batch]

    def count(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("triptych_early_decodes_total", {"outcome": outcome}) or 0.0

    @property
    def num_replays(self) -> float:
        return sum(
            sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "triptych_replays_total"
        )

    def assert_nothing_is_held(self) -> None:
        for worker in self.workers.values():
            scheduler = worker.core.scheduler
            if not worker.dead.is_set():
                assert worker.num_streams == scheduler.num_running == scheduler.num_waiting == scheduler.num_leases == 0
                assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks
        assert [sum(worker.outstanding.values()) for worker in self.pool.workers] == [0] * len(self.pool.workers)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not [name for name in names if name.startswith(("early decode", "tickets for"))]


@pytest.fixture
def job(make_job: Make) -> GenerateJob:
    return make_job(LONG_PROMPT)


async def ended(cluster: Cluster, job: GenerateJob) -> list[int]:
    """The answer, once releases and aborts have arrived."""
    tokens = await cluster.generate(job)
    await asyncio.sleep(1.0)
    return tokens


def test_the_decode_worker_is_called_with_the_first_chunk_and_has_all_but_the_last_part_at_the_hand_over(
    job: GenerateJob, expected: Expected
) -> None:
    async def run() -> None:
        cluster = Cluster("P1D2")
        task = asyncio.create_task(ended(cluster, job))
        await asyncio.sleep(CHUNKS_S - 0.5)
        (decode,) = [cluster[name] for name in ("D0", "D1") if cluster[name].record.generates]
        assert decode.runner.num_blocks_read == 8, "of 10"
        assert sum(sum(worker.outstanding.values()) for worker in cluster.pool.workers) == 2 * 40, "counted once at each"
        assert await task == expected(job)
        (request,) = decode.record.generates
        assert request.token_ids == job.token_ids
        assert [ticket.num_tokens for ticket in request.kv_transfer_params.tickets] == [8]
        *further, last = decode.record.kv_deliveries
        assert [[ticket.num_tokens for ticket in delivery.tickets] for delivery in further] == [[16], [24], [32]]
        assert [ticket.num_tokens for ticket in last.tickets] == [8, 16, 24, 32, 40]
        assert (last.is_last, last.token_ids) == (True, (expected(job)[0],))
        assert decode.runner.num_blocks_read == 10, "each once"
        assert (cluster.count("kept"), cluster.count("dropped")) == (1, 0)
        assert cluster["P0"].record.released == ["r-1"]
        cluster.assert_nothing_is_held()

    run_virtual(run())


def test_a_prompt_of_one_chunk_is_handed_over_whole(make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = Cluster("P1D1")
        job = make_job(LONG_PROMPT[:8])
        assert await ended(cluster, job) == expected(job)
        (request,) = cluster["D0"].record.generates
        assert not request.kv_transfer_params.has_more
        assert cluster["D0"].record.kv_deliveries == []
        assert cluster.count("kept") == cluster.count("dropped") == 0

    run_virtual(run())


def test_an_answer_of_one_token_begins_no_decode(make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = Cluster("P1D1")
        job = make_job(LONG_PROMPT, max_tokens=1)
        assert await ended(cluster, job) == expected(job)
        assert cluster["D0"].record.generates == []
        cluster.assert_nothing_is_held()

    run_virtual(run())


def test_a_stop_token_in_the_first_place_ends_the_early_decode(make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = Cluster("P1D1")
        job = make_job(LONG_PROMPT)
        first = expected(job)[0]
        assert await ended(cluster, make_job(LONG_PROMPT, stop_token_ids=(first,))) == []
        assert cluster["D0"].record.aborted == ["r-2"]
        cluster.assert_nothing_is_held()

    run_virtual(run())


@pytest.mark.parametrize(
    "fault",
    [
        OverloadedError("full"),
        Failed("", "full", "overloaded", 429),
        WorkerLostError("D0 is lost."),
        Failed("", "stale", "kv_unavailable", 503, FailureReason.STALE),
        Failed("", "no blocks", "kv_unavailable", 503, FailureReason.EVICTED),
        Failed("", "a bug", "internal_error", 500),
    ],
)
def test_an_early_decode_that_fails_before_the_hand_over_is_dropped_without_a_word(
    fault: Failed | Exception, job: GenerateJob, expected: Expected
) -> None:
    async def run() -> None:
        cluster = Cluster("P1D2")
        cluster["D0"].faults.generates.append(fault)
        assert await ended(cluster, job) == expected(job)
        assert len(cluster["P0"].record.generates) == 1
        assert cluster.num_replays == 0
        assert (cluster.count("kept"), cluster.count("dropped")) == (0, 1)
        (request,) = [each for name in ("D0", "D1") for each in cluster[name].record.generates if each.request_id == "r-3"]
        assert [ticket.num_tokens for ticket in request.kv_transfer_params.tickets] == [8, 16, 24, 32, 40]
        cluster.assert_nothing_is_held()

    run_virtual(run())


def test_a_part_that_cannot_be_read_before_the_hand_over_costs_only_the_early_start(job: GenerateJob, expected: Expected) -> None:
    async def run() -> None:
        cluster = Cluster("P1D1")
        task = asyncio.create_task(ended(cluster, job))
        await asyncio.sleep(1.5)
        cluster.fabric.failures["r-2"] = FailureReason.STALE
        assert await task == expected(job)
        assert cluster.num_replays == 0
        assert cluster.count("dropped") == 1
        cluster.assert_nothing_is_held()

    run_virtual(run())


@pytest.mark.parametrize(("at_s", "is_replayed"), [(2.5, False), (CHUNKS_S + 0.25, True)])
def test_the_death_of_the_decode_worker_costs_a_replay_only_after_the_hand_over(
    at_s: float, is_replayed: bool, job: GenerateJob, expected: Expected
) -> None:
    async def run() -> None:
        cluster = Cluster("P1D2")
        task = asyncio.create_task(ended(cluster, job))
        await asyncio.sleep(at_s)
        next(cluster[name] for name in ("D0", "D1") if cluster[name].record.generates).die()
        assert await task == expected(job)
        assert cluster.num_replays == is_replayed
        assert cluster.count("dropped") == (not is_replayed)
        cluster.assert_nothing_is_held()

    run_virtual(run())


@pytest.mark.parametrize("at_s", [2.5, CHUNKS_S + 0.05])
def test_the_death_of_the_prefill_worker_ends_the_early_decode_and_another_prefills(
    at_s: float, job: GenerateJob, expected: Expected
) -> None:
    async def run() -> None:
        cluster = Cluster("P2D1", transfer_s=0.2)
        task = asyncio.create_task(ended(cluster, job))
        await asyncio.sleep(at_s)
        next(cluster[name] for name in ("P0", "P1") if cluster[name].record.generates).die()
        assert await task == expected(job)
        assert cluster.num_replays == 1
        cluster.assert_nothing_is_held()

    run_virtual(run())


@pytest.mark.parametrize("at_s", [0.5, 1.05, 1.5, 3.5, CHUNKS_S + 0.05, CHUNKS_S + 0.25, CHUNKS_S + 0.45])
def test_a_client_that_leaves_at_any_time_is_forgotten_everywhere(at_s: float, job: GenerateJob) -> None:
    async def run() -> None:
        cluster = Cluster("P1D1", transfer_s=0.2)
        task = asyncio.create_task(cluster.generate(job))
        await asyncio.sleep(at_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(1.5)
        cluster.assert_nothing_is_held()

    run_virtual(run())


def test_a_decode_worker_that_stands_still_at_the_start_gets_all_when_it_goes_on(job: GenerateJob, expected: Expected) -> None:
    async def run() -> None:
        cluster = Cluster("P1D1")
        cluster["D0"].hang()
        task = asyncio.create_task(ended(cluster, job))
        await asyncio.sleep(CHUNKS_S + 1.0)
        cluster["D0"].go_on()
        assert await task == expected(job)
        assert cluster.count("kept") == 1
        assert cluster["D0"].runner.num_blocks_read == 10

    run_virtual(run())


def test_a_prompt_that_is_preempted_at_its_prefill_worker_is_handed_over_the_ordinary_way(
    make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = Cluster("E1P1D1", num_kv_blocks=14)
        cluster["E0"].costs = FakeCosts(encode_s=30.0)
        first = make_job(tuple(range(24)), pictures=(1,), name="first")  # 6 blocks before its picture, 7 in all
        second = replace(make_job(tuple(range(100, 136)), name="second"), priority=-1)  # 9 blocks
        answer = asyncio.create_task(cluster.generate(first))
        await asyncio.sleep(10.0)  # it waits for its picture, and decode has the KV of what stands before
        assert [request.request_id for request in cluster["D0"].record.generates] == ["first-2"]
        assert await cluster.generate(second) == expected(second)
        assert await answer == expected(first)
        assert cluster.count("dropped") == 1
        await asyncio.sleep(1.0)
        assert cluster["P0"].core.scheduler.num_preempted > 0
        assert cluster.num_replays == 0
        cluster.assert_nothing_is_held()

    run_virtual(run())


def test_the_time_of_the_transfer_is_what_decode_waited_after_the_hand_over(job: GenerateJob) -> None:
    async def run() -> None:
        cluster = Cluster("P1D1", transfer_s=0.2)
        stopwatch = Stopwatch(asyncio.get_running_loop().time)
        await cluster.generate(job, stopwatch)
        timing = stopwatch.timing()
        assert timing.prefill == pytest.approx(5000.0)
        assert timing.kv_transfer == pytest.approx(200.0)
        assert timing.decode == pytest.approx(500.0)
        assert timing.router == pytest.approx(0.0, abs=0.01)

    run_virtual(run())
