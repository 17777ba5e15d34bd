"""Prompts whose token ids are the same and whose pictures are not; and pictures that come twice, or in another order: each gets its own answer."""

import asyncio
import io
from random import Random

import pytest
from cluster import Answer, job_of, running_cluster
from oracle import MixedRequest, Oracle, Wanted

from triptych.demo.pictures import draw, random_picture


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    draw(random_picture(Random(seed), (112, 112))).save(buffer, "PNG")
    return buffer.getvalue()


def ask(*seeds: int) -> MixedRequest:
    parts = [{"type": "image"} for _ in seeds]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "describe the picture."}]}]
    return MixedRequest(messages, tuple(picture(seed) for seed in seeds), max_tokens=8, has_stop=False)


@pytest.fixture(scope="module")
def alike(oracle: Oracle) -> list[Wanted]:
    """One picture each, all of one size."""
    wanted = [oracle.answer(ask(seed)) for seed in range(8)]
    assert len({want.prompt for want in wanted}) == 1
    assert len({tuple(want.tokens) for want in wanted}) >= 5
    return wanted


@pytest.fixture(scope="module")
def orders(oracle: Oracle) -> list[Wanted]:
    """Three pictures each: of the same three in all orders, and of one or two that come again."""
    wanted = [oracle.answer(ask(*seeds)) for seeds in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 1, 0), (1, 1, 0), (0, 0, 0))]
    assert len({want.prompt for want in wanted}) == 1
    assert len({tuple(want.logprobs) for want in wanted}) == len(wanted)
    return wanted


def assert_own(answers: list[Answer], wanted: list[Wanted]) -> None:
    for answer, want in zip(answers, wanted, strict=True):
        assert answer.tokens == want.tokens
        assert answer.logprobs == pytest.approx(want.logprobs, abs=1e-3)


@pytest.mark.parametrize("layout", ("EPD1", "E1PD1", "E1P1D1", "E2P1D1", "EP1D1"))
@pytest.mark.parametrize("kind", ("alike", "orders"))
async def test_equal_token_ids_never_lend_an_answer(
    layout: str, kind: str, oracle: Oracle, request: pytest.FixtureRequest
) -> None:
    """Neither on the prefill nor on the decode worker, which sees no pixel: one after another, then all at once with the rows resident."""
    wanted: list[Wanted] = request.getfixturevalue(kind)
    async with running_cluster(layout, block_size=4, chunk=64) as cluster:
        one_by_one = [await cluster.ask(job_of(f"a{i}", want, oracle.stop_ids)) for i, want in enumerate(wanted)]
        together = await asyncio.gather(*(cluster.ask(job_of(f"b{i}", want, oracle.stop_ids)) for i, want in enumerate(wanted)))
    assert_own(one_by_one, wanted)
    assert_own(together, wanted)
