"""`answer_as_chunks` and `answer_in_one`: an answer as server-sent events, also when something goes wrong after the first byte; or as one object."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from pydantic import BaseModel

from triptych.errors import TriptychError
from triptych.http_server import error_body
from triptych.output import MIN_LOGPROB, TokenLogprob
from triptych.router.chat import ChatEnd, ChatPart, ChatUsage
from triptych.router.choices import ChatDelta, ChoiceEnd, PromptLogprobList, WholeChoice
from triptych.router.prompt_tokenizer import PromptTokenizer
from triptych.router.protocol import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    PromptLogprob,
    TokenLogprobEntry,
    TopLogprob,
    Usage,
)
from triptych.router.timing import Timing

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
    num_choices: int = 1

    def logprobs(self, tokens: Iterable[TokenLogprob]) -> ChoiceLogprobs | None:
        return _to_logprobs(tokens, self.tokenizer) if self.wants_logprobs else None

    def chunk(self, choice: ChunkChoice | None, *, usage: Usage | None = None, timing: Timing | None = None) -> bytes:
        return _event(
            ChatCompletionChunk(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=[choice] if choice is not None else [],
                usage=usage,
                timing=timing.to_dict() if timing is not None else None,
            )
        )


async def answer_as_chunks(head: AnswerHead, first: ChatPart, rest: AsyncGenerator[ChatPart]) -> AsyncGenerator[bytes]:
    """Of each choice the role first, then text, then the finish reason, as they come; then the usage, then `[DONE]`. An error is an event,
    then `[DONE]`."""
    for index in range(head.num_choices):
        yield head.chunk(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))
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


def _events(head: AnswerHead, part: ChatPart) -> list[bytes]:
    match part:
        case ChatDelta():
            if not part.text and not head.wants_logprobs:
                return []
            delta = Delta(content=part.text)
            return [head.chunk(ChunkChoice(index=part.index, delta=delta, logprobs=head.logprobs(part.tokens)))]
        case ChoiceEnd():
            choice = ChunkChoice(index=part.index, delta=Delta(), finish_reason=part.finish_reason)
            return [head.chunk(choice, timing=part.timing)]
        case ChatEnd():
            return [head.chunk(None, usage=to_usage(part.usage))] if head.wants_usage else []


async def answer_in_one(head: AnswerHead, first: ChatPart, rest: AsyncGenerator[ChatPart]) -> ChatCompletion:
    """The whole answer at its end."""
    choices = [WholeChoice() for _ in range(head.num_choices)]
    part = first
    async with aclosing(rest):
        while not isinstance(part, ChatEnd):
            choices[part.index].add(part)
            part = await anext(rest)
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[
            Choice(
                index=index,
                message=AnswerMessage(content=choice.text),
                logprobs=head.logprobs(choice.tokens),
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ],
        usage=to_usage(part.usage),
        prompt_logprobs=to_prompt_logprobs(part.prompt_logprobs, head.tokenizer) if part.prompt_logprobs is not None else None,
        timing=part.timing.to_dict(),
    )


def to_usage(usage: ChatUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
        prompt_tokens_details={
            "cached_tokens": usage.num_cached_tokens,
            **{f"{modality}_tokens": count for modality, count in usage.num_rows.items()},
        },
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


def to_prompt_logprobs(tokens: PromptLogprobList, tokenizer: PromptTokenizer) -> list[dict[int, PromptLogprob] | None]:
    """As vLLM: of each place the prompt's own token, and the most probable ones."""
    return [_to_ranked(token, tokenizer) if token is not None else None for token in tokens]


def _to_ranked(token: TokenLogprob, tokenizer: PromptTokenizer) -> dict[int, PromptLogprob]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, 1)]
    return {
        token_id: PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=tokenizer.token_text(token_id))
        for token_id, logprob, rank in [(token.token_id, token.logprob, token.rank), *ranked]
    }


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _named(token_id: int, logprob: float, tokenizer: PromptTokenizer) -> TopLogprob:
    """A token that is part of a character has no bytes of its own here."""
    text = tokenizer.token_text(token_id)
    return TopLogprob(token=text, logprob=_finite(logprob), bytes=None if "\ufffd" in text else list(text.encode()))


def _event(message: BaseModel) -> bytes:
    return b"data: " + message.model_dump_json().encode() + b"\n\n"
