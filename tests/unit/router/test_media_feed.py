"""A request's items on their way to the prefill worker, when encode or prefill workers fail. On virtual time."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from triptych.engine.events import EncodeFailed
from triptych.errors import FailureReason, InternalError, MediaError, OverloadedError, RequestError, UnavailableError
from triptych.router.fake_worker_client import FakeCosts
from triptych.router.running_request import GenerateJob
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import run_virtual
from triptych.worker.protocol import ECDelivery

Make = Callable[..., Any]
Expected = Callable[[GenerateJob], list[int]]


async def ask(cluster: Any, job: GenerateJob) -> tuple[list[int], Any]:
    stopwatch = Stopwatch()
    return await cluster.generate(job, stopwatch), stopwatch.timing()


def keys_encoded(cluster: Any, *names: str) -> list[list[str]]:
    return [[request.key[:8] for request in cluster[name].record.encodes] for name in names]


def test_only_the_item_of_the_encode_worker_that_died_is_encoded_again(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P1D1", costs=FakeCosts(encode_s=1.0, transfer_s=1.0))
        job = make_job(pictures=[4, 5])
        task = asyncio.create_task(ask(cluster, job))
        await asyncio.sleep(1.5)  # both are published, the first is being read
        cluster["E1"].die()
        tokens, timing = await task
        assert tokens == expected(job)
        assert keys_encoded(cluster, "E0", "E1") == [["00000004", "00000005"], ["00000005"]]
        assert (timing.encode_retries, timing.replays) == (1, 0)
        assert cluster.count("triptych_encode_retries_total", reason="peer_lost") == 1
        cluster.assert_idle()

    run_virtual(run())


def test_an_encode_under_way_goes_on_when_the_prefill_worker_dies(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P2D1", costs=FakeCosts(encode_s=3.0))
        job = make_job(pictures=[4, 5])
        task = asyncio.create_task(ask(cluster, job))
        await asyncio.sleep(1)
        (first,) = [name for name in ("P0", "P1") if cluster[name].record.generates]
        cluster[first].die()
        tokens, timing = await task
        assert tokens == expected(job)
        assert len(cluster["E0"].record.encodes) == 2
        assert cluster["E0"].record.aborted == []
        assert (timing.encode_retries, timing.replays) == (0, 1)
        cluster.assert_idle()

    run_virtual(run())


def test_a_ticket_of_a_lost_worker_does_not_go_with_the_request(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P2D1", costs=FakeCosts(encode_s=1.0, transfer_s=5.0))
        job = make_job(pictures=[4, 5])
        task = asyncio.create_task(ask(cluster, job))
        await asyncio.sleep(3)  # both are published, the first is being read
        cluster["E0"].die()
        cluster["P0"].die()
        tokens, _ = await task
        assert tokens == expected(job)
        assert [ticket.key[:8] for ticket in cluster["P1"].record.generates[0].ec_transfer_params.tickets] == ["00000005"]
        assert keys_encoded(cluster, "E0", "E1") == [["00000004"], ["00000005", "00000004"]]

    run_virtual(run())


def test_the_only_encode_workers_failures_are_not_burnt_in_an_instant(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        cluster["E0"].faults.encodes.extend([FailureReason.INTERNAL] * 2)
        job = make_job(pictures=[4])
        tokens, timing = await ask(cluster, job)
        assert tokens == expected(job)
        assert asyncio.get_running_loop().time() == pytest.approx(1.0, abs=0.1)
        assert timing.encode_retries == 2

    run_virtual(run())


def test_the_only_encode_worker_may_be_restarted_twice(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1", costs=FakeCosts(encode_s=2.0))
        job = make_job(pictures=[4, 5])
        task = asyncio.create_task(ask(cluster, job))
        for number in range(2):
            await asyncio.sleep(1)
            cluster[f"E{number}"].die()
            await asyncio.sleep(3)
            cluster.add(f"E{number + 1}").costs = FakeCosts(encode_s=2.0)
        tokens, timing = await task
        assert tokens == expected(job)
        assert timing.encode_retries == 4, "two items, twice each"
        assert cluster.count("triptych_worker_waits_total", stage="encode") == 4
        cluster.assert_idle()

    run_virtual(run())


def test_a_worker_that_says_that_its_engine_is_gone_is_lost(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        cluster["E0"].faults.encodes.append(FailureReason.PEER_LOST)
        job = make_job(pictures=[4])
        task = asyncio.create_task(ask(cluster, job))
        await asyncio.sleep(1)
        assert [worker.id for worker in cluster.pool.workers] == ["P0", "D0"]
        cluster.add("E1")
        assert (await task)[0] == expected(job)

    run_virtual(run())


def test_a_full_encode_worker_is_asked_again_and_that_is_no_fault(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        full = [FailureReason.OVERLOADED, OverloadedError("full", retry_after_s=1.0)] * 4
        cluster["E0"].faults.encodes.extend(full)
        job = make_job(pictures=[4])
        tokens, timing = await ask(cluster, job)
        assert tokens == expected(job)
        assert (timing.encode_retries, timing.replays) == (0, 0)
        assert asyncio.get_running_loop().time() == pytest.approx(8.0, abs=0.1)
        assert cluster.count("triptych_worker_refusals_total", stage="encode") == 8
        cluster["E0"].faults.encodes.extend([OverloadedError("full")] * 100)
        with pytest.raises(OverloadedError):
            await cluster.generate(make_job(pictures=[5]))
        cluster.assert_idle()

    run_virtual(run())


def test_a_full_encode_worker_is_left_for_one_that_is_not(make_cluster: Make, make_job: Make, expected: Expected) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P1D1")
        cluster["E0"].faults.encodes.append(FailureReason.OVERLOADED)
        job = make_job(pictures=[4])
        assert (await ask(cluster, job))[0] == expected(job)
        assert asyncio.get_running_loop().time() < 0.1
        assert keys_encoded(cluster, "E0", "E1") == [["00000004"], ["00000004"]]

    run_virtual(run())


@pytest.mark.parametrize("error", [InternalError("500."), UnavailableError("503", stage="E", reason="unknown")])
def test_an_encode_call_that_fails_in_an_unforeseen_way_goes_to_another_worker(
    error: Exception, make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P1D1")
        cluster["E0"].faults.encodes.append(error)
        job = make_job(pictures=[4])
        assert (await ask(cluster, job))[0] == expected(job)
        assert cluster.count("triptych_encode_retries_total", reason="internal") == 1

    run_virtual(run())


def test_a_mismatch_is_logged_once_and_not_tried_again(
    make_cluster: Make, make_job: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P1D1")
        cluster["E0"].faults.encodes.append(FailureReason.MISMATCH)
        with pytest.raises(UnavailableError) as caught:
            await cluster.generate(make_job(pictures=[4]))
        assert (caught.value.type, caught.value.reason) == ("ec_unavailable", "mismatch")
        assert keys_encoded(cluster, "E0", "E1") == [["00000004"], []]

    with caplog.at_level(logging.INFO):
        run_virtual(run())
    assert [record.levelname for record in caplog.records if "mismatch" in record.getMessage()] == ["ERROR"]


@pytest.mark.parametrize(
    ("pictures", "said"), [([1, 2, 3], "picture 2 of 3: the"), ([7], "the"), ([1, 2, 1], "picture 2 of 3: the")]
)
def test_a_broken_picture_is_named_by_its_place(pictures: list[int], said: str, make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        encode, broken = cluster["E0"].encode, (2 if 2 in pictures else 7)

        async def encode_or_refuse(request: Any, media: bytes) -> Any:
            if int(request.key[:8], 16) == broken:
                return EncodeFailed(request.encode_id, request.key, "the file is truncated.", FailureReason.BAD_MEDIA)
            return await encode(request, media)

        cluster["E0"].encode = encode_or_refuse
        with pytest.raises(MediaError) as caught:
            await cluster.generate(make_job(pictures=pictures))
        assert str(caught.value) == f"{said} file is truncated."
        cluster.assert_idle()

    run_virtual(run())


def test_an_encode_that_prefill_did_not_need_is_called_off_when_the_prompt_is_computed(
    make_cluster: Make, make_job: Make, expected: Expected
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        first, second = (make_job(pictures=[4], name=name) for name in ("first", "second"))
        assert (await ask(cluster, first))[0] == expected(first)
        cluster.placement.forget(cluster.pool.workers[1], first.items[0].key)  # P0 has it, and the router does not know
        cluster["E0"].hang()
        cluster["D0"].hang()
        task = asyncio.create_task(ask(cluster, second))
        await asyncio.sleep(1)
        assert len(cluster["E0"].record.encodes) == 2
        assert cluster["E0"].record.aborted == [cluster["E0"].record.encodes[1].encode_id]
        cluster["D0"].running.set()
        assert (await task)[0] == expected(second)
        cluster.assert_idle()

    run_virtual(run())


def test_a_bug_in_the_feed_ends_the_request_and_does_not_leave_it_waiting(make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        cluster["E0"].faults.encodes.append(ZeroDivisionError("a bug"))
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            await cluster.generate(make_job(pictures=[4]))
        assert asyncio.get_running_loop().time() < 1
        cluster.assert_idle()

    run_virtual(run())


def test_a_ticket_that_the_prefill_worker_refuses_ends_the_request_at_once(
    make_cluster: Make, make_job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers with different secrets, say: the next ticket would be refused as well."""

    async def run() -> None:
        cluster = make_cluster("E1P1D1", costs=FakeCosts(encode_s=1.0))
        deliver = cluster["P0"].deliver

        async def refuse(delivery: ECDelivery) -> None:
            if delivery.ticket is not None:
                raise RequestError("the EC ticket has not the seal of this cluster.")
            await deliver(delivery)

        monkeypatch.setattr(cluster["P0"], "deliver", refuse)
        with pytest.raises(UnavailableError, match="refused the ticket") as caught:
            await cluster.generate(make_job(pictures=[4]))
        assert (caught.value.type, caught.value.stage, caught.value.reason) == ("ec_unavailable", "prefill", "mismatch")
        assert asyncio.get_running_loop().time() < 2.0
        await asyncio.sleep(1.0)
        assert cluster["E0"].core.scheduler.num_leases == 0

    run_virtual(run())
