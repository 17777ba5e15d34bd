"""Random histories of faults on virtual time, each reproducible from its seed. Whatever happens, three things must hold:

every request ends once, within its deadline, with exactly the tokens that it would have had alone or with a typed error; nobody is
left with anything to do; and every ticket is released, or its worker is gone.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from triptych.engine.events import Failed
from triptych.errors import FailureReason, OverloadedError, TriptychError
from triptych.router.fake_worker_client import FakeCosts, FakeWorkerClient
from triptych.router.running_request import GenerateJob
from triptych.router.virtual_time import run_virtual

Make = Callable[..., Any]
LAYOUTS = ("E1P1D1", "E2P2D2", "E2PD2", "EP2D2", "EPD2", "ED2P2", "E1EP1P1PD1D2", "E3P1D2")
TIMEOUT_S = 60.0
RETRYABLE = [reason for reason in FailureReason if reason.is_retryable]


def hurt(rng: Random, cluster: Any, worker: FakeWorkerClient) -> None:
    """One fault of a random kind at one worker."""
    faults = worker.faults
    match rng.randrange(10):
        case 0:
            worker.die()
        case 1:
            faults.die_while_encoding = True
        case 2:
            faults.die_after_encoding = True
        case 3:
            faults.die_while_prefilling = True
        case 4:
            faults.die_after_tokens = rng.randrange(4)
        case 5:
            faults.encodes.append(rng.choice([*RETRYABLE, FailureReason.BAD_MEDIA, OverloadedError("full")]))
        case 6:
            reason = rng.choice(RETRYABLE)
            faults.generates.append(rng.choice([Failed("", "no", "kv_unavailable", 503, reason), OverloadedError("full")]))
        case 7:
            for key in list(worker.resident):
                worker.lose(key)
        case 8:
            faults.ignore_deliveries += 1
        case _:
            worker.hang()
            pooled = next((each for each in cluster.pool.workers if each.id == worker.info.worker_id), None)
            if pooled is not None:  # its watch falls silent
                asyncio.get_running_loop().call_later(2.0, lambda: (worker.die(), cluster.pool.lose(pooled, "silent")))


async def live(seed: int, make_cluster: Make, make_job: Make, expected: Callable[[GenerateJob], list[int]]) -> None:
    rng = Random(seed)
    costs = FakeCosts(encode_s=rng.random(), prefill_s=rng.random(), decode_s=rng.random() / 5, transfer_s=rng.random() / 5)
    cluster = make_cluster(rng.choice(LAYOUTS), costs=costs, request_timeout_s=TIMEOUT_S)

    async def ask(number: int) -> str:
        await asyncio.sleep(rng.random() * 4)
        job = make_job(pictures=[rng.randrange(4) for _ in range(rng.randrange(3))], name=f"r{number}", seed=rng.randrange(99))
        started_at = asyncio.get_running_loop().time()
        try:
            answer = await asyncio.wait_for(cluster.generate(job), rng.choice([1.0, *[TIMEOUT_S + 1] * 4]))
        except TriptychError as error:
            assert error.status in (400, 429, 503, 504), error
            return error.type
        except TimeoutError:
            assert asyncio.get_running_loop().time() - started_at < TIMEOUT_S  # the client left, the router did not hang
            return "left"
        assert answer == expected(job), f"seed {seed}: {job.request_id} got another answer"
        return "answered"

    async def torment() -> None:
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(rng.random() * 2)
            target = rng.choice(list(cluster.workers.values()))
            hurt(rng, cluster, target)
            if rng.random() < 0.7:
                role = str(target.role)
                cluster.add(f"{role}{len(cluster.workers)}").costs = costs

    *outcomes, _ = await asyncio.gather(*(ask(number) for number in range(8)), torment())
    assert len(outcomes) == 8
    await asyncio.sleep(10)
    cluster.assert_idle()
    for pooled in cluster.pool.workers:  # the lost ones hold nothing any more
        worker = cluster[pooled.id]
        tickets = {request.encode_id for request in worker.record.encodes if not request.will_stay} - worker.record.failed_encodes
        assert tickets <= {*worker.record.released, *worker.record.aborted}, f"seed {seed}: {pooled.id} keeps tickets"
        handed_over = {name for holder, name in worker.plane.memory if holder == pooled.id and name.startswith("r")}
        assert not handed_over, f"seed {seed}: {pooled.id} keeps KV"
    await cluster.pool.close()


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_answers_are_right_and_nothing_is_left(
    block: int, make_cluster: Make, make_job: Make, expected: Callable[[GenerateJob], list[int]]
) -> None:
    for seed in range(block * 30, block * 30 + 30):
        run_virtual(live(seed, make_cluster, make_job, expected))
