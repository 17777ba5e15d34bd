"""`ChatService`: one conversation in, text as it comes out. The router's routes and `LLM` both end up here."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from uuid import uuid4

import aiohttp

from triptych.errors import ContextOverflowError, DeadlineError, RequestError, TriptychError
from triptych.output import TokenLogprob
from triptych.router.detokenizer import Detokenizer
from triptych.router.metrics import RouterMetrics
from triptych.router.pipeline import Pipeline
from triptych.router.pool import WorkerPool
from triptych.router.render import ChatMessage, RenderedPrompt, Renderer
from triptych.router.running_request import GenerateJob, RunningRequest
from triptych.router.timing import Stopwatch, Timing
from triptych.sampling_params import SamplingParams, StructuredOutput

CLIENT_LEFT = 499  # nginx's word for it; only metrics see it


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """None takes the model's own default."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token
    priority: int = 0
    cache_salt: str = ""  # requests with different salts share no embeddings
    structured_output: StructuredOutput | None = None

    @property
    def has_media(self) -> bool:
        return any(message.media for message in self.messages)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """`text` may be empty while it is held back."""

    text: str
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """`num_rows`: those of the prompt's tokens that stand for media, by modality."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_rows: dict[str, int]


@dataclass(frozen=True, slots=True)
class ChatEnd:
    finish_reason: str  # "stop" or "length"
    usage: ChatUsage
    timing: Timing


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
        request_timeout_s: float,
    ) -> None:
        self.renderer = renderer
        self._pipeline = pipeline
        self._pool = pool
        self._metrics = metrics
        self._session = session
        self._max_model_len = max_model_len
        self._request_timeout_s = request_timeout_s

    async def answer(self, chat: ChatRequest) -> AsyncGenerator[ChatDelta | ChatEnd]:
        """Deltas, then one `ChatEnd`; or a `TriptychError`. Closing it early aborts the request. Counts it once, whatever its end."""
        status, outcome = CLIENT_LEFT, "client_left"
        try:
            async with aclosing(self._answer(chat)) as answer:
                async for part in answer:
                    if isinstance(part, ChatEnd):
                        status, outcome = 200, part.finish_reason
                    yield part
        except TriptychError as error:
            status, outcome = error.status, error.type
            raise
        finally:
            self._metrics.requests.labels(outcome, str(status)).inc()

    async def _answer(self, chat: ChatRequest) -> AsyncGenerator[ChatDelta | ChatEnd]:
        stopwatch = Stopwatch()
        async with self._pipeline.admitted():
            prompt = await self._render(chat, stopwatch)
            job = self._make_job(chat, prompt)
            async with self._pipeline.run(job, stopwatch) as running:
                detokenizer = Detokenizer(self.renderer.tokenizer, chat.stop, chat.min_tokens)
                num_tokens = 0
                async with aclosing(read_deltas(running, detokenizer)) as deltas:
                    async for delta in deltas:
                        num_tokens += len(delta.tokens)
                        yield delta
                reason = "stop" if detokenizer.is_stopped else running.finish_reason
                end = ChatEnd(reason, ChatUsage(len(prompt.token_ids), num_tokens, prompt.num_rows), stopwatch.timing())
                self._count(stopwatch, end.usage)
        yield end

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
        room = self._room(num_prompt, chat.max_tokens)
        defaults = self.renderer.sampling_defaults
        sampling = SamplingParams(
            max_tokens=room if chat.max_tokens is None else chat.max_tokens,
            seed=secrets.randbits(53) if chat.seed is None else chat.seed % 2**63,
            temperature=defaults.temperature if chat.temperature is None else chat.temperature,
            top_p=defaults.top_p if chat.top_p is None else chat.top_p,
            top_k=defaults.top_k if chat.top_k is None else chat.top_k,
            min_tokens=chat.min_tokens,
            stop_token_ids=chat.stop_token_ids + (() if chat.ignore_eos else self.renderer.eos_token_ids),
            logprobs=chat.logprobs,
            structured_output=chat.structured_output,
        )
        sampling.check()
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

    def _count(self, stopwatch: Stopwatch, usage: ChatUsage) -> None:
        if stopwatch.to_first_token_s is not None:
            self._metrics.ttft.observe(stopwatch.to_first_token_s)
        self._metrics.e2e.observe(stopwatch.elapsed_s)
        self._metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        self._metrics.completion_tokens.inc(usage.num_completion_tokens)


async def read_deltas(running: RunningRequest, detokenizer: Detokenizer) -> AsyncGenerator[ChatDelta]:
    """What came of each batch of tokens. A stop string ends it: nothing behind it is read."""
    async with aclosing(running.tokens()) as batches:
        async for batch in batches:
            texts: list[str] = []
            for token in batch:
                texts.append(detokenizer.add(token.token_id))
                if detokenizer.is_stopped:
                    break
            yield ChatDelta("".join(texts), batch[: len(texts)])
            if detokenizer.is_stopped:
                return
    rest = detokenizer.flush()
    if rest:
        yield ChatDelta(rest, ())
