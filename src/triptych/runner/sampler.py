"""`Sampler`: logits to tokens. A token is a pure function of its logits, the sampling parameters, the seed and the token's position.

Randomness is counter-based, so that a request which moves to another worker, or meets other neighbours in its batch, goes on with the tokens
it would have had: one number in [0, 1) per token,

    u = mix(mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) / 2**64, cut to 53 bits

with `mix` the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). The token is the
first one, in order of token ids, whose cumulative probability exceeds u.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.output import TokenLogprob
from triptych.runner.logits_processors import process_logits
from triptych.runner.logprobs import token_logprobs
from triptych.runner.request_state import RequestState
from triptych.runner.structured_output import NO_MASKS, TokenMasks

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of a seed and a token position."""
    counters = (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    bits = _mix(_mix(np.array([seed & _MASK for seed in seeds], np.uint64)) + counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class Sampler:
    def sample(self, logits: Tensor, requests: Sequence[RequestState], masks: TokenMasks = NO_MASKS) -> list[TokenLogprob | str]:
        """For each row of `logits`, [R, vocabulary], a token; or the sentence that says why there is none to choose.

        `logprob` is 0 for a request that asked for none.
        """
        raw = logits.float()
        # All that forbids or favours tokens is applied here, to a copy: `raw` stays the model's own, for logprobs.
        processed = masks.apply(process_logits(raw, requests))
        # [R], [R]: of equal logits the lowest token id wins
        highest, greedy = processed.max(dim=-1)
        token_ids: list[int] = greedy.tolist()
        is_usable: list[bool] = torch.isfinite(highest).tolist()
        drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0 and is_usable[row]]
        self._draw(processed, highest, requests, drawn, token_ids)
        reported = _reported(raw, requests, token_ids, is_usable)
        return [
            reported.get(row, TokenLogprob(token_id, 0.0)) if is_usable[row] else _why_none(raw[row], requests[row])
            for row, token_id in enumerate(token_ids)
        ]

    def _draw(
        self, logits: Tensor, highest: Tensor, requests: Sequence[RequestState], rows: Sequence[int], token_ids: list[int]
    ) -> None:
        """Replace `token_ids` of `rows`. Rows are drawn together only with rows of the same kind, so that none depends on its neighbours."""
        vocab_size = logits.shape[1]
        kinds: dict[tuple[int, bool], list[int]] = {}
        for row in rows:
            sampling = requests[row].sampling
            top_k = min(sampling.top_k or vocab_size, vocab_size)
            kinds.setdefault((top_k, sampling.top_p < 1), []).append(row)
        for (top_k, has_top_p), members in kinds.items():
            own = [requests[row] for row in members]
            index = torch.tensor(members, device=logits.device)
            temperature = _column([request.sampling.temperature for request in own], logits)
            # [r, vocabulary], at most 0: no overflow, however low the temperature
            scaled = (logits[index].double() - highest[index].double().unsqueeze(1)) / temperature
            if any(request.sampling.min_p > 0 for request in own):
                # the most probable one has 0 here, so that exp(scaled) is a token's share of its probability
                min_p = _column([request.sampling.min_p for request in own], logits)
                scaled = scaled.masked_fill(scaled < min_p.log(), float("-inf"))
            candidates = torch.arange(vocab_size, device=logits.device).expand(len(own), -1)
            if top_k < vocab_size or has_top_p:
                top_p = _column([request.sampling.top_p for request in own], logits)
                scaled, candidates = _filter(scaled, top_k, top_p)
            numbers = uniforms([request.sampling.seed for request in own], [request.num_tokens for request in own])
            chosen = _invert_cdf(torch.softmax(scaled, dim=-1), torch.from_numpy(numbers).to(logits.device))
            for row, token_id in zip(members, candidates.gather(1, chosen).squeeze(1).tolist(), strict=True):
                token_ids[row] = token_id


def _filter(scaled: Tensor, top_k: int, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the `top_k` most probable tokens, and of those the fewest whose probabilities sum to `top_p`.

    Returns logits (-inf where dropped) and token ids, [r, candidates], in ascending order of token ids: two tokens of nearly equal
    probability never change places.
    """
    if top_k < scaled.shape[1]:
        values, ids = scaled.topk(top_k, dim=-1)
    else:
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(values, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    before[:, 0] = 0  # the most probable one always stays
    values = values.masked_fill(before >= top_p, float("-inf"))
    ids, order = ids.sort(dim=-1)
    return values.gather(1, order), ids


def _invert_cdf(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """[r, 1]: the first index whose cumulative probability exceeds the row's number in [0, 1)."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, numbers.unsqueeze(1) * total, right=True)
    last = torch.searchsorted(cumulative, total)  # the last index that adds anything; rounding may reach past it
    return torch.minimum(chosen, last)


def _reported(
    raw: Tensor, requests: Sequence[RequestState], token_ids: Sequence[int], is_usable: Sequence[bool]
) -> dict[int, TokenLogprob]:
    """By row, for requests that want logprobs."""
    rows = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None and is_usable[row]]
    if not rows:
        return {}
    wanted = [requests[row].sampling.logprobs or 0 for row in rows]
    return dict(zip(rows, token_logprobs(raw[rows], [token_ids[row] for row in rows], wanted), strict=True))


def _why_none(raw: Tensor, request: RequestState) -> str:
    if torch.isfinite(raw.max()):
        return f"what the request bans, biases and penalises leaves nothing to choose as its token {request.num_tokens}."
    return f"the model gave NaN or infinity for token {request.num_tokens} of the request."


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
