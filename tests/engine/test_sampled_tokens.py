"""Sampled tokens with a seed, every parameter in use: the same in every layout, whatever the chunks and the neighbours. And a prompt's logprobs."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from cluster import Answer, Cluster, job_of, running_cluster
from oracle import Oracle, Wanted

from triptych.engine.events import Finished, PromptLogprobs
from triptych.output import TokenLogprob
from triptych.router.running_request import GenerateJob
from triptych.sampling_params import SamplingParams
from triptych.worker.protocol import ECTransferParams, EncodeRequest, GenerateRequest

# Hot, since the demo model is sure of itself.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 2.0},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 2, "repetition_penalty": 1.6},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.5, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"temperature": 2.0, "logit_bias": {300: 9.0, 301: 9.0, 17: -100.0}, "min_tokens": 6},
    {"temperature": 0.0, "repetition_penalty": 2.0, "frequency_penalty": 2.0, "prompt_logprobs": 1},
    {
        "temperature": 1.8,
        "top_p": 0.999,
        "top_k": 200,
        "min_p": 0.0001,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "logit_bias": {400: 6.0},
        "min_tokens": 3,
        "prompt_logprobs": 0,
    },
)


def sampled_jobs(wanted: list[Wanted], stop_ids: tuple[int, ...]) -> Iterator[GenerateJob]:
    for index, want in enumerate(wanted[:24]):
        kind = KINDS[index % len(KINDS)]
        stops = stop_ids if "min_tokens" in kind else ()
        sampling = SamplingParams(max_tokens=12, seed=1000 + index, stop_token_ids=stops, logprobs=0, **kind)
        yield job_of(f"r{index}", want, stop_ids, sampling)


async def ask_all(cluster: Cluster, jobs: list[GenerateJob]) -> list[Answer]:
    return list(await asyncio.gather(*(cluster.ask(job) for job in jobs)))


@pytest.fixture(scope="module")
async def alone(oracle: Oracle, wanted: list[Wanted]) -> list[Answer]:
    """One after another in one process."""
    async with running_cluster("EPD1") as cluster:
        return [await cluster.ask(job) for job in sampled_jobs(wanted, oracle.stop_ids)]


async def test_each_parameter_in_use_makes_an_answer_another_one(alone: list[Answer], oracle: Oracle, wanted: list[Wanted]):
    """Else the tests below would prove little: left out, it changes the tokens of one request at least."""
    jobs = list(sampled_jobs(wanted, oracle.stop_ids))[: 2 * len(KINDS)]
    async with running_cluster("EPD1") as cluster:
        for name in (
            "temperature",
            "seed",
            *sorted({name for kind in KINDS for name in kind} - {"temperature", "prompt_logprobs"}),
        ):
            off = {"temperature": 0.0, "seed": 1}.get(name, getattr(SamplingParams(max_tokens=1), name))
            sampling = [msgspec.structs.replace(job.sampling, **{name: off}) for job in jobs]
            others = await ask_all(cluster, [replace(job, sampling=each) for job, each in zip(jobs, sampling, strict=True)])
            assert any(answer.tokens != other.tokens for answer, other in zip(alone, others, strict=False)), name


@pytest.mark.parametrize(("layout", "chunk"), [("EPD1", 64), ("E1PD1", 64), ("E1P1D1", 2048), ("E1P1D1", 64), ("EP1D2", 64)])
async def test_a_seed_gives_the_same_tokens_in_every_layout(
    layout: str, chunk: int, alone: list[Answer], oracle: Oracle, wanted: list[Wanted]
):
    async with running_cluster(layout, block_size=4, chunk=chunk) as cluster:
        answers = await ask_all(cluster, list(sampled_jobs(wanted, oracle.stop_ids)))
    for index, (answer, want) in enumerate(zip(answers, alone, strict=True)):
        assert answer.tokens == want.tokens, f"request {index}"
        assert answer.logprobs == pytest.approx(want.logprobs, abs=1e-3), f"request {index}"


# --- a prompt's logprobs ----------------------------------------------------------------------------------------------------


async def prompt_logprobs_of(cluster: Cluster, job: GenerateJob) -> list[TokenLogprob]:
    """What the only worker tells of the job's prompt; token 1 first."""
    [worker] = cluster.workers
    for index, item in enumerate(job.items):
        encode = EncodeRequest(f"{job.request_id}-{index}", item.key, item.modality, item.num_rows, item.grid, will_stay=True)
        await worker.encode(encode, job.media[item.key])
    params = msgspec.structs.replace(job.sampling, prompt_logprobs=4)
    message = GenerateRequest(job.request_id, job.token_ids, len(job.token_ids), params, ECTransferParams(job.items))
    events = [event async for event in worker.generate(message)]
    assert isinstance(events[-1], Finished)
    told: list[TokenLogprob] = []
    for event in events:
        if isinstance(event, PromptLogprobs):
            assert event.start == len(told) + 1
            told += event.tokens
    return told


@pytest.mark.parametrize("chunk", (1, 7, 64, 2048))
async def test_a_prompts_logprobs_are_those_of_transformers(chunk: int, oracle: Oracle, wanted: list[Wanted]):
    with_three = next(want for want in wanted if len(want.grids) == 3 and len(want.prompt) < 260)
    with_one = next(want for want in wanted if len(want.grids) == 1 and len(want.prompt) < 120)
    text = next(want for want in wanted if not want.grids)
    async with running_cluster("EPD1", chunk=chunk) as cluster:
        jobs = [job_of(f"r{index}", want, oracle.stop_ids) for index, want in enumerate((with_three, with_one, text))]
        answers = await asyncio.gather(*(prompt_logprobs_of(cluster, job) for job in jobs))
    for told, want in zip(answers, (with_three, with_one, text), strict=True):
        assert [token.token_id for token in told] == list(want.prompt[1:])
        # [prompt tokens, vocabulary]
        expected = torch.log_softmax(oracle.prompt_logits(want), dim=-1)
        own = expected[:-1].gather(1, torch.tensor(want.prompt[1:]).unsqueeze(1)).squeeze(1)
        assert [token.logprob for token in told] == pytest.approx(own.tolist(), abs=1e-3)
        for row, token in zip(expected, told, strict=False):
            assert [value for _, value in token.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)
