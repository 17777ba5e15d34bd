"""`RequestState`: what the runner keeps of a request from its first step to its last.

A request appears with `NewRequestData` (again after a preemption: then the old state is replaced), grows by one token for each one
sampled, and is forgotten when the scheduler says that it finished.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.media.item import MediaItem
from triptych.output import NewRequestData
from triptych.runner.token_counts import make_token_counts

NO_ITEM = -1
_NO_IDS = np.empty(0, np.int64)


class RequestState:
    """Token ids, positions and items of one request.

    `positions` are those of the prompt, [axes, num_prompt_tokens]; after it, position = token index + `delta` on every axis.
    Raises `ValueError` where items and prompt do not fit each other.
    """

    def __init__(self, data: NewRequestData, positions: NDArray[np.generic], delta: float, block_row: int) -> None:
        self.request_id = data.request_id
        self.sampling = data.sampling
        self.num_prompt_tokens = data.num_prompt_tokens
        self.num_computed_tokens = data.num_computed_tokens
        self.block_row = block_row
        self.items = tuple(sorted(data.items, key=lambda item: item.start))
        self.num_tokens = len(data.token_ids)
        # [capacity]: ids, valid up to num_tokens
        self._token_ids: NDArray[np.int64] = np.array(data.token_ids, np.int64)
        # [axes, num_prompt_tokens]
        self._positions = positions
        self._delta = delta
        # [num_prompt_tokens]: token index -> index in `items`, or NO_ITEM
        self._item_indices = _item_indices(self.items, positions.shape[1])
        # [biased tokens]: ids, and what is added to their logits
        self.bias_token_ids = np.array(list(self.sampling.logit_bias), np.int64)
        self.bias_values = np.array(list(self.sampling.logit_bias.values()), np.float32)
        self.token_counts = make_token_counts(self.sampling, self._token_ids, self.num_prompt_tokens)

    @property
    def changes_logits(self) -> bool:
        """Whether the next token is chosen by other logits than the model's own."""
        return bool(self.sampling.logit_bias) or self.token_counts.is_active or self._bans_stops

    @property
    def banned_token_ids(self) -> NDArray[np.int64]:
        """What the next token must not be: stop tokens, before `min_tokens` tokens were generated."""
        return np.array(self.sampling.stop_token_ids, np.int64) if self._bans_stops else _NO_IDS

    @property
    def _bans_stops(self) -> bool:
        return self.num_generated_tokens < self.sampling.min_tokens

    @property
    def num_generated_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def append_token(self, token_id: int) -> None:
        if self.num_tokens == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty(max(self.num_tokens, 64), np.int64)])
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        self.token_counts.add(token_id)

    def token_ids(self, start: int, end: int) -> NDArray[np.int64]:
        return self._token_ids[start:end]

    def prompt_ids_to_report(self, start: int, end: int) -> NDArray[np.int64]:
        """The prompt's tokens whose logprobs are wanted and which the window [start, end) predicts, each from the token before it: tokens
        start + 1 and following. None once the answer has begun, since then they were reported before its first token."""
        if self.sampling.prompt_logprobs is None or self.num_generated_tokens:
            return _NO_IDS
        return self.token_ids(start + 1, min(end + 1, self.num_prompt_tokens))

    def fill_positions(self, out: NDArray[np.generic], start: int, end: int) -> None:
        """Write the positions of tokens [start, end) into `out`, [axes, end - start]."""
        known = self._positions.shape[1]
        if start >= known:
            out[:] = np.arange(start, end) + self._delta
            return
        inside = min(end, known) - start
        out[:, :inside] = self._positions[:, start : start + inside]
        out[:, inside:] = np.arange(start + inside, end) + self._delta

    def item_indices(self, start: int, end: int) -> NDArray[np.int64]:
        """For tokens [start, end): the index in `items` of the item whose placeholder it is, or NO_ITEM. May be shorter than asked."""
        return self._item_indices[start:end]

    def items_within(self, start: int, end: int) -> list[MediaItem]:
        """The items of which the window [start, end) reads at least one row."""
        return [item for item in self.items if item.rows_before(end) > item.rows_before(start)]


def _item_indices(items: Sequence[MediaItem], num_prompt_tokens: int) -> NDArray[np.int64]:
    if not items:
        return np.empty(0, np.int64)
    indices = np.full(num_prompt_tokens, NO_ITEM, np.int64)
    for index, item in enumerate(items):
        num_rows = sum(length for _, length in item.runs)
        if num_rows != item.num_rows:
            raise ValueError(f"item {item.key} has {item.num_rows} rows and {num_rows} placeholders")
        for start, length in item.runs:
            if start < 0 or start + length > num_prompt_tokens or (indices[start : start + length] != NO_ITEM).any():
                raise ValueError(f"placeholders {start} to {start + length} of item {item.key} lie outside the prompt or overlap")
            indices[start : start + length] = index
    return indices
