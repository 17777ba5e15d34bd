"""The n answers to one prompt: n jobs side by side, read as one stream.

Choice i is sampled with the request's seed plus i: it is the answer that a request with that seed gets alone. All start together, so that
their pictures are encoded once (shared_encodes.py), and a prefill worker that has several of them computes their prompt once (its prefix
cache). They end as one: the error of one is the error of all, and who leaves, leaves all.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec

from triptych.errors import InternalError
from triptych.output import TokenLogprob
from triptych.router.detokenizer import Detokenizer
from triptych.router.pipeline import Pipeline
from triptych.router.running_request import GenerateJob, RunningRequest
from triptych.router.timing import Stopwatch, Timing

MAX_CHOICES = 128  # OpenAI's

PromptLogprobList = tuple[TokenLogprob | None, ...]  # one per token of the prompt; None for the first, which has none before it


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What is new in choice `index`. `text` may be empty while it is held back."""

    text: str
    tokens: tuple[TokenLogprob, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Choice `index` is whole. `timing` is its own, from the request's arrival to its end."""

    index: int
    finish_reason: str  # "stop" or "length"
    timing: Timing
    num_cached_tokens: int  # of the prompt
    prompt_logprobs: PromptLogprobList | None  # None if they were not asked for


@dataclass(slots=True)
class WholeChoice:
    """A choice, put together from its parts."""

    texts: list[str] = field(default_factory=list[str])
    tokens: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str = ""

    def add(self, part: ChatDelta | ChoiceEnd) -> None:
        if isinstance(part, ChoiceEnd):
            self.finish_reason = part.finish_reason
        else:
            self.texts.append(part.text)
            self.tokens += part.tokens

    @property
    def text(self) -> str:
        return "".join(self.texts)


def jobs_of_choices(job: GenerateJob, count: int) -> list[GenerateJob]:
    """`job`, and its like with the seeds that follow. The prompt's log-probabilities are the same for all: the first is asked for them."""

    def make(index: int) -> GenerateJob:
        seed = (job.sampling.seed + index) % 2**63
        sampling = msgspec.structs.replace(job.sampling, seed=seed, prompt_logprobs=None)
        return replace(job, request_id=f"{job.request_id}.{index}", sampling=sampling)

    return [job, *(make(index) for index in range(1, count))]


async def run_choices(
    pipeline: Pipeline, jobs: Sequence[tuple[GenerateJob, Stopwatch]], make_detokenizer: Callable[[], Detokenizer]
) -> AsyncGenerator[ChatDelta | ChoiceEnd]:
    """The parts of all choices as they come: of each, deltas, then its end. Raises the first error of any, once the others are aborted;
    closing it aborts all."""
    parts: asyncio.Queue[ChatDelta | ChoiceEnd | Exception] = asyncio.Queue()

    async def run(index: int, job: GenerateJob, stopwatch: Stopwatch) -> None:
        try:
            async with pipeline.run(job, stopwatch) as running:
                detokenizer = make_detokenizer()
                async with aclosing(read_deltas(running, detokenizer, index)) as deltas:
                    async for delta in deltas:
                        parts.put_nowait(delta)
                end = _make_end(index, running, detokenizer)
            parts.put_nowait(end)
        except Exception as error:  # the edge of the choice's task: who reads the parts raises it
            parts.put_nowait(error)

    tasks = [asyncio.create_task(run(index, *job)) for index, job in enumerate(jobs)]
    try:
        num_left = len(tasks)
        while num_left:
            part = await parts.get()
            if isinstance(part, Exception):
                raise part
            num_left -= isinstance(part, ChoiceEnd)
            yield part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_deltas(running: RunningRequest, detokenizer: Detokenizer, index: int = 0) -> AsyncGenerator[ChatDelta]:
    """What came of each batch of tokens. A stop string ends it: nothing behind it is read."""
    async with aclosing(running.tokens()) as batches:
        async for batch in batches:
            texts: list[str] = []
            for token in batch:
                texts.append(detokenizer.add(token.token_id))
                if detokenizer.is_stopped:
                    break
            yield ChatDelta("".join(texts), batch[: len(texts)], index)
            if detokenizer.is_stopped:
                return
    rest = detokenizer.flush()
    if rest:
        yield ChatDelta(rest, (), index)


def _make_end(index: int, running: RunningRequest, detokenizer: Detokenizer) -> ChoiceEnd:
    return ChoiceEnd(
        index,
        "stop" if detokenizer.is_stopped else running.finish_reason,
        running.stopwatch.timing(),
        running.num_cached_tokens,
        None if running.job.sampling.prompt_logprobs is None else _prompt_logprobs(running),
    )


def _prompt_logprobs(running: RunningRequest) -> PromptLogprobList:
    """Raises `InternalError` if a worker has left some out."""
    places = range(1, len(running.job.token_ids))
    missing = [place for place in places if place not in running.prompt_logprobs]
    if missing:
        raise InternalError(f"no worker sent the log-probability of token {missing[0]} of the prompt.")
    return (None, *(running.prompt_logprobs[place] for place in places))
