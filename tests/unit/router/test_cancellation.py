"""A client may leave, and the router may stop, at every moment of a request's life: nobody is left with anything to hold or to do.

Two ways to the moments: by name, each brought about and cut at leisure; and one by one, at every turn of the event loop from the request's
first to its last, which are all the points at which it can be cut.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from itertools import count
from typing import Any

import pytest

from triptych.demo import CHECKPOINT
from triptych.errors import OverloadedError, UnavailableError
from triptych.router.choices import jobs_of_choices, run_choices
from triptych.router.detokenizer import Detokenizer
from triptych.router.fake_worker_client import FakeCosts
from triptych.router.prompt_tokenizer import PromptTokenizer
from triptych.router.releases import DRAIN_S, TIMEOUT_S
from triptych.router.running_request import GenerateJob
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import VirtualTimeLoop, run_virtual

Make = Callable[..., Any]
TOKENIZER = PromptTokenizer(CHECKPOINT)


def assert_nothing_is_left(cluster: Any, why: str = "") -> None:
    cluster.assert_idle()
    coroutines = [str(task.get_coro()) for task in asyncio.all_tasks()]
    owners = ("MediaFeed.", "SharedEncodes.", "Pipeline.", "_release")
    assert [each for each in coroutines if any(f" {owner}" in each for owner in owners)] == [], why
    for pooled in cluster.pool.workers:
        record = cluster[pooled.id].record
        given_back = {*record.released, *record.aborted}
        tickets = {request.encode_id for request in record.encodes if not request.will_stay}
        handed_over = {request.request_id for request in record.generates if request.kv_transfer_params.do_remote_decode}
        assert tickets <= given_back, f"{why}: {pooled.id} keeps an item"
        assert handed_over <= given_back, f"{why}: {pooled.id} keeps KV"


# --- moments by name


async def nothing(cluster: Any) -> None: ...


async def lose_encode(cluster: Any) -> None:
    cluster["E0"].die()
    await asyncio.sleep(0.1)


async def lose_prefill(cluster: Any) -> None:
    cluster["P0"].die()
    await asyncio.sleep(0.1)


async def lose_decode(cluster: Any) -> None:
    asyncio.get_running_loop().call_later(2.5, cluster["D0"].die)  # with none from the start, prefill waits already


async def refuse_encode(*_: Any) -> Any:
    raise OverloadedError("full", retry_after_s=1.0)


async def refuse_generate(*_: Any) -> AsyncIterator[Any]:
    raise OverloadedError("full", retry_after_s=1.0)
    yield


async def fill_encode(cluster: Any) -> None:
    cluster["E0"].encode = refuse_encode


async def fill_prefill(cluster: Any) -> None:
    cluster["P0"].generate = refuse_generate


async def fill_decode(cluster: Any) -> None:
    cluster["D0"].generate = refuse_generate


async def stop_encode(cluster: Any) -> None:
    cluster["E0"].hang()


async def stop_prefill(cluster: Any) -> None:
    cluster["P0"].hang()


async def stop_decode(cluster: Any) -> None:
    cluster["D0"].hang()


async def hold_deliveries(cluster: Any) -> None:
    async def never(delivery: Any) -> None:
        await asyncio.sleep(3600)

    cluster["P0"].deliver = never


# what to do before, when to cut (encode takes 1 s, the transfer 1 s, prefill 1 s, the KV's transfer 1 s, a token 1 s), who has heard of it
MOMENTS = {
    "before it starts": (nothing, 0.0, []),
    "it waits for a prefill worker": (lose_prefill, 3.0, []),
    "prefill is full": (fill_prefill, 3.3, []),
    "it waits for an encode worker": (lose_encode, 3.0, ["P0"]),
    "encode is full": (fill_encode, 3.3, ["P0"]),
    "the encode runs": (nothing, 0.5, ["E0", "P0"]),
    "the encode hangs": (stop_encode, 10.0, ["E0", "P0"]),
    "the encode is overdue": (stop_encode, 30.0, ["E0", "P0"]),
    "the item is encoded and not delivered": (hold_deliveries, 3.0, ["E0", "P0"]),
    "the item is read": (nothing, 1.5, ["E0", "P0"]),
    "prefill computes": (nothing, 2.5, ["E0", "P0"]),
    "prefill hangs": (stop_prefill, 3.0, ["E0", "P0"]),
    "it waits for a decode worker": (lose_decode, 5.0, ["E0", "P0"]),
    "decode is full": (fill_decode, 5.3, ["E0", "P0"]),
    "the KV is read": (nothing, 3.5, ["E0", "P0", "D0"]),
    "the KV's read hangs": (stop_decode, 10.0, ["E0", "P0", "D0"]),
    "it decodes": (nothing, 6.5, ["E0", "P0", "D0"]),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("router_stops", [False, True], ids=["the client leaves", "the router stops"])
def test_a_request_that_ends_before_its_end_leaves_nothing(
    moment: str, router_stops: bool, make_cluster: Make, make_job: Make
) -> None:
    prepare, at_s, asked = MOMENTS[moment]

    async def run() -> None:
        cluster = make_cluster("E1P1D1", costs=FakeCosts(encode_s=1.0, transfer_s=1.0, prefill_s=1.0, decode_s=1.0))
        cluster.placement.wait_s = 100.0
        await prepare(cluster)
        task = asyncio.create_task(cluster.generate(make_job(pictures=[4])))
        if at_s:
            await asyncio.sleep(at_s)
        assert not task.done()
        cut_at = asyncio.get_running_loop().time()
        if router_stops and at_s:
            await cluster.pipeline.stop()
            with pytest.raises(UnavailableError, match="stopping"):
                await task
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        grace_s = DRAIN_S if router_stops else 0.0  # in which the releases may still arrive
        assert asyncio.get_running_loop().time() - cut_at < grace_s + 0.01, "it waits for nobody"
        calls = {name: len(worker.record.encodes) + len(worker.record.generates) for name, worker in cluster.workers.items()}
        for worker in cluster.workers.values():
            worker.running.set()
        await asyncio.sleep(5)
        assert_nothing_is_left(cluster, moment)
        assert [name for name, number in calls.items() if number] == asked
        after = {name: len(worker.record.encodes) + len(worker.record.generates) for name, worker in cluster.workers.items()}
        assert after == calls, "nothing is begun for somebody who has left"
        await cluster.pool.close()

    run_virtual(run())


@pytest.mark.parametrize("at_s", [1.0, 8.0])
def test_an_encode_goes_on_for_whoever_stays_and_ends_with_the_last(at_s: float, make_cluster: Make, make_job: Make) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P2D1", encode_timeout_s=5.0)
        cluster["E0"].hang()
        tasks = [asyncio.create_task(cluster.generate(make_job(pictures=[4], name=f"r{number}"))) for number in range(3)]
        await asyncio.sleep(at_s)
        for num_left in (1, 2, 3):
            assert cluster["E0"].record.aborted == []
            tasks[num_left - 1].cancel()
            await asyncio.sleep(0.1)
        assert len(cluster["E0"].record.encodes) == len(cluster["E0"].record.aborted) == 1
        await asyncio.sleep(TIMEOUT_S)  # the release does not get through
        assert_nothing_is_left(cluster)

    run_virtual(run())


# --- every moment


class CuttingLoop(VirtualTimeLoop):
    """Calls `cut` before its turn number `cut_at`, counted from when that was set."""

    def __init__(self) -> None:
        super().__init__()
        self.turns_left = -1
        self.cut: Callable[[], object] = lambda: None

    def _run_once(self) -> None:
        if self.turns_left == 0:
            self.cut()
        self.turns_left -= 1
        super()._run_once()  # type: ignore[misc]  # asyncio's own loop is made of these


async def leave(at_turn: int, make: Callable[[], Any], make_job: Make, num_choices: int) -> bool:
    """Whether the request was still there to be left."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CuttingLoop)
    cluster = make()
    task = asyncio.create_task(read_choices(cluster, make_job(pictures=[4, 5]), num_choices))
    loop.turns_left, loop.cut = at_turn, task.cancel
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(5)
    assert_nothing_is_left(cluster, f"turn {at_turn}")
    await cluster.pool.close()
    return isinstance(outcome, asyncio.CancelledError)


async def read_choices(cluster: Any, job: GenerateJob, count: int) -> None:
    jobs = [(each, Stopwatch()) for each in jobs_of_choices(job, count)]
    async with aclosing(run_choices(cluster.pipeline, jobs, lambda: Detokenizer(TOKENIZER))) as parts:
        async for _ in parts:
            pass


def count_turns(make: Callable[[], Any], make_job: Make, num_choices: int = 1) -> int:
    """Of a request, which leaves at each of them, in a cluster of its own."""

    def is_there(turn: int) -> bool:
        with asyncio.Runner(loop_factory=CuttingLoop) as runner:
            return runner.run(leave(turn, make, make_job, num_choices))

    return next(turn for turn in count() if not is_there(turn))


@pytest.mark.parametrize("layout", ["E1P1D1", "E2PD1", "EP2D1", "EPD1"])
@pytest.mark.parametrize(
    "costs",
    [FakeCosts(), FakeCosts(encode_s=1.0, prefill_s=1.0, decode_s=1.0, transfer_s=1.0)],
    ids=["at once", "each stage takes time"],
)
def test_a_client_may_leave_at_every_turn_of_the_loop(layout: str, costs: FakeCosts, make_cluster: Make, make_job: Make) -> None:
    assert count_turns(lambda: make_cluster(layout, costs=costs), make_job) > 10


@pytest.mark.parametrize("layout", ["E1P1D1", "EPD1"])
def test_a_client_may_leave_several_choices_at_every_turn(layout: str, make_cluster: Make, make_job: Make) -> None:
    assert count_turns(lambda: make_cluster(layout), make_job, num_choices=3) > 10


@pytest.mark.parametrize("fault", ["die_while_encoding", "die_after_encoding", "die_while_prefilling"])
def test_a_client_may_leave_at_every_turn_while_a_fault_is_healed(fault: str, make_cluster: Make, make_job: Make) -> None:
    def make() -> Any:
        cluster = make_cluster("E2P2D1", costs=FakeCosts(encode_s=1.0, prefill_s=1.0, decode_s=1.0, transfer_s=1.0))
        for name in ("E0", "P0"):
            setattr(cluster[name].faults, fault, True)
        return cluster

    assert count_turns(make, make_job) > 10
