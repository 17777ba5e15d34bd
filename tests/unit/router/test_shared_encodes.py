"""Encodes that several wait for: who shares what, and what becomes of one that takes too long. On virtual time."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from triptych.engine.events import Failed
from triptych.errors import DeadlineError, FailureReason, UnavailableError
from triptych.router.fake_worker_client import FakeCosts
from triptych.router.running_request import GenerateJob
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import run_virtual

Make = Callable[..., Any]
Expected = Callable[[GenerateJob], list[int]]


def num_encodes(cluster: Any, *names: str) -> list[int]:
    return [len(cluster[name].record.encodes) for name in names]


def unreleased(worker: Any) -> set[str]:
    """Tickets that somebody may still hold."""
    asked = {request.encode_id for request in worker.record.encodes if not request.will_stay}
    return asked - {*worker.record.released, *worker.record.aborted}


def test_a_picture_which_is_encoded_at_one_workers_own_place_is_not_encoded_anywhere_else(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("EP2D1", costs=FakeCosts(encode_s=1.0, prefill_s=0.5))
        jobs = [make_job(pictures=[4], name=f"r{number}", seed=number) for number in range(4)]
        tasks = [asyncio.create_task(cluster.generate(job)) for job in jobs]
        await asyncio.sleep(0.5)
        prefilled_at = [len(cluster[name].record.generates) for name in ("EP0", "EP1")]
        assert prefilled_at == [2, 2]
        assert sorted(num_encodes(cluster, "EP0", "EP1")) == [0, 2], "once to stay, once for a ticket: the engine runs one"
        assert await asyncio.gather(*tasks) == [expected(job) for job in jobs]
        cluster.assert_idle()

    run_virtual(run())


def test_a_hung_encode_goes_to_another_worker_after_its_time_once_for_all_who_wait(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P2D1", encode_timeout_s=20.0)
        cluster["E0"].hang()
        jobs = [make_job(pictures=[4], name=f"r{number}", seed=number) for number in range(5)]
        stopwatches = [Stopwatch() for _ in jobs]

        answers = await asyncio.gather(*map(cluster.generate, jobs, stopwatches))
        assert answers == [expected(job) for job in jobs]
        assert asyncio.get_running_loop().time() == pytest.approx(20.0, abs=0.1)
        assert num_encodes(cluster, "E0", "E1") == [1, 1]
        assert cluster.count("triptych_encode_retries_total", reason="timeout") == 1
        assert [stopwatch.timing().encode_retries for stopwatch in stopwatches] == [1] * 5
        cluster["E0"].running.set()
        await asyncio.sleep(1)
        assert unreleased(cluster["E0"]) == set(), "a late answer is let go"
        cluster.assert_idle()

    run_virtual(run())


def test_after_a_hung_encode_the_worker_comes_last(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P1D1")
        cluster["E0"].hang()
        for number in range(6):
            job = make_job(pictures=[number], name=f"r{number}")
            assert await cluster.generate(job) == expected(job)
        assert num_encodes(cluster, "E0", "E1") == [1, 6]
        assert asyncio.get_running_loop().time() < 21

    run_virtual(run())


def test_a_hung_encode_at_the_only_worker_is_waited_for_as_long_as_the_request_lives(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1", request_timeout_s=50.0)
        cluster["E0"].hang()
        jobs = [make_job(pictures=[4], name="patient"), make_job(pictures=[5], name="unlucky")]
        patient = asyncio.create_task(cluster.generate(jobs[0]))
        await asyncio.sleep(40)
        cluster["E0"].running.set()
        assert await patient == expected(jobs[0])
        assert num_encodes(cluster, "E0") == [1]
        cluster["E0"].hang()
        with pytest.raises(DeadlineError, match=r"item 00000005.* from E0"):
            await cluster.generate(jobs[1])
        cluster["E0"].running.set()
        await asyncio.sleep(1)
        assert unreleased(cluster["E0"]) == set()
        cluster.assert_idle()

    run_virtual(run())


def test_an_overdue_encode_moves_as_soon_as_another_worker_joins(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1", encode_timeout_s=5.0)
        cluster["E0"].hang()
        job = make_job(pictures=[4])
        task = asyncio.create_task(cluster.generate(job))
        await asyncio.sleep(30)
        cluster.add("E1")
        assert await task == expected(job)
        assert asyncio.get_running_loop().time() == pytest.approx(30.0, abs=0.1)

    run_virtual(run())


def test_a_prefill_worker_that_waited_too_long_is_not_replaced_while_the_encode_is_what_it_waits_for(
    make_cluster: Make, make_job: Make
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P2D1")
        cluster["E0"].hang()
        prefill = cluster["P0"]
        generate = prefill.generate

        async def times_out(request: Any) -> Any:
            prefill.record.generates.append(request)
            await asyncio.sleep(60)
            yield Failed(request.request_id, "item did not arrive within 60 s.", "ec_unavailable", 503, FailureReason.TIMEOUT)

        prefill.generate = times_out
        with pytest.raises(UnavailableError, match=r"within 60 s; still to come: item 00000004.* from E0") as caught:
            await cluster.generate(make_job(pictures=[4]))
        assert (caught.value.type, caught.value.stage, caught.value.reason) == ("ec_unavailable", "encode", "timeout")
        assert (len(prefill.record.generates), len(cluster["P1"].record.generates)) == (1, 0)
        prefill.generate = generate
        cluster.assert_idle()

    run_virtual(run())


def test_a_hung_encode_that_everybody_leaves_is_aborted(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1", encode_timeout_s=5.0)
        cluster["E0"].hang()
        tasks = [asyncio.create_task(cluster.generate(make_job(pictures=[4], name=f"r{number}"))) for number in range(2)]
        await asyncio.sleep(10)
        tasks[0].cancel()
        await asyncio.sleep(0.1)
        assert cluster["E0"].record.aborted == []
        tasks[1].cancel()
        await asyncio.sleep(0.1)
        assert len(cluster["E0"].record.aborted) == 1
        cluster.assert_idle()

    run_virtual(run())


def test_pictures_of_one_request_go_where_the_least_rows_are_to_be_encoded(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P1D1", costs=FakeCosts(encode_s=5.0))
        large = asyncio.create_task(cluster.generate(make_job(pictures=[1], num_rows=100, name="large")))
        await asyncio.sleep(1)
        small = asyncio.create_task(cluster.generate(make_job(pictures=[2, 3, 4, 5], num_rows=30, name="small")))
        await asyncio.sleep(1)
        # 100 rows at E0: the first three of 30 go to E1, and then E0 (100) has less to do than E1 (90 + 30) would have
        assert [request.num_rows for request in cluster["E0"].record.encodes] == [100]
        assert [request.num_rows for request in cluster["E1"].record.encodes] == [30, 30, 30, 30]
        await asyncio.gather(large, small)

    run_virtual(run())
