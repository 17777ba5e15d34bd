"""`KVCacheManager`: which request has which KV blocks, and which of them it shares."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from triptych.engine.block_pool import BlockPool


class KVCacheManager:
    """A request's blocks, in the order of its tokens: first those that it shares with others, then its own. Blocks leave a request by `free`,
    or by `give_up` to a new owner. Hashes are those of block_hashes.py."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._blocks: dict[str, list[int]] = {}
        self._num_entered: dict[str, int] = {}  # request id -> its first blocks whose hashes are known

    @property
    def num_free_blocks(self) -> int:
        """Those that can be had: used by nobody, whatever they still hold."""
        return self._pool.num_unused

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(self._blocks.get(request_id, ()))

    def would_fit(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        without: Collection[str] = (),
        written: Collection[int] = (),
    ) -> bool:
        """Whether `allocate`, or `start` for a request that has no blocks, would find room if the requests `without` gave theirs up.
        Those that are being `written` by copies are not free before these have ended."""
        users = Counter(block for each in without for block in self._blocks.get(each, ()))
        freed = {block for block, count in users.items() if count == self._pool.num_users(block)} - set(written)
        has = self._blocks.get(request_id)
        shared = self._pool.find(hashes) if has is None else []
        room = self._pool.num_unused + len(freed) - sum(block in freed or not self._pool.num_users(block) for block in shared)
        return self.num_blocks_for(num_tokens) - len(shared if has is None else has) <= room

    def find_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of the first `hashes` are here."""
        return len(self._pool.find(hashes))

    def start(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> int | None:
        """Give a request that has no blocks those of the longest beginning of `hashes` that is here, and new ones up to `num_tokens` tokens.

        The number of shared blocks; None (and nothing changed) if there are not enough others.
        """
        assert request_id not in self._blocks, "a request starts without blocks"
        if not self.would_fit(request_id, hashes, num_tokens):
            return None
        shared = self._pool.find(hashes)
        self._pool.share(shared)
        new = self._pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(shared)))
        assert new is not None, "there is no room where there was room"
        self._blocks[request_id] = [*shared, *new]
        self._num_entered[request_id] = len(shared)
        return len(shared)

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for the request's first `num_tokens` tokens. The new blocks, or None (and nothing changed) if they are not there."""
        owned = self._blocks.get(request_id, [])
        missing = self.num_blocks_for(num_tokens) - len(owned)
        if missing <= 0:
            return ()
        new = self._pool.allocate(missing)
        if new is not None:
            self._blocks.setdefault(request_id, []).extend(new)
        return new

    def num_entered(self, request_id: str) -> int:
        return self._num_entered.get(request_id, 0)

    def enter(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """The request's first `len(hashes)` blocks are computed: who begins alike can share them."""
        first = self.num_entered(request_id)
        for block, content in zip(self._blocks[request_id][first : len(hashes)], hashes[first:], strict=True):
            self._pool.enter(block, content)
        self._num_entered[request_id] = max(first, len(hashes))

    def free(self, request_id: str) -> None:
        self._pool.free(self.give_up(request_id))

    def give_up(self, request_id: str) -> tuple[int, ...]:
        """The blocks stay in use, but by the caller, who returns them by `reclaim`."""
        self._num_entered.pop(request_id, None)
        return tuple(self._blocks.pop(request_id, ()))

    def reclaim(self, block_ids: Sequence[int]) -> None:
        self._pool.free(block_ids)

    def mark_published(self, block_ids: Sequence[int]) -> None:
        """Peers may read these, also after they were freed, until their memory is given to another content."""
        self._pool.mark_published(block_ids)

    def take_recycled(self) -> tuple[int, ...]:
        """Published blocks that hold another content from now on: their readers must notice before they are written."""
        return self._pool.take_recycled()

    def check_invariants(self, num_computed: Mapping[str, int]) -> None:
        """`num_computed`: request id -> tokens whose keys and values are there. What is still to be written has one user."""
        self._pool.check_invariants()
        writers: set[int] = set()
        for request_id, blocks in self._blocks.items():
            assert len(blocks) == len(set(blocks)), "a request has a block twice"
            own = set(blocks[num_computed.get(request_id, 0) // self.block_size :])
            assert not own & writers, "two requests write one block"
            writers |= own
        for request_id, blocks in self._blocks.items():
            read = set(blocks[: num_computed.get(request_id, 0) // self.block_size])
            assert not read & writers, "a block is written that another request reads"
