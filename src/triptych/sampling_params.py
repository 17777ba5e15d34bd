"""What a worker needs to know to sample a request's tokens. Stop strings are the router's, which detokenises."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from triptych.errors import RequestError

MAX_GRAMMAR_LENGTH = 64 * 1024


class StructuredOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form that an answer must have. `text` is a JSON schema, a regular expression (for the whole answer, in the syntax of Rust's regex), a
    JSON list of strings of which one is the answer, or a grammar in Lark's or llama.cpp's (GBNF) syntax; of any JSON object it is empty."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)] = ""

    def check(self) -> None:
        """Raise `RequestError` for a text that is too long to be looked at."""
        if len(self.text) > MAX_GRAMMAR_LENGTH:
            message = (
                f"the {self.kind} has {len(self.text)} characters as JSON or text; it must have at most {MAX_GRAMMAR_LENGTH}."
            )
            raise RequestError(message, param=self.kind)


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling is a pure function of logits, these parameters, the seed and the token's position.

    `temperature` 0 is greedy. `top_k` 0 keeps all. `seed` is always set (the router draws one when the client gives none),
    so that a request that moves to another worker goes on with the tokens it would have had.
    `min_p` drops tokens less probable than that share of the most probable one. `repetition_penalty` (Keskar et al., CTRL, 2019) is over prompt and
    answer, `presence_penalty` and `frequency_penalty` (as in OpenAI's API) over the answer. `logit_bias` is added to the logits, by token id.
    `logprobs` is the number of alternatives reported beside the sampled token's own log-probability; None reports none. `prompt_logprobs` likewise
    for the prompt's tokens. `structured_output` is the form that the answer must have; it outranks `min_tokens`: an answer that is complete ends.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] = {}
    min_tokens: int = 0
    # the model's end-of-sequence ids are among them unless the client ignores them
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=1024)] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None

    def check(self) -> None:
        """Raise `RequestError` for a value out of range."""
        if self.structured_output is not None:
            self.structured_output.check()
        ranges: list[tuple[str, float, float, float]] = [
            ("max_tokens", self.max_tokens, 1, float("inf")),
            ("min_tokens", self.min_tokens, 0, self.max_tokens),
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_k", self.top_k, 0, float("inf")),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("top_logprobs", self.logprobs or 0, 0, 20),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, 20),
            *((f"logit_bias[{token_id}]", bias, -100.0, 100.0) for token_id, bias in self.logit_bias.items()),
        ]
        if not 0.0 < self.repetition_penalty < float("inf"):
            message = f"repetition_penalty is {_shown(self.repetition_penalty)}; it must be a number greater than 0."
            raise RequestError(message, param="repetition_penalty")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {_shown(self.top_p)}; it must be greater than 0 and at most 1.", param="top_p")
        for name, value, low, high in ranges:
            if not low <= value <= high:
                upper = "" if high == float("inf") else f" and at most {_shown(high)}"
                raise RequestError(f"{name} is {_shown(value)}; it must be at least {low:g}{upper}.", param=name)


def _shown(value: float) -> str:
    """An integer may be too large to become a float."""
    return str(value) if isinstance(value, int) else f"{value:g}"
