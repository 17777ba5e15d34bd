"""The same greedy tokens as `transformers`' `generate`, in every layout, block size and chunk size, together and one by one."""

import asyncio

import pytest
from cluster import Answer, job_of, running_cluster
from oracle import Oracle, Wanted

LAYOUTS = ("EPD1", "E1PD1", "EP1D1", "E1P1D1", "E2P1D2")
OTHER_LAYOUTS = ("ED1P1", "EPD2", "E1EPD1", "EP2ED1", "E1P2PD1D1")


def assert_equal(answers: list[Answer], wanted: list[Wanted]) -> None:
    for index, (answer, want) in enumerate(zip(answers, wanted, strict=True)):
        assert answer.tokens == want.tokens, f"request {index}"
        assert answer.logprobs == pytest.approx(want.logprobs, abs=1e-3), f"request {index}"


def test_the_oracle_asks_what_the_issue_names(wanted: list[Wanted]):
    assert {len(want.grids) for want in wanted} == {0, 1, 3}
    assert max(len(want.prompt) for want in wanted) > 1000
    assert len({want.grids for want in wanted}) > 10
    assert len({tuple(want.tokens) for want in wanted}) > 10, "answers that are all alike prove little"


@pytest.mark.parametrize("chunk", (7, 64, 2048))
@pytest.mark.parametrize("block_size", (4, 16))
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_together(layout: str, block_size: int, chunk: int, oracle: Oracle, wanted: list[Wanted]):
    async with running_cluster(layout, block_size=block_size, chunk=chunk) as cluster:
        jobs = [job_of(f"r{index}", want, oracle.stop_ids) for index, want in enumerate(wanted)]
        answers = await asyncio.gather(*(cluster.ask(job) for job in jobs))
    assert_equal(answers, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_one_by_one(layout: str, oracle: Oracle, wanted: list[Wanted]):
    async with running_cluster(layout, block_size=4, chunk=64) as cluster:
        answers = [await cluster.ask(job_of(f"r{index}", want, oracle.stop_ids)) for index, want in enumerate(wanted)]
    assert_equal(answers, wanted)


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
async def test_every_role_in_company(layout: str, oracle: Oracle, wanted: list[Wanted]):
    async with running_cluster(layout, block_size=16, chunk=64) as cluster:
        jobs = [job_of(f"r{index}", want, oracle.stop_ids) for index, want in enumerate(wanted)]
        answers = await asyncio.gather(*(cluster.ask(job) for job in jobs))
        await cluster.assert_nothing_is_held()
    assert_equal(answers, wanted)


async def test_small_caches_make_requests_wait_and_change_no_token(oracle: Oracle, wanted: list[Wanted]):
    async with running_cluster("E1P1D1", block_size=16, chunk=64, encoder_cache_rows=160) as cluster:
        jobs = [job_of(f"r{index}", want, oracle.stop_ids) for index, want in enumerate(wanted)]
        answers = await asyncio.gather(*(cluster.ask(job) for job in jobs))
        await cluster.assert_nothing_is_held()
    assert_equal(answers, wanted)
