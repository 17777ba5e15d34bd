"""`answer_as_chunks`: an answer as server-sent events, and what comes after the first byte when something goes wrong."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from pydantic import BaseModel

from triptych.errors import TriptychError
from triptych.http_server import error_body
from triptych.output import TokenLogprob
from triptych.router.chat import ChatDelta, ChatEnd, ChatUsage
from triptych.router.prompt_tokenizer import PromptTokenizer
from triptych.router.protocol import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprobEntry,
    TopLogprob,
    Usage,
)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is the same in all chunks of an answer. `wants_logprobs` and `wants_usage` as the client asked."""

    id: str
    created: int
    model: str
    tokenizer: PromptTokenizer
    wants_logprobs: bool = False
    wants_usage: bool = False

    def logprobs(self, tokens: Iterable[TokenLogprob]) -> ChoiceLogprobs | None:
        return _to_logprobs(tokens, self.tokenizer) if self.wants_logprobs else None

    def chunk(self, delta: Delta, tokens: Iterable[TokenLogprob] = (), end: ChatEnd | None = None) -> bytes:
        choice = ChunkChoice(
            delta=delta,
            logprobs=self.logprobs(tokens) if end is None else None,
            finish_reason=end.finish_reason if end is not None else None,
        )
        return _event(
            ChatCompletionChunk(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=[choice],
                timing=end.timing.to_dict() if end is not None else None,
            )
        )


async def answer_as_chunks(
    head: AnswerHead, first: ChatDelta | ChatEnd, rest: AsyncGenerator[ChatDelta | ChatEnd]
) -> AsyncGenerator[bytes]:
    """The role first, then text, then the finish reason (and the usage), then `[DONE]`. An error is an event, then `[DONE]`."""
    yield head.chunk(Delta(role="assistant", content=""))
    try:
        for event in _events(head, first):
            yield event
        async for part in rest:
            for event in _events(head, part):
                yield event
    except TriptychError as error:
        yield b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"
    finally:
        await rest.aclose()
    yield DONE


def _events(head: AnswerHead, part: ChatDelta | ChatEnd) -> list[bytes]:
    if isinstance(part, ChatDelta):
        if not part.text and not head.wants_logprobs:
            return []
        return [head.chunk(Delta(content=part.text), part.tokens)]
    events = [head.chunk(Delta(), end=part)]
    if head.wants_usage:
        usage = to_usage(part.usage)
        events.append(_event(ChatCompletionChunk(id=head.id, created=head.created, model=head.model, choices=[], usage=usage)))
    return events


async def answer_in_one(
    head: AnswerHead, first: ChatDelta | ChatEnd, rest: AsyncGenerator[ChatDelta | ChatEnd]
) -> ChatCompletion:
    """The whole answer at its end."""
    texts: list[str] = []
    tokens: list[TokenLogprob] = []
    part = first
    async with aclosing(rest):
        while isinstance(part, ChatDelta):
            texts.append(part.text)
            tokens += part.tokens
            part = await anext(rest)
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[
            Choice(
                message=AnswerMessage(content="".join(texts)),
                logprobs=head.logprobs(tokens),
                finish_reason=part.finish_reason,
            )
        ],
        usage=to_usage(part.usage),
        timing=part.timing.to_dict(),
    )


def to_usage(usage: ChatUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
        prompt_tokens_details={f"{modality}_tokens": count for modality, count in usage.num_rows.items()},
    )


def _to_logprobs(tokens: Iterable[TokenLogprob], tokenizer: PromptTokenizer) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        content=[
            TokenLogprobEntry(
                **_named(token.token_id, token.logprob, tokenizer).model_dump(),
                top_logprobs=[_named(token_id, logprob, tokenizer) for token_id, logprob in token.top],
            )
            for token in tokens
        ]
    )


def _named(token_id: int, logprob: float, tokenizer: PromptTokenizer) -> TopLogprob:
    """Minus infinity is not JSON; -9999 stands for it, as in OpenAI's answers. A token that is part of a character has no bytes of its own here."""
    text = tokenizer.token_text(token_id)
    return TopLogprob(token=text, logprob=max(logprob, -9999.0), bytes=None if "\ufffd" in text else list(text.encode()))


def _event(message: BaseModel) -> bytes:
    return b"data: " + message.model_dump_json().encode() + b"\n\n"
