"""`InputBatch`: one step's windows, flattened into one ragged sequence of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.runner.attention import AttentionStep, DecodeGroup, PrefillWindow, make_attention_step, make_gather_index
from triptych.runner.block_table import BlockTable
from triptych.runner.kv_cache import KVCache
from triptych.runner.request_state import NO_ITEM, RequestState

_NO_ITEMS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens [start, end) of one request, which this step computes."""

    request: RequestState
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_sampled(self) -> bool:
        """The window ends at the last token known, so that the next one is wanted."""
        return self.end == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class InputBatch:
    """T tokens; those of one-token windows come first."""

    windows: tuple[TokenWindow, ...]
    token_ids: Tensor  # [T]
    positions: Tensor  # [axes, T]
    # [m]: tokens of the batch whose embedding is a row of an item, in order
    row_index: Tensor
    # [R]: last token of each window that is sampled
    sample_index: Tensor
    attention: AttentionStep

    @property
    def sampled(self) -> list[RequestState]:
        return [window.request for window in self.windows if window.is_sampled]


class InputBatchBuilder:
    """What turns windows into tensors: the block table, the cache they point into, and the dtype and axes of positions."""

    def __init__(
        self, block_table: BlockTable, kv_cache: KVCache, position_axes: int, position_dtype: torch.dtype, atomic_items: bool
    ) -> None:
        self._block_table = block_table
        self._kv_cache = kv_cache
        self._position_axes = position_axes
        self._position_dtype: np.dtype[np.generic] = torch.empty(0, dtype=position_dtype).numpy().dtype
        self._atomic_items = atomic_items

    def build(self, windows: Sequence[TokenWindow]) -> InputBatch:
        windows = sorted(windows, key=lambda window: window.num_tokens > 1)
        lengths = np.array([window.num_tokens for window in windows], np.int64)
        starts = np.array([window.start for window in windows], np.int64)
        rows = np.array([window.request.block_row for window in windows], np.int64)
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        token_ids = np.empty(num_tokens, np.int64)
        positions = np.empty((self._position_axes, num_tokens), self._position_dtype)
        row_indices: list[NDArray[np.int64]] = []
        for window, last in zip(windows, ends.tolist(), strict=True):
            request, first = window.request, last - window.num_tokens
            token_ids[first:last] = request.token_ids(window.start, window.end)
            request.fill_positions(positions[:, first:last], window.start, window.end)
            if request.items:
                row_indices.append(first + np.flatnonzero(request.item_indices(window.start, window.end) != NO_ITEM))
        # [T]: token of the batch -> token of its request
        token_indices = np.arange(num_tokens) + np.repeat(starts + lengths - ends, lengths)
        slots = self._block_table.slot_mapping(np.repeat(rows, lengths), token_indices)[0]
        sampled = [last - 1 for window, last in zip(windows, ends.tolist(), strict=True) if window.is_sampled]
        return InputBatch(
            windows=tuple(windows),
            token_ids=self._to_device(token_ids),
            positions=self._to_device(positions),
            row_index=self._to_device(np.concatenate(row_indices) if row_indices else _NO_ITEMS),
            sample_index=self._to_device(np.array(sampled, np.int64)),
            attention=self._attention_step(windows, starts, lengths, rows, slots),
        )

    def _attention_step(
        self,
        windows: Sequence[TokenWindow],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> AttentionStep:
        num_decodes = int(np.count_nonzero(lengths == 1))
        known = starts + lengths
        offsets = np.cumsum(lengths) - lengths
        decodes = self._decode_group(rows[:num_decodes], known[:num_decodes])
        prefills = [
            self._prefill_window(windows[i], rows[i : i + 1], known[i : i + 1], int(offsets[i]))
            for i in range(num_decodes, len(windows))
        ]
        return make_attention_step(self._kv_cache, slots, decodes, prefills)

    def _decode_group(self, rows: NDArray[np.int64], known: NDArray[np.int64]) -> DecodeGroup:
        return DecodeGroup(
            num=len(rows),
            max_length=int(known.max(initial=0)),
            gather_index=make_gather_index(self._kv_cache, self._block_table.block_ids(rows, known)),
            lengths=self._to_device(known[:, None]),
            is_ragged=bool((known != known[:1]).any()),
        )

    def _prefill_window(
        self, window: TokenWindow, row: NDArray[np.int64], known: NDArray[np.int64], offset: int
    ) -> PrefillWindow:
        item_indices = _NO_ITEMS
        if self._atomic_items and window.request.items_within(window.start, window.end):
            item_indices = np.full(window.end, NO_ITEM, np.int64)
            inside = window.request.item_indices(0, window.end)
            item_indices[: len(inside)] = inside
        gather_index = make_gather_index(self._kv_cache, self._block_table.block_ids(row, known))
        return PrefillWindow(offset, window.start, window.end, gather_index, item_indices)

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._kv_cache.device, non_blocking=True)
