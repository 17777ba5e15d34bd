"""`ChatSampling`: how a client wants its answer sampled. What it does not say is the model's own default."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.errors import RequestError
from triptych.router.render import SamplingDefaults
from triptych.sampling_params import SamplingParams, StructuredOutput


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """None takes the default. Ranges are `SamplingParams`' business."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])  # by token id
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    structured_output: StructuredOutput | None = None

    def to_params(
        self, defaults: SamplingDefaults, eos_token_ids: tuple[int, ...], *, room: int, vocab_size: int
    ) -> SamplingParams:
        """`room`: the tokens that may follow the prompt. Raises `RequestError` for a value that is out of range."""
        foreign = [token_id for token_id in self.logit_bias if not 0 <= token_id < vocab_size]
        if foreign:
            message = f"logit_bias has token id {foreign[0]}; the model's are 0 to {vocab_size - 1}."
            raise RequestError(message, param="logit_bias")
        sampling = SamplingParams(
            max_tokens=room if self.max_tokens is None else self.max_tokens,
            seed=secrets.randbits(53) if self.seed is None else self.seed % 2**63,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            repetition_penalty=defaults.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=dict(self.logit_bias),
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids + (() if self.ignore_eos else eos_token_ids),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            structured_output=self.structured_output,
        )
        sampling.check()
        return sampling
