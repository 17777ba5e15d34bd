"""The router's idea of who holds what is a hint: where it is wrong, the item is encoded again, and what failed is never taken for held."""

from collections.abc import Callable
from typing import Any

import pytest

from triptych.config import Stage
from triptych.errors import FailureReason, RequestError, TriptychError, UnavailableError
from triptych.router.running_request import GenerateJob
from triptych.router.virtual_time import run_virtual

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("reason", "error"), [(FailureReason.INTERNAL, UnavailableError), (FailureReason.BAD_MEDIA, RequestError)]
)
def test_an_item_whose_encodes_failed_is_encoded_by_the_next_who_wants_it(
    make_cluster: Make,
    make_job: Callable[..., GenerateJob],
    expected: Callable[..., list[int]],
    reason: FailureReason,
    error: type[TriptychError],
) -> None:
    async def run() -> None:
        cluster = make_cluster("E1P1D1")
        cluster["E0"].faults.encodes.extend([reason] * (3 if reason.is_retryable else 1))
        with pytest.raises(error):
            await cluster.generate(make_job(pictures=[4], name="first"))
        job = make_job(pictures=[4], name="second")
        assert await cluster.generate(job) == expected(job)
        assert cluster.count("triptych_encodes_total", kind="saved") == 0
        cluster.assert_idle()

    run_virtual(run())


def test_whatever_a_worker_has_forgotten_is_encoded_again_and_the_answers_stay_right(
    make_cluster: Make, make_job: Callable[..., GenerateJob], expected: Callable[..., list[int]]
) -> None:
    async def run() -> None:
        cluster = make_cluster("E2P1D1")
        for round in range(4):
            for pictures in ([1], [2, 3], [1, 2, 3]):
                job = make_job(pictures=pictures, name=f"{round} {pictures}")
                assert await cluster.generate(job) == expected(job)
            for item in make_job(pictures=[1, 2, 3]).items[: round + 1]:
                cluster["P0"].lose(item.key)
        # three at first, then what was lost: one, two and three of them
        assert sum(len(cluster[name].record.encodes) for name in ("E0", "E1")) == 3 + 1 + 2 + 3
        cluster.assert_idle()

    run_virtual(run())


# A full worker is no fault: another is asked, and the refusal is counted by itself.
RETRYABLE = [reason for reason in FailureReason if reason.is_retryable and reason != FailureReason.OVERLOADED]


@pytest.mark.parametrize("reason", RETRYABLE)
def test_every_encode_beyond_the_first_is_counted_with_its_reason(
    make_cluster: Make, make_job: Callable[..., GenerateJob], expected: Callable[..., list[int]], reason: FailureReason
) -> None:
    """No fallback is silent: what was paid for twice stands in /metrics."""

    async def run() -> None:
        cluster = make_cluster("E2P1D1")
        first = cluster.placement.pick_encode(make_job(pictures=[4]).items[0], cluster.pool.ready(Stage.PREFILL)[0])
        cluster[first.id].faults.encodes.append(reason)
        job = make_job(pictures=[4])
        assert await cluster.generate(job) == expected(job)
        counts = {each: cluster.count("triptych_encode_retries_total", reason=each) for each in RETRYABLE}
        assert {each: count for each, count in counts.items() if count} == {reason: 1}
        assert cluster.count("triptych_encodes_total", kind="started") == 2

    run_virtual(run())
