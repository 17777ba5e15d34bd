"""Who gets the next piece of work."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from triptych.config import Stage
from triptych.errors import OverloadedError, UnavailableError
from triptych.media.item import MediaItem
from triptych.router.fake_worker_client import FakeCosts
from triptych.router.placement import Backoff
from triptych.router.running_request import GenerateJob, RunningRequest
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import run_virtual
from triptych.sampling_params import SamplingParams

Make = Callable[..., Any]


def asking(num_tokens: int, items: tuple[MediaItem, ...] = ()) -> RunningRequest:
    """A request whose prompt has this many tokens."""
    return RunningRequest(GenerateJob("r", tuple(range(num_tokens)), SamplingParams(max_tokens=1), items), Stopwatch())


def test_equal_work_spreads_evenly_over_time_and_does_not_start_over_with_each_request(make_cluster: Make) -> None:
    async def run() -> None:
        placement = make_cluster("P3D1").placement
        chosen: list[str] = []
        for _ in range(30):
            worker = placement.pick_prefill(asking(10))
            placement.begin(worker, Stage.PREFILL, 10)
            placement.end(worker, Stage.PREFILL, 10)
            chosen.append(worker.id)
        assert Counter(chosen) == {"P0": 10, "P1": 10, "P2": 10}

    run_virtual(run())


def test_unequal_work_goes_to_the_least_loaded(make_cluster: Make) -> None:
    async def run() -> None:
        placement = make_cluster("P2D1").placement
        sizes = [1000, 10, 10, 10, 900, 10]
        loads: Counter[str] = Counter()
        for size in sizes:
            worker = placement.pick_prefill(asking(size))
            placement.begin(worker, Stage.PREFILL, size)
            loads[worker.id] += size
        # 1000 to the first; then 10, 10, 10, 900 to the second (930); then 10 to it as well
        assert loads == {"P0": 1000, "P1": 940}

    run_virtual(run())


def test_a_worker_that_holds_the_picture_is_preferred_until_it_has_more_to_do_than_the_picture_costs(
    make_cluster: Make, make_job: Make
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P2D1")
        placement, items = cluster.placement, make_job(pictures=[4], num_rows=100).items
        holder = next(worker for worker in cluster.pool.workers if worker.id == "P1")
        placement.remember(holder, items[0].key)
        assert placement.pick_prefill(asking(10, items)).id == "P1"
        placement.begin(holder, Stage.PREFILL, 99)
        assert placement.pick_prefill(asking(10, items)).id == "P1"
        placement.begin(holder, Stage.PREFILL, 2)
        assert placement.pick_prefill(asking(10, items)).id == "P0"

    run_virtual(run())


def test_a_worker_that_has_computed_the_beginning_is_preferred_until_it_has_more_to_do_than_that_would_cost(
    make_cluster: Make,
) -> None:
    async def run() -> None:
        cluster = make_cluster("P2D1")
        placement, (_, holder, _) = cluster.placement, cluster.pool.workers
        placement.remember_prefix(holder, asking(100))  # six full blocks of 16
        assert placement.pick_prefill(asking(200)).id == "P1"
        placement.begin(holder, Stage.PREFILL, 95)
        assert placement.pick_prefill(asking(200)).id == "P1"
        placement.begin(holder, Stage.PREFILL, 2)
        assert placement.pick_prefill(asking(200)).id == "P0"

    run_virtual(run())


def test_pictures_in_the_beginning_that_a_worker_has_cost_nothing_there_and_a_repeated_one_costs_once(
    make_cluster: Make, make_job: Make
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P2D1")
        placement, (_, other, holder, _) = cluster.placement, cluster.pool.workers
        job = make_job(range(8), pictures=[4, 5, 5], num_rows=39)  # rows from 8, 48 and 88; 128 tokens
        placement.remember_prefix(holder, RunningRequest(replace(job, token_ids=job.token_ids[:50]), Stopwatch()))
        placement.remember(other, job.items[1].key)
        # At the holder: 80 tokens and the rows of 5. At the other: 128 tokens and the rows of 4.
        placement.begin(holder, Stage.PREFILL, 128 + 39 - 80 - 39 - 1)
        assert placement.pick_prefill(RunningRequest(job, Stopwatch())) is holder
        placement.begin(holder, Stage.PREFILL, 2)
        assert placement.pick_prefill(RunningRequest(job, Stopwatch())) is other

    run_virtual(run())


def test_a_prompt_counts_as_outstanding_by_what_is_to_be_computed(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("P2D1", costs=FakeCosts(prefill_s=1.0))
        holder, job = cluster.pool.workers[1], make_job(range(100, 150))
        cluster.placement.remember_prefix(holder, RunningRequest(job, Stopwatch()))
        task = asyncio.create_task(cluster.generate(job))
        await asyncio.sleep(0.5)
        assert [worker.outstanding[Stage.PREFILL] for worker in cluster.pool.workers] == [0, 50 - 48, 0]
        await task
        cluster.assert_idle()

    run_virtual(run())


def test_a_worker_to_be_avoided_is_taken_only_if_there_is_no_other(make_cluster: Make) -> None:
    async def run() -> None:
        placement = make_cluster("P2D1").placement
        assert placement.pick_prefill(asking(1), {"P0"}).id == "P1"
        assert placement.pick_prefill(asking(1), {"P0", "P1"}).id in {"P0", "P1"}

    run_virtual(run())


def test_a_prefill_worker_without_decode_is_of_no_use_where_nobody_takes_its_kv(make_cluster: Make) -> None:
    async def run() -> None:
        placement = make_cluster("P1PD1").placement
        assert {placement.pick_prefill(asking(1)).id for _ in range(4)} == {"PD0"}
        with pytest.raises(UnavailableError) as caught:
            placement.pick_decode()
        assert (caught.value.stage, caught.value.reason) == ("decode", "no_worker")

    run_virtual(run())


def test_where_only_the_decode_worker_is_gone_prefill_is_not_called_missing(make_cluster: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("P1D1")
        cluster.pool.lose(next(worker for worker in cluster.pool.workers if worker.id == "D0"), "killed")
        with pytest.raises(UnavailableError, match="no decode worker") as caught:
            cluster.placement.pick_prefill(asking(1))
        assert (caught.value.stage, caught.value.reason) == ("decode", "no_worker")
        cluster.pool.lose(cluster.pool.workers[0], "killed")
        with pytest.raises(UnavailableError, match="no prefill worker"):
            cluster.placement.pick_prefill(asking(1))

    run_virtual(run())


def test_a_missing_worker_is_waited_for_until_one_of_its_stage_joins(make_cluster: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("P1D1")
        cluster["P0"].die()
        await asyncio.sleep(1)
        waiting = asyncio.create_task(cluster.placement.when_there(lambda: cluster.placement.pick_prefill(asking(1))))
        await asyncio.sleep(1)
        cluster.add("D1")
        await asyncio.sleep(1)
        assert not waiting.done()
        cluster.add("P1")
        assert (await waiting).id == "P1"
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        assert cluster.count("triptych_worker_waits_total", stage="prefill") == 1

    run_virtual(run())


@pytest.mark.parametrize(("layout", "wait_s", "waited_s"), [("P1D1", 15.0, 0.0), ("E1P1D1", 15.0, 15.0), ("E1P1D1", 0.0, 0.0)])
def test_a_wait_has_an_end_and_what_nobody_promised_is_not_waited_for(
    layout: str, wait_s: float, waited_s: float, make_cluster: Make, make_job: Make
) -> None:
    async def run() -> None:
        cluster = make_cluster(layout, worker_wait_s=wait_s)
        for worker in cluster.pool.workers:
            if worker.can(Stage.ENCODE):
                cluster.pool.lose(worker, "killed")
        (item,) = make_job(pictures=[4]).items
        with pytest.raises(UnavailableError, match="no encode worker"):
            await cluster.placement.when_there(lambda: cluster.placement.pick_encode(item, cluster.pool.workers[0]))
        assert asyncio.get_running_loop().time() == pytest.approx(waited_s)

    run_virtual(run())


def test_a_full_worker_is_followed_by_the_next_at_once_and_all_are_asked_again_after_the_time_they_say(
    make_cluster: Make,
) -> None:
    async def run() -> None:
        cluster = make_cluster("P2D1", worker_wait_s=10.0)
        first, second = cluster.pool.workers[:2]
        now = asyncio.get_running_loop().time
        backoff = Backoff(cluster.placement, Stage.PREFILL)
        assert backoff.has_next(first, ())
        assert backoff.full == {"P0"}
        assert not backoff.has_next(second, ())
        await backoff.pause(OverloadedError("full", retry_after_s=3.0))
        assert (now(), backoff.full) == (pytest.approx(3.0), set())
        assert not backoff.has_next(first, {"P1"})
        await backoff.pause(OverloadedError("full", retry_after_s=1000.0))
        assert now() == pytest.approx(8.0), "nobody waits longer than 5 s at once"
        with pytest.raises(OverloadedError, match="the last word"):
            await backoff.pause(OverloadedError("the last word", retry_after_s=3.0))
        assert now() == pytest.approx(8.0)
        assert cluster.count("triptych_worker_refusals_total", stage="prefill") == 3

    run_virtual(run())


def test_where_prefill_must_decode_too_a_pure_prefill_worker_is_no_choice(make_cluster: Make) -> None:
    async def run() -> None:
        placement = make_cluster("P1PD1").placement
        assert placement.has_choice(Stage.PREFILL, {"P0"})
        assert not placement.has_choice(Stage.PREFILL, {"PD0"})

    run_virtual(run())


def test_a_suspect_comes_last_for_encodes_and_only_for_those(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E2ED1P1")
        placement, (item,) = cluster.placement, make_job(pictures=[4]).items
        e0, e1, ed0, p0 = cluster.pool.workers
        e0.suspect_until = ed0.suspect_until = 60.0
        placement.begin(e1, Stage.ENCODE, 1000)
        assert placement.pick_encode(item, p0).id == "E1"
        assert placement.pick_encode(item, p0, {"E1"}).id == "E0"
        assert placement.pick_decode().id == "ED0"
        await asyncio.sleep(61)
        assert placement.pick_encode(item, p0).id == "E0"

    run_virtual(run())


def test_a_lost_workers_hints_are_forgotten(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        worker, key = cluster.pool.workers[1], make_job(pictures=[4]).items[0].key
        cluster.placement.remember(worker, key)
        cluster.placement.forget_worker(worker)
        assert not cluster.placement.probably_holds(worker, key)

    run_virtual(run())
