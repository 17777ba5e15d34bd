"""`ChatService`: one conversation in, text as it comes out. The router's routes and `LLM` both end up here."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import aiohttp

from triptych.errors import ContextOverflowError, DeadlineError, RequestError, TriptychError
from triptych.router.chat_sampling import ChatSampling
from triptych.router.choices import MAX_CHOICES, ChatDelta, ChoiceEnd, PromptLogprobList, jobs_of_choices, run_choices
from triptych.router.detokenizer import Detokenizer
from triptych.router.metrics import RouterMetrics
from triptych.router.pipeline import Pipeline
from triptych.router.pool import WorkerPool
from triptych.router.render import ChatMessage, RenderedPrompt, Renderer
from triptych.router.running_request import GenerateJob
from triptych.router.timing import Stopwatch, Timing

CLIENT_LEFT = 499  # nginx's word for it; only metrics see it


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Raises `RequestError` for an `n` out of range."""

    messages: tuple[ChatMessage, ...]
    sampling: ChatSampling = ChatSampling()
    n: int = 1  # answers
    stop: tuple[str, ...] = ()
    priority: int = 0
    cache_salt: str = ""  # requests with different salts share no embeddings

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES:
            raise RequestError(f"n is {self.n}; it must be at least 1 and at most {MAX_CHOICES}.", param="n")

    @property
    def has_media(self) -> bool:
        return any(message.media for message in self.messages)


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """`num_completion_tokens`: of all choices. `num_rows`: those of the prompt's tokens that stand for media, by modality.
    `num_cached_tokens`: those that needed not be computed, for any of the choices."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_rows: dict[str, int]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ChatEnd:
    """All choices are whole. `timing` is that of the one which ended last."""

    usage: ChatUsage
    timing: Timing
    prompt_logprobs: PromptLogprobList | None


ChatPart = ChatDelta | ChoiceEnd | ChatEnd


class ChatService:
    """`session` fetches pictures from the web; it is not closed here."""

    def __init__(
        self,
        renderer: Renderer,
        pipeline: Pipeline,
        pool: WorkerPool,
        metrics: RouterMetrics,
        session: aiohttp.ClientSession,
        *,
        max_model_len: int,
        vocab_size: int,
        request_timeout_s: float,
    ) -> None:
        self.renderer = renderer
        self._pipeline = pipeline
        self._pool = pool
        self._metrics = metrics
        self._session = session
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._request_timeout_s = request_timeout_s

    async def answer(self, chat: ChatRequest) -> AsyncGenerator[ChatPart]:
        """Of each choice deltas and a `ChoiceEnd`, then one `ChatEnd`; or a `TriptychError`. Closing it early aborts the request. Counts it
        once, whatever its end; its outcome is that of the choice which ended last."""
        status, outcome, finish_reason = CLIENT_LEFT, "client_left", ""
        try:
            async with aclosing(self._answer(chat)) as answer:
                async for part in answer:
                    if isinstance(part, ChatEnd):
                        status, outcome = 200, finish_reason
                    elif isinstance(part, ChoiceEnd):
                        finish_reason = part.finish_reason
                    yield part
        except TriptychError as error:
            status, outcome = error.status, error.type
            raise
        finally:
            self._metrics.requests.labels(outcome, str(status)).inc()

    async def _answer(self, chat: ChatRequest) -> AsyncGenerator[ChatPart]:
        stopwatch = Stopwatch()
        ends: list[ChoiceEnd] = []
        num_tokens = 0
        async with self._pipeline.admitted(chat.n):
            prompt = await self._render(chat, stopwatch)
            jobs = jobs_of_choices(self._make_job(chat, prompt), chat.n)
            stopwatches = [stopwatch, *(stopwatch.fork() for _ in jobs[1:])]
            make_detokenizer = partial(Detokenizer, self.renderer.tokenizer, chat.stop, chat.sampling.min_tokens)
            choices = run_choices(self._pipeline, list(zip(jobs, stopwatches, strict=True)), make_detokenizer)
            async with aclosing(choices) as parts:
                async for part in parts:
                    if isinstance(part, ChoiceEnd):
                        ends.append(part)
                    else:
                        num_tokens += len(part.tokens)
                    yield part
            first = min(ends, key=lambda end: end.index)
            num_cached = min(end.num_cached_tokens for end in ends)  # what one of n computes, the others find
            usage = ChatUsage(len(prompt.token_ids), num_tokens, prompt.num_rows, num_cached)
            self._count(stopwatches, usage)
        yield ChatEnd(usage, ends[-1].timing, first.prompt_logprobs)

    async def _render(self, chat: ChatRequest, stopwatch: Stopwatch) -> RenderedPrompt:
        if chat.has_media and not self._pool.takes_media:
            raise RequestError(
                "this server has no encode worker and takes text only; start it with --encode 1 (or a role with E) to send media.",
                param="messages",
            )
        try:
            async with asyncio.timeout(self._request_timeout_s - stopwatch.elapsed_s):
                return await self.renderer.render(
                    chat.messages, self._session, dtype=self._pool.dtype, tenant_salt=chat.cache_salt
                )
        except TimeoutError:
            message = (
                f"the request did not end within {self._request_timeout_s:g} s; it was waiting for its prompt to be rendered."
            )
            raise DeadlineError(message) from None

    def _make_job(self, chat: ChatRequest, prompt: RenderedPrompt) -> GenerateJob:
        """Raises what is wrong with the request before any worker hears of it."""
        num_prompt = len(prompt.token_ids)
        self._check_items(prompt)
        sampling = chat.sampling.to_params(
            self.renderer.sampling_defaults,
            self.renderer.eos_token_ids,
            room=self._room(num_prompt, chat.sampling.max_tokens),
            vocab_size=self._vocab_size,
        )
        return GenerateJob(
            f"req-{uuid4().hex}",
            prompt.token_ids,
            sampling,
            prompt.items,
            dict(prompt.media),
            priority=chat.priority,
            cache_salt=chat.cache_salt,
        )

    def _room(self, num_prompt: int, max_tokens: int | None) -> int:
        """Tokens that may follow the prompt, by the model's context and the workers' KV caches."""
        limits = self._pool.limits()
        context = min(self._max_model_len, limits.max_model_len)
        wanted = num_prompt + max(1, max_tokens or 1)
        if wanted > context:
            raise ContextOverflowError(
                f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens or 'not set'}: "
                f"together at least {wanted}, more than the model's context of {context} tokens."
            )
        if wanted > limits.kv_cache_tokens:
            raise ContextOverflowError(
                f"the request needs {wanted} tokens, but a worker's KV cache holds {limits.kv_cache_tokens}; raise --kv-cache-mib."
            )
        return min(context, limits.kv_cache_tokens) - num_prompt

    def _check_items(self, prompt: RenderedPrompt) -> None:
        capacity = self._pool.limits().encoder_cache_rows
        for item in prompt.items:
            if item.num_rows > capacity:
                raise RequestError(
                    f"an {item.modality} has {item.num_rows} rows, but a worker's encoder cache holds {capacity}; "
                    "raise --encoder-cache-rows or send a smaller one.",
                    param="messages",
                )

    def _count(self, stopwatches: Sequence[Stopwatch], usage: ChatUsage) -> None:
        """The request's first token is the first of any choice."""
        to_first_token_s = [each.to_first_token_s for each in stopwatches if each.to_first_token_s is not None]
        if to_first_token_s:
            self._metrics.ttft.observe(min(to_first_token_s))
        self._metrics.e2e.observe(stopwatches[0].elapsed_s)
        self._metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        self._metrics.completion_tokens.inc(usage.num_completion_tokens)
