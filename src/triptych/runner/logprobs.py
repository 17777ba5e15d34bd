"""Log-probabilities of given tokens, in the model's own distribution: before biases, bans, penalties, temperature and filters."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triptych.output import MIN_LOGPROB, TokenLogprob

MAX_SLICE_NUMBERS = 2**24  # logits of a prompt that exist at one time: 64 MiB


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int]) -> list[TokenLogprob]:
    """For each row of `logits`, [n, vocabulary], its token and as many of the most probable ones as are asked for."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    # [n, 1]
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks: list[int] = ((logprobs > own).sum(dim=-1) + 1).tolist()
    values, ids = logprobs.topk(min(max(num_alternatives), logits.shape[1]), dim=-1)
    own_values: list[float] = own.squeeze(1).clamp(min=MIN_LOGPROB).tolist()
    top_values: list[list[float]] = values.clamp(min=MIN_LOGPROB).tolist()
    return [
        TokenLogprob(token_id, logprob, tuple(zip(top[:wanted], top_logprobs[:wanted], strict=True)), rank)
        for token_id, logprob, top, top_logprobs, wanted, rank in zip(
            token_ids, own_values, ids.tolist(), top_values, num_alternatives, ranks, strict=True
        )
    ]


def prompt_logprobs(
    hidden: Tensor, token_ids: Sequence[int], num_alternatives: int, to_logits: Callable[[Tensor], Tensor], vocab_size: int
) -> tuple[TokenLogprob, ...] | None:
    """Row i of `hidden`, [n, hidden], predicts `token_ids[i]`. None where the model gave NaN or infinity for one of them."""
    slice_length = max(1, MAX_SLICE_NUMBERS // vocab_size)
    tokens: list[TokenLogprob] = []
    for first in range(0, len(token_ids), slice_length):
        own = token_ids[first : first + slice_length]
        tokens += token_logprobs(to_logits(hidden[first : first + len(own)]), own, [num_alternatives] * len(own))
    return None if any(math.isnan(token.logprob) for token in tokens) else tuple(tokens)
