"""OpenAI's chat completions as we take and answer them. What we don't know is refused by name, never ignored.

Beyond OpenAI, as in vLLM: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`, `prompt_logprobs`, `priority`,
`cache_salt`, `structured_outputs` in, `prompt_logprobs` out. Our own: `timing` out (milliseconds by stage, and counts; see timing.py).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from triptych.errors import RequestError, suggest
from triptych.router.chat import ChatRequest
from triptych.router.chat_sampling import ChatSampling
from triptych.router.render import ChatMessage, MediaPart, Part, TextPart
from triptych.router.response_format import to_structured_output

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_ID_LENGTH = 256
MAX_BIASES = 1024

# OpenAI's (and vLLM's) fields that ask for something Triptych does not do: accepted only with a value that asks for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
    "mm_processor_kwargs": (None, {}),
}

# Notes that a client makes for itself: they change nothing, whatever they say.
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier")


class _Strict(BaseModel):
    """As OpenAI: a number in quotes is no number, and neither is `true`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ImageURL(_Strict):
    """`detail` and `uuid` change nothing: every picture is taken at the model's own resolution and known by its content."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    uuid: Annotated[str, Field(max_length=MAX_ID_LENGTH)] | None = None


class MediaURL(_Strict):
    url: str


class InputAudio(_Strict):
    data: str
    format: str


class TextContent(_Strict):
    type: Literal["text"]
    text: str


class ImageContent(_Strict):
    type: Literal["image_url"]
    image_url: ImageURL
    uuid: Annotated[str, Field(max_length=MAX_ID_LENGTH)] | None = None


class VideoContent(_Strict):
    type: Literal["video_url"]
    video_url: MediaURL


class AudioContent(_Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio


ContentPart = Annotated[TextContent | ImageContent | VideoContent | AudioContent, Field(discriminator="type")]


class RequestMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Field(max_length=MAX_ID_LENGTH)] | None = None
    refusal: None = None
    tool_calls: None = None


class StreamOptions(_Strict):
    include_usage: bool = False


class SamplingFields(_Strict):
    """`max_completion_tokens` is another word for `max_tokens`. The shapes of `response_format` and `structured_outputs`, both APIs' ways to say
    what form the answer must have, are response_format.py's business."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: Any = None
    structured_outputs: Any = None

    def to_sampling(self) -> ChatSampling:
        return ChatSampling(
            max_tokens=self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_to_token_biases(self.logit_bias or {}),
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            structured_output=to_structured_output(self.response_format, self.structured_outputs),
        )


class ChatCompletionRequest(SamplingFields):
    """`model` may be left out; there is one."""

    model: str | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    user: Annotated[str, Field(max_length=MAX_ID_LENGTH)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0  # as in the workers' messages
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)] | None = None

    @classmethod
    def parse(cls, body: bytes) -> "ChatCompletionRequest":
        """Raises `RequestError`: one sentence that says where and what."""
        try:
            values = from_json(body)
        except ValueError as error:
            raise RequestError(f"the body is not valid JSON: {error}.") from None
        if not isinstance(values, dict):
            raise RequestError("the body must be a JSON object.")
        try:
            request = cls.model_validate(_without_neutral(values))
        except ValidationError as error:
            raise _to_request_error(error) from None
        request.check()
        return request

    def check(self) -> None:
        """What types cannot say."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise RequestError("max_tokens and max_completion_tokens say different things; send one of them.", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed; leave it out, or do not stream.", param="prompt_logprobs")
        if len(self.stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in self.stops):
            raise RequestError(f"stop takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters each.", param="stop")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def to_chat(self) -> ChatRequest:
        return ChatRequest(
            messages=tuple(_to_message(message) for message in self.messages),
            sampling=self.to_sampling(),
            n=1 if self.n is None else self.n,
            stop=self.stops,
            priority=self.priority,
            cache_salt=self.cache_salt or "",
        )


def _to_token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Raises `RequestError` for a key that is no token id."""
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise RequestError(f"logit_bias has the key '{name:.20}'; keys are token ids, such as '1234'.", param="logit_bias")
    return {int(name): bias for name, bias in biases.items()}


def _without_neutral(values: dict[str, Any]) -> dict[str, Any]:
    """Drop fields that ask for nothing; refuse those that we don't do, and unknown ones with the nearest known name."""
    known = ChatCompletionRequest.model_fields
    for name, value in values.items():
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise RequestError(f"{name} is not supported; leave it out.", param=name)
        if name not in known and name not in UNSUPPORTED and name not in IGNORED:
            raise RequestError(f"there is no field '{name}'; {suggest(name, known, otherwise='leave it out.')}", param=name)
    return {name: value for name, value in values.items() if name in known}


def _to_request_error(error: ValidationError) -> RequestError:
    """The deepest complaint: of a union, that is the branch which was meant."""
    worst: ErrorDetails = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
    where = ".".join(_as_sent(worst["loc"]))
    if worst["type"] == "extra_forbidden":
        return RequestError(f"there is no field '{where}'; leave it out.", param=where)
    return RequestError(f"{where}: {worst['msg'][0].lower()}{worst['msg'][1:]}.", param=where)


def _as_sent(loc: tuple[int | str, ...]) -> list[str]:
    """The path to a value as the client wrote it: without pydantic's names for a union's branches (`str`, `list[...]`, and
    a part's type, which stands behind the part's number)."""
    is_branch = [
        isinstance(step, str)
        and (step == "str" or "[" in step or (i >= 2 and isinstance(loc[i - 1], int) and "[" in str(loc[i - 2])))
        for i, step in enumerate(loc)
    ]
    return [str(step) for step, is_name_of_branch in zip(loc, is_branch, strict=True) if not is_name_of_branch]


def _to_message(message: RequestMessage) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    if message.content is None or isinstance(message.content, str):
        return ChatMessage(role, message.content or "")
    return ChatMessage(role, tuple(_to_part(part) for part in message.content))


def _to_part(part: TextContent | ImageContent | VideoContent | AudioContent) -> Part:
    match part:
        case TextContent():
            return TextPart(part.text)
        case ImageContent():
            return MediaPart("image", part.image_url.url)
        case VideoContent():
            return MediaPart("video", part.video_url.url)
        case AudioContent():
            return MediaPart("audio", f"data:audio/{part.input_audio.format};base64,{part.input_audio.data}")


# --- answers -------------------------------------------------------------------------------------------------------


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobEntry(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprobEntry]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    index: int = 0
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str


class PromptLogprob(BaseModel):
    """`rank`: 1 for the most probable token."""

    logprob: float
    rank: int
    decoded_token: str


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    timing: dict[str, float | int]


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int = 0
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timing: dict[str, float | int] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["triptych"] = "triptych"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
