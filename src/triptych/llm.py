"""`LLM`: the engine as a Python object. One worker in this process does everything, behind the router's own rendering and pipeline."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, fields
from io import BytesIO
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self, TypeGuard, TypeVar, cast, overload

from PIL import Image

from triptych.config import ClusterLayout, EngineConfig, Role
from triptych.errors import ConfigError, RequestError, suggest
from triptych.launch.options import resolve_device
from triptych.launch.settings import SETTINGS, sections_from
from triptych.models.inspect import resolve_model
from triptych.models.layout.registry import get_layout_adapter
from triptych.output import TokenLogprob
from triptych.router.chat import ChatEnd, ChatRequest, ChatUsage
from triptych.router.chat_sampling import ChatSampling
from triptych.router.choices import MAX_CHOICES, PromptLogprobList, WholeChoice
from triptych.router.options import RouterOptions
from triptych.router.render import ChatMessage, MediaPart, Part, TextPart
from triptych.router.response_format import to_structured_output
from triptych.router.serving import Serving, open_serving
from triptych.worker.worker import Worker

T = TypeVar("T")
Conversation = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One answer. `logprobs` has one entry per token if they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The `n` answers to a conversation; `text` and its like are the first one's. `timing` is in milliseconds by stage, and counts (see
    router/timing.py), of the answer that was whole last. `prompt_logprobs`, if they were asked for, has one entry per token of the prompt."""

    choices: tuple[ChatChoice, ...]
    usage: ChatUsage
    timing: dict[str, float]
    prompt_logprobs: PromptLogprobList = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs


class LLM:
    """A model that is ready when the constructor returns.

    `model` is "demo", a folder, or a name on the Hugging Face hub; `settings` are those of `triptych serve`, with underscores
    (`kv_cache_mib=256`, `max_num_seqs=8`). Raises `ConfigError` for what cannot work. Use it as a context manager, or `close` it.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        request_timeout_s: float = 600.0,
        **settings: Any,
    ) -> None:
        sections = _sections(settings)
        resolved = resolve_model(
            model, dtype=dtype, max_model_len=max_model_len, device=resolve_device(sections["device"].device)
        )
        role = Role.parse("EPD" if get_layout_adapter(resolved.path).placeholders else "PD")
        config = EngineConfig(model=resolved, role=role, **sections)
        self._loop = _LoopThread()
        self._resources = AsyncExitStack()
        try:
            worker = Worker(config)
            self._serving = self._loop.run(self._open(config, worker, request_timeout_s))
        except BaseException:
            self.close()
            raise
        self._places = asyncio.Semaphore(_max_in_flight(config))
        self._door = asyncio.Lock()

    async def _open(self, config: EngineConfig, worker: Worker, request_timeout_s: float) -> Serving:
        self._resources.push_async_callback(worker.close)
        options = RouterOptions(
            model=config.model,
            layout=ClusterLayout(((config.role, 1),)),
            media=config.media,
            max_in_flight=_max_in_flight(config),
            request_timeout_s=request_timeout_s,
            worker_wait_s=0.0,
        )
        serving = await self._resources.enter_async_context(open_serving(options))
        serving.pool.join(worker)
        return serving

    @overload  # a string is a sequence of strings, too; the first overload is meant
    def chat(self, messages: Conversation, **sampling: Any) -> ChatOutput: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def chat(self, messages: Sequence[Conversation], **sampling: Any) -> list[ChatOutput]: ...
    def chat(self, messages: Conversation | Sequence[Conversation], **sampling: Any) -> ChatOutput | list[ChatOutput]:
        """Answer one conversation (a list of messages, or a string for one user message), or each of a list of them, batched.

        Messages are as in OpenAI's API; a part may also be `{"type": "image", "image": a PIL image}`. `sampling` are the
        fields of `ChatRequest` and `ChatSampling`: n, max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, logit_bias, seed, stop, stop_token_ids, min_tokens, ignore_eos, logprobs, prompt_logprobs, priority, cache_salt;
        and `response_format` or `structured_outputs`, as over HTTP.
        Raises `RequestError` for the caller's mistakes, and the other errors of errors.py; of a list, the first error ends all.
        """
        if not _is_list(messages) and not isinstance(messages, str):
            raise RequestError(
                f"messages is {_shown(messages)}; it must be a string, a list of messages or a list of conversations."
            )
        if _is_conversation(messages):
            return self._loop.run(self._answer(_to_request(messages, sampling)))
        return self._loop.run(
            self._answer_all([_to_request(conversation, sampling) for conversation in cast(Sequence[Conversation], messages)])
        )

    async def _answer_all(self, requests: Sequence[ChatRequest]) -> list[ChatOutput]:
        tasks = [asyncio.create_task(self._answer(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: ChatRequest) -> ChatOutput:
        choices = [WholeChoice() for _ in range(request.n)]
        async with AsyncExitStack() as places, aclosing(self._serving.chat.answer(request)) as answer:
            async with self._door:  # one at a time, so that no two wait for each other's places
                for _ in choices:
                    await places.enter_async_context(self._places)
            async for part in answer:
                if isinstance(part, ChatEnd):
                    return ChatOutput(
                        choices=tuple(
                            _to_choice(choice, has_logprobs=request.sampling.logprobs is not None) for choice in choices
                        ),
                        usage=part.usage,
                        timing=part.timing.to_dict(),
                        prompt_logprobs=part.prompt_logprobs or (),
                    )
                choices[part.index].add(part)
        raise AssertionError("an answer ends with a ChatEnd or an error")

    def close(self) -> None:
        """Stop the worker and give its memory back. A second call does nothing."""
        if self._loop.is_open:
            self._loop.run(self._resources.aclose())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LoopThread:
    """An event loop in a thread of its own, so that plain code can wait for coroutines, also from within another loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="triptych-llm", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Ctrl-C while waiting cancels the work. Raises `RequestError` once it is closed."""
        if not self.is_open:
            work.close()  # else Python warns that nobody awaited it
            raise RequestError("this LLM is closed; make a new one.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _max_in_flight(config: EngineConfig) -> int:
    """Twice what runs at once: the next requests are rendered and encoded meanwhile. At least as many as one conversation may ask for."""
    return max(2 * config.scheduler.max_num_seqs, MAX_CHOICES)


def _to_choice(choice: WholeChoice, *, has_logprobs: bool) -> ChatChoice:
    return ChatChoice(
        choice.text,
        tuple(token.token_id for token in choice.tokens),
        choice.finish_reason,
        tuple(choice.tokens) if has_logprobs else (),
    )


def _sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    known = [setting.name for setting in SETTINGS]
    for name in settings:
        if name not in known:
            raise ConfigError(f"LLM has no setting '{name}'; {suggest(name, known, otherwise='see triptych serve --help.')}")
    return sections_from(settings)


def _is_conversation(messages: Conversation | Sequence[Conversation]) -> TypeGuard[Conversation]:
    return isinstance(messages, str) or all(isinstance(each, Mapping) for each in messages)


def _to_request(messages: Conversation, sampling: Mapping[str, Any]) -> ChatRequest:
    forms = ("response_format", "structured_outputs")
    of_sampling = [each.name for each in fields(ChatSampling) if each.name != "structured_output"]
    known = [*of_sampling, *forms, *(each.name for each in fields(ChatRequest) if each.name not in ("messages", "sampling"))]
    for name in sampling:
        if name not in known:
            raise RequestError(f"there is no '{name}'; {suggest(name, known)}")
    values = {name: _to_value(name, value) for name, value in sampling.items() if name not in (*of_sampling, *forms)}
    values["sampling"] = ChatSampling(
        **{name: _to_value(name, value) for name, value in sampling.items() if name in of_sampling},
        structured_output=to_structured_output(*map(sampling.get, forms)),
    )
    if isinstance(messages, str):
        return ChatRequest((ChatMessage("user", messages),), **values)
    if not _is_list(messages):
        raise RequestError(f"a conversation is {_shown(messages)}; it must be a string or a list of messages.")
    if not messages:
        raise RequestError("a conversation is an empty list; it must have at least one message.")
    return ChatRequest(tuple(_to_message(message) for message in messages), **values)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Strings and bytes are sequences of what nobody means."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _shown(value: object) -> str:
    return f"{value!r:.60} (of type {type(value).__name__})"


def _to_value(name: str, value: Any) -> Any:
    """One of the fields of `ChatRequest` or `ChatSampling`, with its type checked; ranges are `SamplingParams`' business."""
    match name:
        case "stop":
            texts = (value,) if isinstance(value, str) else () if value is None else value
            if _is_list(texts) and all(isinstance(text, str) and text for text in texts):
                return tuple(texts)
            wanted = "a string or a list of strings, none of them empty"
        case "stop_token_ids":
            ids = () if value is None else value
            if _is_list(ids) and all(_is_integer(each) for each in ids):
                return tuple(int(each) for each in ids)
            wanted = "a list of integers"
        case "ignore_eos":
            if isinstance(value, bool):
                return value
            wanted = "True or False"
        case "cache_salt":
            if value is None or isinstance(value, str):
                return value or ""
            wanted = "a string"
        case "temperature" | "top_p" | "min_p" | "repetition_penalty" | "presence_penalty" | "frequency_penalty":
            if value is None or _is_number(value):
                return value if value is None or isinstance(value, int) else float(value)  # a large integer would overflow
            wanted = "a number"
        case "logit_bias":
            biases: Any = {} if value is None else value
            if isinstance(biases, Mapping) and all(_is_integer(key) and _is_number(bias) for key, bias in biases.items()):
                return {int(key): bias if isinstance(bias, int) else float(bias) for key, bias in biases.items()}
            wanted = "a dict from token ids to numbers"
        case _:
            if value is None and name not in ("n", "min_tokens", "priority"):
                return None
            if _is_integer(value):
                return int(value)
            wanted = "an integer"
    raise RequestError(f"{name} is {_shown(value)}; it must be {wanted}.", param=name)


def _is_number(value: object) -> TypeGuard[Real]:
    return not isinstance(value, bool) and isinstance(value, Real)


def _is_integer(value: object) -> TypeGuard[Integral]:
    """NumPy's count, booleans don't."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def _to_message(message: Mapping[str, Any]) -> ChatMessage:
    if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # the caller may not check types
        raise RequestError(f"a message is {_shown(message)}; it must be a dict with 'role' and 'content'.")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise RequestError(f"a message's role is {role!r}; it must be 'system', 'user' or 'assistant'.")
    if isinstance(content, str):
        return ChatMessage(role, content)
    if not isinstance(content, Sequence):
        raise RequestError(f"a message's content is a {type(content).__name__}; it must be a string or a list of parts.")
    return ChatMessage(role, tuple(_to_part(part) for part in content))


def _to_part(part: Any) -> Part:
    match part:
        case str():
            return TextPart(part)
        case {"type": "text", "text": str(text)}:
            return TextPart(text)
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image", "image": str(url)}:
            return MediaPart("image", url)
        case {"type": "image", "image": bytes(data)}:
            return MediaPart("image", data)
        case {"type": "image", "image": Image.Image() as image}:
            return MediaPart("image", _to_png(image))
        case _:
            raise RequestError(
                "a part of a message is none of {'type': 'text', 'text': ...}, {'type': 'image', 'image': a PIL image, bytes or URL} "
                "and {'type': 'image_url', 'image_url': {'url': ...}}."
            )


def _to_png(image: Image.Image) -> bytes:
    """Lossless. Modes that PNG has not got (CMYK, HSV ...) become RGB, as they would in the processor."""
    buffer = BytesIO()
    keeps = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    (image if keeps else image.convert("RGB")).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
