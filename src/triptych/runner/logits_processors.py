"""What changes logits before a token is chosen, in vLLM's order: `logit_bias`, the ban of stop tokens before `min_tokens`, then penalties.

    repetition   logit / penalty where it is positive, else logit * penalty     tokens of prompt and answer
    frequency    logit - penalty * times                                        tokens of the answer
    presence     logit - penalty                                                tokens of the answer

Each change is to single numbers of a request's own row, so that it depends on no neighbour, and costs by the tokens that it is about.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.runner.request_state import RequestState


def process_logits(raw: Tensor, requests: Sequence[RequestState]) -> Tensor:
    """[R, vocabulary]: a changed copy, or `raw` itself where no request asks for a change."""
    rows = [row for row, request in enumerate(requests) if request.changes_logits]
    if not rows:
        return raw
    processed = raw.clone(memory_format=torch.contiguous_format)
    flat, own = processed.view(-1), [requests[row] for row in rows]
    offsets = np.array(rows, np.int64) * raw.shape[1]
    places = _places(offsets, [request.bias_token_ids for request in own], flat)
    flat[places] += _to_device(np.concatenate([request.bias_values for request in own]), flat)
    flat[_places(offsets, [request.banned_token_ids for request in own], flat)] = float("-inf")
    _penalise(flat, offsets, own)
    return processed


def _penalise(flat: Tensor, offsets: NDArray[np.int64], requests: Sequence[RequestState]) -> None:
    token_ids = [request.token_counts.token_ids for request in requests]
    lengths = [len(each) for each in token_ids]

    def spread(penalties: list[float]) -> Tensor:
        return _to_device(np.repeat(np.array(penalties, np.float32), lengths), flat)

    # [n]: all of the requests' counted tokens, one request after another
    places = _places(offsets, token_ids, flat)
    counts = _to_device(np.concatenate([request.token_counts.counts for request in requests]), flat)
    repetition = spread([request.sampling.repetition_penalty for request in requests])
    logits = flat[places]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= spread([request.sampling.frequency_penalty for request in requests]) * counts
    logits -= spread([request.sampling.presence_penalty for request in requests]) * (counts > 0)
    flat[places] = logits


def _places(offsets: NDArray[np.int64], token_ids: Sequence[NDArray[np.int64]], flat: Tensor) -> Tensor:
    """Where `token_ids[i]` are in the flattened logits, given that their row begins at `offsets[i]`."""
    return _to_device(np.concatenate(token_ids) + np.repeat(offsets, [len(each) for each in token_ids]), flat)


def _to_device(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
