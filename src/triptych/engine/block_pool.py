"""`BlockPool`: which KV blocks are free."""

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1; the longest-free block first, so that a stale reader is noticed late rather than never."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks, or None (and nothing changed) if there are not that many."""
        if count > len(self._free):
            return None
        block_ids = tuple(self._free.popleft() for _ in range(count))
        self._used.update(block_ids)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._used.remove(block_id)
            self._free.append(block_id)

    def check_invariants(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._used, "a block is free and used"
        assert len(free) + len(self._used) == self.num_blocks, "a block is lost"
