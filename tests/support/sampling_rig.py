"""Requests as the sampler sees them."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from triptych.output import NewRequestData
from triptych.runner.request_state import RequestState
from triptych.sampling_params import SamplingParams


def state_of(prompt: Sequence[int], answer: Sequence[int] = (), **sampling: Any) -> RequestState:
    settings: dict[str, Any] = {"max_tokens": 10_000, **sampling}
    data = NewRequestData("r", (*prompt, *answer), (), SamplingParams(**settings), len(prompt), 0, ())
    return RequestState(data, np.zeros((1, len(prompt)), np.int64), 0, 0)


def random_sampling(rng: Random, vocab_size: int) -> dict[str, Any]:
    """Each parameter in use or not, at random."""
    in_use: dict[str, Any] = {
        "temperature": rng.uniform(0.3, 1.8),
        "top_p": rng.uniform(0.3, 1.0),
        "top_k": rng.choice((1, 5, 40, 10**6)),
        "min_p": rng.uniform(0.0, 0.3),
        "repetition_penalty": rng.uniform(0.7, 1.8),
        "presence_penalty": rng.uniform(-2.0, 2.0),
        "frequency_penalty": rng.uniform(-2.0, 2.0),
        "logit_bias": {rng.randrange(vocab_size): rng.uniform(-100.0, 100.0) / 20 for _ in range(rng.randrange(1, 30))},
        "min_tokens": rng.randrange(40),
        "logprobs": rng.randrange(6),
    }
    chosen = {name: value for name, value in in_use.items() if rng.random() < 0.5}
    stops = tuple(rng.randrange(vocab_size) for _ in range(5))
    return {"temperature": 0.0, "seed": rng.randrange(2**40), "stop_token_ids": stops, **chosen}
