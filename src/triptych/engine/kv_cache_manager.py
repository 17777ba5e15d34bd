"""`KVCacheManager`: which request owns which KV blocks."""

from collections.abc import Sequence

from triptych.engine.block_pool import BlockPool


class KVCacheManager:
    """A request's blocks, in the order of its tokens. Blocks leave a request by `free`, or by `give_up` to a new owner."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._blocks: dict[str, list[int]] = {}
        self._published: set[int] = set()
        self._recycled: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(self._blocks.get(request_id, ()))

    def allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for the request's first `num_tokens` tokens. The new blocks, or None (and nothing changed) if they are not there."""
        owned = self._blocks.get(request_id, [])
        missing = -(-num_tokens // self.block_size) - len(owned)
        if missing <= 0:
            return ()
        new = self._pool.allocate(missing)
        if new is not None:
            self._blocks.setdefault(request_id, []).extend(new)
        return new

    def start(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> int | None:
        """Share the longest prefix of blocks whose hashes are known and reserve the rest of `num_tokens` tokens. The number of shared blocks,
        or None (and nothing changed) if the others are not there."""
        return None if self.allocate(request_id, num_tokens) is None else 0

    def enter(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """The request's first `len(hashes)` blocks are computed."""

    def mark_published(self, block_ids: Sequence[int]) -> None:
        """Others may read the blocks: when they get another content, `take_recycled` says so."""
        self._published.update(block_ids)

    def take_recycled(self) -> tuple[int, ...]:
        """Published blocks that are given to new content since the last call."""
        recycled, self._recycled = tuple(self._recycled), []
        return recycled

    def free(self, request_id: str) -> None:
        self.reclaim(self.give_up(request_id))

    def give_up(self, request_id: str) -> tuple[int, ...]:
        """The blocks stay allocated, but belong to the caller, who returns them by `reclaim`."""
        return tuple(self._blocks.pop(request_id, ()))

    def reclaim(self, block_ids: tuple[int, ...]) -> None:
        self._pool.free(block_ids)
        self._recycled += [block_id for block_id in block_ids if block_id in self._published]
        self._published.difference_update(block_ids)

    def check_invariants(self) -> None:
        self._pool.check_invariants()
        owned = [block for blocks in self._blocks.values() for block in blocks]
        assert len(owned) == len(set(owned)), "a block belongs to two requests"
        assert len(owned) <= self._pool.num_blocks - self._pool.num_free
