"""Tokens that come several at once, and what of them counts."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from triptych.demo import CHECKPOINT
from triptych.errors import InternalError
from triptych.output import TokenLogprob
from triptych.router.choices import read_deltas
from triptych.router.detokenizer import Detokenizer
from triptych.router.prompt_tokenizer import PromptTokenizer
from triptych.router.running_request import RunningRequest
from triptych.router.timing import Stopwatch
from triptych.router.virtual_time import run_virtual

ORACLE = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
TOKENIZER = PromptTokenizer(CHECKPOINT)
Make = Callable[..., Any]


def tokens_of(text: str) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(id, -1.0) for id in ORACLE.encode(text, add_special_tokens=False).ids)


def test_what_follows_a_stop_string_in_the_same_batch_is_neither_sent_nor_counted(make_job: Make) -> None:
    async def run() -> None:
        running = RunningRequest(make_job(), Stopwatch())
        running.stopwatch.begin(is_prefill=True)
        red, stop, rest = tokens_of("red"), tokens_of("."), tokens_of(" blue")
        running.add(red + stop + rest)
        running.finish("length")
        deltas = [delta async for delta in read_deltas(running, Detokenizer(TOKENIZER, ["."]))]
        assert [(delta.text, delta.tokens) for delta in deltas] == [("red", red + stop)]

    run_virtual(run())


def test_tokens_that_came_before_an_error_are_still_given_out(make_job: Make) -> None:
    async def run() -> None:
        running = RunningRequest(make_job(), Stopwatch())
        running.stopwatch.begin(is_prefill=True)
        running.add(tokens_of("red"))
        running.fail(InternalError("broken"))
        texts: list[str] = []
        with pytest.raises(InternalError, match="broken"):
            async for delta in read_deltas(running, Detokenizer(TOKENIZER)):
                texts.append(delta.text)
        assert "".join(texts) == "red"

    run_virtual(run())
