"""`TokenCounts`: which tokens a request's penalties are about, and how often the answer has them; grows with each token, never counted anew."""

import numpy as np
from numpy.typing import NDArray

from triptych.sampling_params import SamplingParams


class TokenCounts:
    """Of a request without penalties: nothing is counted."""

    is_active = False

    def add(self, token_id: int) -> None:
        """One more token of the answer."""

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[n], each once, in no particular order."""
        return np.empty(0, np.int64)

    @property
    def counts(self) -> NDArray[np.int64]:
        """[n]: times that the answer has each; 0 for a token that only the prompt has."""
        return np.empty(0, np.int64)


class ActiveTokenCounts(TokenCounts):
    """`token_ids` is all that is known of the request; its answer begins at `num_prompt_tokens`. The prompt's tokens are among those counted
    where `has_prompt`."""

    is_active = True

    def __init__(self, token_ids: NDArray[np.int64], num_prompt_tokens: int, *, has_prompt: bool) -> None:
        distinct = np.unique(token_ids if has_prompt else token_ids[num_prompt_tokens:])
        answer, times = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        # [2, capacity]: ids and counts, valid up to len(_places)
        self._table = np.stack([distinct, np.zeros_like(distinct)])
        self._table[1, np.searchsorted(distinct, answer)] = times

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros((2, max(place, 64)), np.int64)], axis=1)
        self._table[0, place] = token_id
        self._table[1, place] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._table[0, : len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._table[1, : len(self._places)]


def make_token_counts(sampling: SamplingParams, token_ids: NDArray[np.int64], num_prompt_tokens: int) -> TokenCounts:
    has_prompt = sampling.repetition_penalty != 1
    if not has_prompt and sampling.presence_penalty == 0 and sampling.frequency_penalty == 0:
        return TokenCounts()
    return ActiveTokenCounts(token_ids, num_prompt_tokens, has_prompt=has_prompt)
