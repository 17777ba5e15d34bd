"""Structured output: which tokens may come next, so that an answer has the form that its request asks for.

    the request's text -> grammar (checked and compiled once: `GrammarCompiler`) -> matcher (one per request) -> a mask for each token

A matcher is made from the request's tokens when it is first needed: after a move, a preemption or a replay it reads the answer so far, and
nothing about it travels. Where the answer may end, the request's stop tokens are allowed; where nothing else could follow, it ends by itself.
The work is that of llguidance, which makes masks lazily, token by token.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray
from torch import Tensor

from triptych.errors import RequestError
from triptych.models.inspect import read_eos_token_ids
from triptych.models.tokenizer import load_tokenizer
from triptych.output import ModelRunnerOutput
from triptych.runner.request_state import RequestState
from triptych.sampling_params import StructuredOutput

MAX_COMPILED = 64
MAX_REASON_LENGTH = 200

# What one grammar may cost. A first token of a hostile one was seen to take 1.3 s and 250 MB with llguidance's own limits, and up to 0.65 s for each
# further one; with these 0.2 s and 50 MB, and 35 ms; objects of 150 optional properties still pass.
_LIMITS = LLParserLimits(
    max_items_in_row=640,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
# Between JSON's tokens. Without a bound a model that has begun with spaces may go on with them for ever.
_WHITESPACE = r"[ \n\r\t]{1,64}"
_END = "<|triptych: the answer may end here|>"


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """`end_id` is of the token by which llguidance says that the answer may end: one of its own, since a model may have several or none."""

    tokenizer: LLTokenizer
    end_id: int
    eos_ids: tuple[int, ...]


class GrammarCompiler:
    """Texts to grammars, the last ones kept. The tokenizer is read with the first. May be called from any thread."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        self._model_dir = model_dir
        self.vocab_size = vocab_size
        self._compiled: OrderedDict[StructuredOutput, LLMatcher | str] = OrderedDict()
        self._lock = Lock()
        # One: a flood of costly grammars takes no more than a core from those that compute.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @cached_property
    def vocabulary(self) -> _Vocabulary:
        tokenizer, _ = load_tokenizer(self._model_dir)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.add_special_tokens([_END])
        end_id = tokenizer.token_to_id(_END)
        assert end_id is not None
        size = max(self.vocab_size, tokenizer.get_vocab_size(), end_id + 1)
        eos_ids = tuple(token_id for token_id in read_eos_token_ids(self._model_dir) if token_id < size)
        return _Vocabulary(LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=end_id), end_id, eos_ids)

    async def check(self, structure: StructuredOutput) -> None:
        """Raise `RequestError` for one that cannot be used here: a mistake, or it costs too much."""
        if structure not in self._compiled:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compile_once, structure)
        self.start(structure)

    def start(self, structure: StructuredOutput) -> LLMatcher:
        """A matcher of the answer that has no token yet. Raises `RequestError`."""
        result = self._compile_once(structure)
        if isinstance(result, str):
            raise RequestError(result)
        return result.deep_copy()  # shares what is known of the grammar's words

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile_once(self, structure: StructuredOutput) -> LLMatcher | str:
        with self._lock:
            result = self._compiled.get(structure)
        if result is None:  # whoever needs another grammar meanwhile does not wait for this one
            result = self._compile(structure)
        with self._lock:
            self._compiled[structure] = result
            self._compiled.move_to_end(structure)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return result

    def _compile(self, structure: StructuredOutput) -> LLMatcher | str:
        try:
            matcher = LLMatcher(self.vocabulary.tokenizer, _to_grammar(structure), log_level=0, limits=_LIMITS)
        except ValueError as error:
            return _refusal(structure, str(error))
        attempt = matcher.deep_copy()
        may_begin = np.frombuffer(attempt.compute_bitmask(), np.uint8).any()  # costs what the first step would cost
        if attempt.is_error():
            return _refusal(structure, attempt.get_error())
        return matcher if may_begin else _refusal(structure, "nothing has this form")


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may come next, for some rows of a batch; of the others all may."""

    rows: tuple[int, ...]
    # [len(rows), vocabulary]
    allowed: NDArray[np.bool_]

    def apply(self, logits: Tensor) -> Tensor:
        """`logits`, [R, vocabulary], with -inf where a token may not come; not in place."""
        if not self.rows:
            return logits
        index = torch.tensor(self.rows, device=logits.device)
        forbidden = torch.from_numpy(~self.allowed).to(logits.device)
        return logits.index_copy(0, index, logits[index].masked_fill(forbidden, float("-inf")))


NO_MASKS = TokenMasks((), np.empty((0, 0), np.bool_))


class GrammarMatchers:
    """Where the answers of the requests that run here stand in their grammars. Belongs to the engine thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: WeakKeyDictionary[RequestState, LLMatcher] = WeakKeyDictionary()

    def masks(self, requests: Sequence[RequestState], output: ModelRunnerOutput) -> TokenMasks:
        """For the next token of each request. Says in `output` which cannot go on (`refused_requests`), and which had ended (`completed`): it
        was moved, and the news of its end was lost."""
        rows = tuple(row for row, request in enumerate(requests) if request.sampling.structured_output is not None)
        if not rows:
            return NO_MASKS
        vocabulary = self._compiler.vocabulary
        # [rows, words of 32 bits]
        bits = np.zeros((len(rows), -(-vocabulary.tokenizer.vocab_size // 32)), np.int32)
        for row, words in zip(rows, bits, strict=True):
            self._fill(requests[row], words, output)
        # [rows, tokens]
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        may_end: list[bool] = allowed[:, vocabulary.end_id].tolist()
        allowed[:, [vocabulary.end_id, *vocabulary.eos_ids]] = False
        allowed = allowed[:, : self._compiler.vocab_size]
        for row, tokens, may_end_here in zip(rows, allowed, may_end, strict=True):
            request = requests[row]
            if not tokens.any() and request.request_id not in output.refused_requests:
                if may_end_here:
                    output.completed.add(request.request_id)
                else:
                    output.refused_requests[request.request_id] = (
                        "no token of the model can continue the answer in the form asked for."
                    )
            elif may_end_here:
                tokens[[token_id for token_id in request.sampling.stop_token_ids if 0 <= token_id < len(tokens)]] = True
        return TokenMasks(rows, allowed)

    def append(self, request: RequestState, token_id: int, output: ModelRunnerOutput) -> None:
        """A token was sampled. Says in `output` if the answer is complete with it, and nothing could follow."""
        matcher = self._matchers.get(request)
        if matcher is None or token_id in request.sampling.stop_token_ids:
            return
        matcher.consume_token(token_id)
        if matcher.is_stopped() and not matcher.is_error():
            output.completed.add(request.request_id)

    def _fill(self, request: RequestState, words: NDArray[np.int32], output: ModelRunnerOutput) -> None:
        structure = request.sampling.structured_output
        assert structure is not None
        try:
            if request not in self._matchers:
                self._matchers[request] = self._start(request, structure)
            matcher = self._matchers[request]
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error():
                raise RequestError(_refusal(structure, matcher.get_error()))
        except RequestError as error:
            output.refused_requests[request.request_id] = error.message
            words[:] = 0

    def _start(self, request: RequestState, structure: StructuredOutput) -> LLMatcher:
        matcher = self._compiler.start(structure)
        answer: list[int] = request.token_ids(request.num_prompt_tokens, request.num_tokens).tolist()
        if matcher.try_consume_tokens(answer) != len(answer):
            raise RequestError(f"the answer so far does not have the form of its {structure.kind}.")
        return matcher


def _to_grammar(structure: StructuredOutput) -> str:
    """In llguidance's own words. Raises `ValueError`."""
    match structure.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults={"whitespace_pattern": _WHITESPACE})
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(structure.text, defaults={"whitespace_pattern": _WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(structure.text)
        case "choice":
            # One terminal: as alternatives of a rule, each choice would cost a state of the parser.
            return LLMatcher.grammar_from_lark(
                "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(structure.text)))
            )
        case "grammar":
            return grammar_from("grammar", structure.text)


def _refusal(structure: StructuredOutput, why: str) -> str:
    """One sentence: of a parser's report its conclusion."""
    lines = [line.strip() for line in why.splitlines() if line.strip()] or ["llguidance does not say why"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return f"the {structure.kind} cannot be used: {reason[:MAX_REASON_LENGTH].rstrip('.')}."
