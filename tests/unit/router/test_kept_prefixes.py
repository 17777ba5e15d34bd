"""Prompts that begin alike, from the router to the blocks of the real engine. What the router only guesses is in test_prefix_hints.py."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triptych.config import Stage
from triptych.router.fake_worker_client import FakeCosts
from triptych.router.running_request import GenerateJob
from triptych.router.virtual_time import run_virtual

Make = Callable[..., Any]
Expected = Callable[[GenerateJob], list[int]]

TEXT = range(100, 140)


def lose_items(cluster: Any, job: GenerateJob) -> None:
    """From every encoder cache, and the router knows."""
    for worker in cluster.pool.workers:
        for item in job.items:
            cluster[worker.id].lose(item.key)
            cluster.placement.forget(worker, item.key)


def test_a_picture_that_nobody_has_any_more_is_not_encoded_for_a_prompt_whose_blocks_are_kept(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        job = make_job(TEXT, pictures=[4], num_rows=40)
        assert await cluster.generate(job) == expected(job)
        lose_items(cluster, job)
        assert await cluster.generate(replace(job, request_id="again")) == expected(job)
        assert len(cluster["E0"].record.encodes) == 1
        assert cluster.count("triptych_encodes_total", kind="saved") == 1
        cluster.assert_idle()

    run_virtual(run())


def test_another_picture_or_another_tenant_has_its_own_encode(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        job = make_job(TEXT, pictures=[4], num_rows=40)
        others = [
            make_job(TEXT, pictures=[5], num_rows=40, name="picture"),
            replace(job, request_id="tenant", cache_salt="other"),
        ]
        for number, each in enumerate([job, *others], 1):
            assert await cluster.generate(each) == expected(each)
            assert len(cluster["E0"].record.encodes) == number
            lose_items(cluster, each)

    run_virtual(run())


def test_an_item_that_a_prefix_covers_in_part_is_encoded(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        job = make_job(TEXT, pictures=[4, 5], num_rows=20)  # rows 40 to 59 and 61 to 80; 82 tokens, of which 80 are kept
        assert await cluster.generate(job) == expected(job)
        lose_items(cluster, job)
        assert await cluster.generate(replace(job, request_id="again")) == expected(job)
        assert [request.key for request in cluster["E0"].record.encodes] == [*(item.key for item in job.items), job.items[1].key]

    run_virtual(run())


def test_the_worker_that_has_computed_a_prompt_gets_its_like_load_permitting(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("P2D1")
        jobs = [make_job(TEXT, name=f"r{number}") for number in range(5)]
        for job in jobs[:4]:
            assert await cluster.generate(job) == expected(job)
        assert [len(cluster[name].record.generates) for name in ("P0", "P1")] == [4, 0]
        cluster.placement.begin(cluster.pool.workers[0], Stage.PREFILL, 1000)
        assert await cluster.generate(jobs[4]) == expected(jobs[4])
        assert [len(cluster[name].record.generates) for name in ("P0", "P1")] == [4, 1]

    run_virtual(run())


def test_a_worker_that_has_kept_more_than_the_router_knows_stops_the_encode(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1", costs=FakeCosts(preparation_s=50.0))
        job = make_job(TEXT, pictures=[4, 5], num_rows=20)  # the second is covered in part, and waited for
        assert await cluster.generate(job) == expected(job)
        lose_items(cluster, job)
        for worker in cluster.pool.workers:
            cluster.placement.forget_worker(worker)
        task = asyncio.create_task(cluster.generate(replace(job, request_id="again")))
        await asyncio.sleep(1)
        encodes = cluster["E0"].record.encodes
        assert [request.key for request in encodes] == [item.key for item in job.items] * 2
        assert cluster["E0"].record.aborted == [encodes[2].encode_id]
        assert await task == expected(job)
        cluster.assert_idle()

    run_virtual(run())
