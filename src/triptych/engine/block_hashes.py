"""Hashes of KV blocks: equal hashes mean equal keys and values, whichever worker computed them.

A block's hash covers the hash of the block before it, its token ids, and of each run of an item's rows in it: the item's key, which row
comes first and where, and how many. Placeholders of two pictures have the same token ids: the keys tell them apart. The chain begins with the
tenant's salt, so that no tenant can find out what another one has asked.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from blake3 import blake3

from triptych.media.item import MediaItem


class BlockHashes:
    """Of one request's full blocks, in order; they grow with its tokens."""

    def __init__(self, block_size: int, items: Sequence[MediaItem], cache_salt: str = "") -> None:
        self.block_size = block_size
        self._root = blake3(b"triptych kv block\0" + cache_salt.encode()).digest()
        # (first token, number of tokens, key, row of the first token), ascending
        self._runs = sorted(run for item in items for run in _runs_of(item))
        self._starts = [start for start, *_ in self._runs]
        self._hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The hashes of all full blocks of `token_ids`, which begin with what was given before."""
        for index in range(len(self._hashes), len(token_ids) // self.block_size):
            start = index * self.block_size
            parent = self._hashes[-1] if self._hashes else self._root
            digest = blake3(parent + array("q", token_ids[start : start + self.block_size]).tobytes())
            for offset, row, length, key in self._rows_within(start, start + self.block_size):
                digest.update(array("q", (offset, row, length)).tobytes() + bytes.fromhex(key))
            self._hashes.append(digest.digest())
        return self._hashes

    def findable(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Of the full blocks before the last token: that one is always left to compute, since its logits are wanted."""
        return self.extend(token_ids)[: (len(token_ids) - 1) // self.block_size]

    def _rows_within(self, start: int, end: int) -> Iterator[tuple[int, int, int, str]]:
        """(place in the block, row of its item, number of rows, key) of each run that meets the block [start, end)."""
        for first, length, key, row in self._runs[max(0, bisect_right(self._starts, start) - 1) :]:
            if first >= end:
                return
            low, high = max(first, start), min(first + length, end)
            if low < high:
                yield low - start, row + low - first, high - low, key


class NoBlockHashes(BlockHashes):
    """Prefix caching is off: no block is ever known by what it holds."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def extend(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        return ()


def _runs_of(item: MediaItem) -> Iterator[tuple[int, int, str, int]]:
    rows_before = accumulate((length for _, length in item.runs), initial=0)
    for (start, length), row in zip(item.runs, rows_before, strict=False):
        yield start, length, item.key, row
