"""`KVCache`: keys and values of all layers, in blocks.

Block-major, all layers of a block together, so that moving a block is one copy:

    [num_blocks, num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]

On the CPU the blocks are the arena's pages, so that publishing copies nothing. On another device they are device memory, and the
arena is where blocks pass through on their way to and from a peer (`stage_out`, `stage_in`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.config import EngineConfig
from triptych.transfer.arena import Arena


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One group of layers that share a block table. A worker has one group, or (encoder-only) none."""

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_nbytes: int


def get_kv_cache_spec(config: EngineConfig) -> tuple[KVCacheSpec, ...]:
    if not config.needs_kv_cache:
        return ()
    model = config.model
    return (KVCacheSpec(config.cache.block_size, model.num_layers, model.num_kv_heads, model.head_dim, config.kv_block_nbytes),)


class KVCache:
    """Owns the memory of the KV blocks; which request has which is the scheduler's business."""

    def __init__(self, arena: Arena, config: EngineConfig, device: torch.device) -> None:
        model, block_size = config.model, config.cache.block_size
        dtype = getattr(torch, model.dtype)
        shape = (arena.num_pages, model.num_layers, 2, block_size, model.num_kv_heads, model.head_dim)
        self.arena = arena
        self.block_size = block_size
        self.num_layers = model.num_layers
        self._is_staged = device.type != "cpu"
        self._pages = torch.from_numpy(arena.pages).view(dtype).view(shape)
        self.blocks = torch.zeros(shape, dtype=dtype, device=device) if self._is_staged else self._pages
        # [num_blocks * num_layers * 2, block_size * num_kv_heads * head_dim]: row (block * num_layers + layer) * 2 + (0 for K, 1 for V)
        self.block_rows = self.blocks.view(-1, block_size * model.num_kv_heads * model.head_dim)
        # [num_blocks * num_layers * 2 * block_size, num_kv_heads, head_dim]
        self.token_rows = self.blocks.view(-1, model.num_kv_heads, model.head_dim)

    @property
    def num_blocks(self) -> int:
        return self.arena.num_pages

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that begin a new life: batched attention multiplies what lies past a request's end by 0, and 0 * NaN is NaN."""
        if block_ids:
            self.blocks.index_fill_(0, self._index(block_ids), 0)

    def clear_after(self, block_ids: Sequence[int], num_tokens: int) -> None:
        """Zero what lies in `block_ids` past their first `num_tokens` tokens."""
        num_full, offset = divmod(num_tokens, self.block_size)
        if offset:
            self.blocks[block_ids[num_full], :, :, offset:] = 0
        self.clear(block_ids[num_full + bool(offset) :])

    def stage_out(self, block_ids: Sequence[int]) -> None:
        """Make the arena's pages hold what the blocks hold."""
        if self._is_staged and block_ids:
            self._pages[list(block_ids)] = self.blocks[self._index(block_ids)].cpu()

    def stage_in(self, block_ids: Sequence[int]) -> None:
        """Make the blocks hold what the arena's pages hold."""
        if self._is_staged and block_ids:
            self.blocks[self._index(block_ids)] = self._pages[list(block_ids)].to(self.device)

    def recycle(self, block_ids: Sequence[int]) -> None:
        """Published blocks are given up: a peer which still reads them will notice."""
        if block_ids:
            self.arena.recycle(block_ids)

    def close(self) -> None:
        self.arena.close()

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self.device)
