"""`BlockTable`: which KV blocks each request has, in the order of its tokens.

One row per request, one layer of rows per KV cache group. An encoder-only worker has zero groups: every method works and
holds nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTable:
    """Rows are handed out by `allocate` and taken back by `free`; there are always enough (the table doubles)."""

    def __init__(self, num_groups: int, num_rows: int, blocks_per_row: int, block_size: int) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        # [num_groups, num_rows, blocks_per_row]: block ids; valid up to num_blocks[row]
        self._block_ids: NDArray[np.int64] = np.zeros((num_groups, num_rows, max(blocks_per_row, 1)), np.int64)
        # [num_rows]
        self._num_blocks: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def allocate(self, block_ids: Sequence[int]) -> int:
        """A row that holds `block_ids`."""
        if not self._free_rows:
            self._double_rows()
        row = self._free_rows.pop()
        self._num_blocks[row] = 0
        self.append(row, block_ids)
        return row

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        first = int(self._num_blocks[row])
        last = first + len(block_ids)
        if last > self._block_ids.shape[2]:
            self._widen(last)
        self._block_ids[:, row, first:last] = block_ids
        self._num_blocks[row] = last

    def free(self, row: int) -> None:
        self._num_blocks[row] = 0
        self._free_rows.append(row)

    def num_slots(self, row: int) -> int:
        """How many tokens the row's blocks can hold."""
        return int(self._num_blocks[row]) * self.block_size

    def block_ids(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The blocks of the first `num_tokens[i]` tokens of `rows[i]`, as [num_groups, len(rows), most blocks of any].

        Shorter rows are padded with their own last block, so that a reader never touches another request's memory.
        """
        counts = -(-num_tokens // self.block_size)
        columns = np.minimum(np.arange(counts.max(initial=0)), counts[:, None] - 1)
        return self._block_ids[:, rows[:, None], columns]

    def slot_mapping(self, rows: NDArray[np.int64], token_indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """[num_groups, T]: where the K and V of token `token_indices[t]` of `rows[t]` are kept: block id * block_size + offset."""
        blocks = self._block_ids[:, rows, token_indices // self.block_size]
        return blocks * self.block_size + token_indices % self.block_size

    def _double_rows(self) -> None:
        num_rows = len(self._num_blocks)
        self._block_ids = np.concatenate([self._block_ids, np.zeros_like(self._block_ids)], axis=1)
        self._num_blocks = np.concatenate([self._num_blocks, np.zeros_like(self._num_blocks)])
        self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))

    def _widen(self, blocks_per_row: int) -> None:
        groups, rows, width = self._block_ids.shape
        wider = np.zeros((groups, rows, max(blocks_per_row, 2 * width)), np.int64)
        wider[:, :, :width] = self._block_ids
        self._block_ids = wider
