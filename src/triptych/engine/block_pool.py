"""`BlockPool`: who uses each KV block, and which prefix it holds.

    free (no content) --allocate--> used by 1 --share--> used by more
       ^                              |  enter: its content is known by a hash, and can be found
       |       free, the last user    v
       +------- without a hash ---- unused --- with a hash ---> kept --share--> used again
                                                                 |
                                                                 +--allocate--> used for another content: it is found no more

Memory that is needed comes from free blocks first, then from the kept one that was given up longest ago. If a peer may still read what a block
held, its generation must move before anything is written: `take_recycled` names it in the step that allocates it.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1; the longest-free block first, so that a stale reader is noticed late rather than never."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()  # the one to go first in front
        self._num_users: list[int] = [0] * num_blocks
        self._blocks_by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._published: set[int] = set()
        self._recycled: list[int] = []

    @property
    def num_unused(self) -> int:
        return len(self._free) + len(self._kept)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning of `hashes` that is here."""
        found: list[int] = []
        for each in hashes:
            block = self._blocks_by_hash.get(each)
            if block is None:
                break
            found.append(block)
        return found

    def num_users(self, block: int) -> int:
        return self._num_users[block]

    def share(self, block_ids: Sequence[int]) -> None:
        """One more user for each, who reads and does not write."""
        for block in block_ids:
            self._kept.pop(block, None)
            self._num_users[block] += 1

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks with no content, for one user; None (and nothing changed) if there are not that many."""
        if count > self.num_unused:
            return None
        return tuple(self._take() for _ in range(count))

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._blocks_by_hash[self._hashes.pop(block)]
        if block in self._published:
            self._published.remove(block)
            self._recycled.append(block)
        self._num_users[block] = 1
        return block

    def free(self, block_ids: Sequence[int]) -> None:
        """One user less for each of a prefix's blocks, in its order. Of those that nobody uses now the last will go first."""
        for block in reversed(block_ids):
            assert self._num_users[block] > 0, "a block is freed that nobody uses"
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            if block in self._hashes:
                self._kept[block] = None
            else:
                self._free.append(block)

    def enter(self, block: int, content: bytes) -> None:
        """The block's content is computed, and its hash is `content`. Of two blocks with one content the first is found."""
        assert self._num_users[block] > 0 and block not in self._hashes, "a block is entered once, while it is used"
        if content not in self._blocks_by_hash:
            self._blocks_by_hash[content] = block
            self._hashes[block] = content

    def mark_published(self, block_ids: Sequence[int]) -> None:
        """Peers may read these, from now on and until their memory is given to another content."""
        self._published.update(block_ids)

    def take_recycled(self) -> tuple[int, ...]:
        """Published blocks that were allocated anew since the last call."""
        recycled, self._recycled = tuple(self._recycled), []
        return recycled

    def check_invariants(self) -> None:
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & kept, "a block is free and kept"
        used = {block for block, users in enumerate(self._num_users) if users}
        assert not used & (free | kept), "a block is used and free"
        assert len(used) + len(free) + len(kept) == self.num_blocks, "a block is lost"
        assert kept <= self._hashes.keys() <= kept | used, "a block is kept that nobody can find, or found and free"
        assert {block: content for content, block in self._blocks_by_hash.items()} == self._hashes, "hashes and blocks differ"
