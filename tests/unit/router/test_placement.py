"""Who gets the next piece of work."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from triptych.config import Stage
from triptych.errors import UnavailableError
from triptych.router.virtual_time import run_virtual

Make = Callable[..., Any]


def test_equal_work_spreads_evenly_over_time_and_does_not_start_over_with_each_request(make_cluster: Make) -> None:
    async def run() -> None:
        placement = make_cluster("P3D1").placement
        chosen: list[str] = []
        for _ in range(30):
            worker = placement.pick_prefill(10, ())
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
            worker = placement.pick_prefill(size, ())
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
        assert placement.pick_prefill(10, items).id == "P1"
        placement.begin(holder, Stage.PREFILL, 99)
        assert placement.pick_prefill(10, items).id == "P1"
        placement.begin(holder, Stage.PREFILL, 2)
        assert placement.pick_prefill(10, items).id == "P0"

    run_virtual(run())


def test_a_worker_to_be_avoided_is_taken_only_if_there_is_no_other(make_cluster: Make) -> None:
    async def run() -> None:
        placement = make_cluster("P2D1").placement
        assert placement.pick_prefill(1, (), {"P0"}).id == "P1"
        assert placement.pick_prefill(1, (), {"P0", "P1"}).id in {"P0", "P1"}

    run_virtual(run())


def test_a_prefill_worker_without_decode_is_of_no_use_where_nobody_takes_its_kv(make_cluster: Make) -> None:
    async def run() -> None:
        placement = make_cluster("P1PD1").placement
        assert {placement.pick_prefill(1, ()).id for _ in range(4)} == {"PD0"}
        with pytest.raises(UnavailableError) as caught:
            placement.pick_decode()
        assert (caught.value.stage, caught.value.reason) == ("decode", "no_worker")

    run_virtual(run())


def test_where_only_the_decode_worker_is_gone_prefill_is_not_called_missing(make_cluster: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("P1D1")
        cluster.pool.lose(next(worker for worker in cluster.pool.workers if worker.id == "D0"), "killed")
        with pytest.raises(UnavailableError, match="no decode worker") as caught:
            cluster.placement.pick_prefill(1, ())
        assert (caught.value.stage, caught.value.reason) == ("decode", "no_worker")
        cluster.pool.lose(cluster.pool.workers[0], "killed")
        with pytest.raises(UnavailableError, match="no prefill worker"):
            cluster.placement.pick_prefill(1, ())

    run_virtual(run())


def test_a_lost_workers_hints_are_forgotten(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        worker, key = cluster.pool.workers[1], make_job(pictures=[4]).items[0].key
        cluster.placement.remember(worker, key)
        cluster.placement.forget_worker(worker)
        assert not cluster.placement.probably_holds(worker, key)

    run_virtual(run())
