"""Answers in a form that was asked for: always valid, and the same tokens in every layout."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from cluster import Answer, job_of, running_cluster
from oracle import MixedRequest, Oracle, Wanted
from tokenizers import Tokenizer

from triptych.demo import CHECKPOINT
from triptych.errors import RequestError
from triptych.router.running_request import GenerateJob
from triptych.router.timing import Stopwatch
from triptych.sampling_params import SamplingParams, StructuredOutput

NUM_SEEDS = 24
SCHEMA = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 40},
        "name": {"type": "string", "maxLength": 6},
        "is_red": {"type": "boolean"},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 3},
    },
    "required": ["shape", "size", "name", "is_red", "marks"],
    "additionalProperties": False,
}
PATTERN = r"(red|blue|green) (circle|square)s? [0-9]{1,4}(\.[0-9]{2})?"
CHOICES = ["red", "red circle", "a blue square", "größer", "7"]
BY_SCHEMA = StructuredOutput("json_schema", json.dumps(SCHEMA))
BY_PATTERN = StructuredOutput("regex", PATTERN)
BY_CHOICE = StructuredOutput("choice", json.dumps(CHOICES))
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def assert_has_schema(text: str) -> None:
    answer: dict[str, Any] = json.loads(text)
    assert list(answer) == ["shape", "size", "name", "is_red", "marks"]
    assert answer["shape"] in ("circle", "square")
    assert type(answer["size"]) is int
    assert 1 <= answer["size"] <= 40
    assert isinstance(answer["name"], str)
    assert len(answer["name"]) <= 6
    assert type(answer["is_red"]) is bool
    assert 2 <= len(answer["marks"]) <= 3
    assert all(type(mark) is int and 0 <= mark <= 9 for mark in answer["marks"])


@pytest.fixture(scope="module")
def question(oracle: Oracle) -> Wanted:
    return oracle.answer(MixedRequest([{"role": "user", "content": "what is it?"}], (), max_tokens=1, has_stop=True))


@pytest.fixture(scope="module")
def jobs(oracle: Oracle, question: Wanted) -> list[GenerateJob]:
    """Each form with each seed, at temperature 1, and between them requests that ask for none."""
    forms = (BY_SCHEMA, BY_PATTERN, BY_CHOICE, None)
    jobs: list[GenerateJob] = []
    for seed in range(NUM_SEEDS):
        for form in forms:
            sampling = SamplingParams(
                max_tokens=400 if form else 6, seed=seed, stop_token_ids=oracle.stop_ids, structured_output=form, logprobs=0
            )
            jobs.append(job_of(f"{form.kind if form else 'none'}-{seed}", question, (), sampling))
    return jobs


async def ask_all(layout: str, jobs: list[GenerateJob]) -> list[Answer]:
    async with running_cluster(layout, chunk=64) as cluster:
        answers = await asyncio.gather(*map(cluster.ask, jobs))
        await cluster.assert_nothing_is_held()
    return answers


@pytest.fixture(scope="module")
def reference(jobs: list[GenerateJob]) -> list[Answer]:
    return asyncio.run(ask_all("EPD1", jobs))


def test_every_answer_has_its_form_whatever_the_seed(jobs: list[GenerateJob], reference: list[Answer]) -> None:
    texts: dict[str, set[str]] = {"json_schema": set(), "regex": set(), "choice": set()}
    for job, answer in zip(jobs, reference, strict=True):
        form, text = job.sampling.structured_output, TOKENIZER.decode(answer.tokens)
        if form is None:
            continue
        texts[form.kind].add(text)
        if form == BY_SCHEMA:
            assert_has_schema(text)
        elif form == BY_PATTERN:
            assert re.fullmatch(PATTERN, text), text
        else:
            assert text in CHOICES
    assert min(len(texts["json_schema"]), len(texts["regex"])) > NUM_SEEDS / 2, "they are sampled, and not all the same"
    assert len(texts["choice"]) >= 2


@pytest.mark.parametrize("layout", ("E1PD1", "E1P1D1"))
async def test_a_seed_gives_the_same_tokens_in_every_layout(
    layout: str, jobs: list[GenerateJob], reference: list[Answer]
) -> None:
    answers = await ask_all(layout, jobs)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in reference]


async def test_a_neighbour_without_a_form_gets_what_it_gets_alone_and_logprobs_are_the_models_own(
    jobs: list[GenerateJob], reference: list[Answer], question: Wanted, oracle: Oracle
) -> None:
    plain = [place for place, job in enumerate(jobs) if job.sampling.structured_output is None]
    alone = await ask_all("EPD1", [jobs[place] for place in plain])
    assert [answer.tokens for answer in alone] == [reference[place].tokens for place in plain]
    chosen = next(place for place, job in enumerate(jobs) if job.sampling.structured_output == BY_CHOICE)
    first = reference[chosen].tokens[0]
    with torch.inference_mode():
        logits = oracle.model(input_ids=torch.tensor([question.prompt])).logits[0, -1]
    assert reference[chosen].logprobs[0] == pytest.approx(torch.log_softmax(logits.float(), -1)[first].item(), abs=1e-3)


@pytest.mark.parametrize("layout", ("EPD1", "E1P1D1"))
async def test_a_form_that_cannot_be_had_ends_its_own_request_with_a_400_and_is_not_tried_again(
    layout: str, jobs: list[GenerateJob], reference: list[Answer]
) -> None:
    """At once, if it is a mistake; after the tokens so far, if following it costs too much."""
    ambiguous = StructuredOutput("grammar", 'start: s\ns: s s | s s s | "a" | "b"')
    async with running_cluster(layout, chunk=64) as cluster:
        tasks = [asyncio.create_task(cluster.ask(job)) for job in jobs[:4]]
        for form in (StructuredOutput("regex", "a("), ambiguous):
            sampling = msgspec.structs.replace(jobs[0].sampling, structured_output=form, stop_token_ids=())
            stopwatch = Stopwatch()
            with pytest.raises(RequestError, match=f"the {form.kind} cannot be used: "):
                async with cluster.pipeline.run(replace(jobs[0], request_id=form.kind, sampling=sampling), stopwatch) as running:
                    async for _ in running.tokens():
                        pass
            assert stopwatch.num_replays == 0
        assert [(await task).tokens for task in tasks] == [answer.tokens for answer in reference[:4]]
        await cluster.assert_nothing_is_held()


@pytest.mark.parametrize("layout", ("EPD1", "P1D1"))
async def test_a_complete_answer_ends_with_stop_whatever_min_tokens_and_ignore_eos_say(
    layout: str, question: Wanted, oracle: Oracle
) -> None:
    async with running_cluster(layout, chunk=64) as cluster:
        for stop_ids in ((), oracle.stop_ids):
            for pattern, num_tokens in (("red circle", 2), ("x", 1), ("", 0)):
                form = StructuredOutput("regex", pattern)
                sampling = SamplingParams(max_tokens=30, min_tokens=20, stop_token_ids=stop_ids, structured_output=form)
                job = job_of(f"{pattern[:1]}-{len(stop_ids)}", question, (), sampling)
                tokens: list[int] = []
                async with cluster.pipeline.run(job, Stopwatch()) as running:
                    async for batch in running.tokens():
                        tokens += [token.token_id for token in batch]
                    assert running.finish_reason == "stop"
                assert TOKENIZER.decode(tokens) == pattern
                assert num_tokens <= len(tokens) <= len(pattern)
        await cluster.assert_nothing_is_held()
