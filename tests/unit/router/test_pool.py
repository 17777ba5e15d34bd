"""Workers' lives: joining, refusal, loss, and what a loss means for those who use the worker."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from triptych.config import ClusterLayout, Stage
from triptych.engine.arithmetic_runner import Fabric
from triptych.errors import ConfigError, WorkerLostError
from triptych.router.fake_worker_client import CONFIG, FakeWorkerClient
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.router.virtual_time import run_virtual
from triptych.worker.protocol import WorkerInfo


def make_worker(name: str, role: str, **info: Any) -> FakeWorkerClient:
    values: dict[str, Any] = {
        "fingerprint": CONFIG.fingerprint,
        "max_model_len": 4096,
        "encoder_cache_rows": 512,
        "kv_cache_tokens": 1024,
    } | info
    return FakeWorkerClient(name, role, Fabric(), info=WorkerInfo(worker_id=name, role=role, **values))


def test_a_stage_without_worker_is_missing_and_encode_only_if_the_layout_has_it() -> None:
    async def run() -> None:
        pool = WorkerPool(ClusterLayout.parse("E1PD1"))
        assert pool.missing_stages() == (Stage.ENCODE, Stage.PREFILL, Stage.DECODE)
        pool.join(make_worker("a", "PD"))
        assert pool.missing_stages() == (Stage.ENCODE,)
        text_only = WorkerPool(ClusterLayout.parse("PD1"))
        text_only.join(make_worker("a", "PD"))
        assert text_only.missing_stages() == ()

    run_virtual(run())


def test_a_worker_with_another_fingerprint_is_refused_and_the_log_names_the_field(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        pool = WorkerPool()
        pool.join(make_worker("a", "P"))
        other = make_worker("b", "D", fingerprint=replace(CONFIG.fingerprint, block_size=32))
        with pytest.raises(ConfigError, match="block_size is 32 here and 16 there"), caplog.at_level(logging.ERROR):
            pool.join(other)
        assert "block_size" in caplog.text
        assert [worker.id for worker in pool.workers] == ["a"]

    run_virtual(run())


def test_the_dtype_is_that_of_the_last_who_joined_also_when_nobody_is_left() -> None:
    """A request that is rendered meanwhile names its items as the next worker will make them."""

    async def run() -> None:
        pool = WorkerPool()
        assert pool.dtype == ""
        for number, dtype in enumerate(("float32", "bfloat16")):
            worker = pool.join(make_worker(str(number), "PD", fingerprint=replace(CONFIG.fingerprint, dtype=dtype)))
            assert pool.dtype == dtype
            pool.lose(worker, "gone")
            assert pool.dtype == dtype
        await pool.close()

    run_virtual(run())


def test_the_end_of_the_watch_is_the_end_of_the_worker() -> None:
    async def run() -> None:
        lost: list[str] = []
        pool = WorkerPool(on_lost=lambda worker: lost.append(worker.id))
        client = make_worker("a", "P")
        pool.join(client)
        client.die()
        await asyncio.sleep(0.001)
        assert (pool.workers, lost) == ((), ["a"])

    run_virtual(run())


def test_everybody_inside_is_told_at_once_and_whoever_comes_later_too() -> None:
    async def run() -> None:
        pool = WorkerPool()
        worker = pool.join(make_worker("a", "P"))

        async def use() -> str:
            try:
                async with worker.attached():
                    await asyncio.sleep(1000)
            except WorkerLostError as error:
                return str(error)
            return "unharmed"

        users = [asyncio.create_task(use()) for _ in range(3)]
        await asyncio.sleep(1)
        pool.lose(worker, "it was silent")
        messages = await asyncio.gather(*users)
        assert all("a is lost: it was silent" in message for message in messages)
        assert "it was silent" in await use()
        assert asyncio.get_running_loop().time() < 2

    run_virtual(run())


def test_an_outer_deadline_is_not_mistaken_for_a_loss() -> None:
    async def run() -> None:
        worker = WorkerPool().join(make_worker("a", "P"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), worker.attached():
                await asyncio.sleep(1000)

    run_virtual(run())


def test_a_worker_of_the_same_id_takes_the_place_of_the_old_process() -> None:
    async def run() -> None:
        pool = WorkerPool()
        old = pool.join(make_worker("a", "P"))
        new = pool.join(make_worker("a", "P"))
        assert (old.is_ready, new.is_ready) == (False, True)
        assert pool.workers == (new,)
        await pool.close()

    run_virtual(run())


def test_losing_twice_counts_once() -> None:
    async def run() -> None:
        lost: list[PooledWorker] = []
        pool = WorkerPool(on_lost=lost.append)
        worker = pool.join(make_worker("a", "P"))
        pool.lose(worker, "x")
        pool.lose(worker, "y")
        assert (lost, worker.why_lost) == ([worker], "x")

    run_virtual(run())


def test_a_worker_may_be_expected_for_the_layouts_stages_and_without_layout_for_encode_once_one_was_there() -> None:
    async def run() -> None:
        assert [WorkerPool(ClusterLayout.parse("E1PD1")).promises(stage) for stage in Stage] == [True, True, True]
        assert [WorkerPool(ClusterLayout.parse("P1D1")).promises(stage) for stage in Stage] == [False, True, True]
        pool = WorkerPool()
        assert [pool.promises(stage) for stage in Stage] == [False, True, True]
        pool.lose(pool.join(make_worker("a", "E")), "x")
        assert [pool.promises(stage) for stage in Stage] == [True, True, True]

    run_virtual(run())


def test_limits_stay_while_the_workers_are_gone_for_a_moment() -> None:
    async def run() -> None:
        pool = WorkerPool()
        assert pool.limits().kv_cache_tokens > 10**9
        workers = [pool.join(make_worker("a", "P")), pool.join(make_worker("b", "D", kv_cache_tokens=100))]
        before = pool.limits()
        for worker in reversed(workers):
            pool.lose(worker, "restarted")
        assert pool.limits().encoder_cache_rows == before.encoder_cache_rows
        assert pool.limits().kv_cache_tokens == 1024, "of the last one that was there"

    run_virtual(run())


def test_limits_are_the_smallest_workers() -> None:
    async def run() -> None:
        pool = WorkerPool()
        pool.join(make_worker("a", "P"))
        pool.join(make_worker("b", "D", kv_cache_tokens=100, encoder_cache_rows=0))
        limits = pool.limits()
        assert (limits.kv_cache_tokens, limits.encoder_cache_rows, limits.max_model_len) == (100, 512, 4096)

    run_virtual(run())
