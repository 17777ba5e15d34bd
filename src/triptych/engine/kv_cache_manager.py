"""`KVCacheManager`: which request owns which KV blocks."""

from triptych.engine.block_pool import BlockPool


class KVCacheManager:
    """A request's blocks, in the order of its tokens. Blocks leave a request by `free`, or by `give_up` to a new owner."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._blocks: dict[str, list[int]] = {}

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

    def free(self, request_id: str) -> None:
        self._pool.free(self._blocks.pop(request_id, ()))

    def give_up(self, request_id: str) -> tuple[int, ...]:
        """The blocks stay allocated, but belong to the caller, who returns them by `reclaim`."""
        return tuple(self._blocks.pop(request_id, ()))

    def reclaim(self, block_ids: tuple[int, ...]) -> None:
        self._pool.free(block_ids)

    def check_invariants(self) -> None:
        self._pool.check_invariants()
        owned = [block for blocks in self._blocks.values() for block in blocks]
        assert len(owned) == len(set(owned)), "a block belongs to two requests"
        assert len(owned) <= self._pool.num_blocks - self._pool.num_free
