from collections.abc import Callable

import pytest
import torch

from triptych.config import EngineConfig
from triptych.runner.kv_cache import KVCache, get_kv_cache_spec
from triptych.transfer.arena import Arena


@pytest.fixture
def cache(engine_config: Callable[..., EngineConfig]) -> KVCache:
    config = engine_config(num_blocks=6)
    cache = KVCache(Arena.create("kv", config.num_kv_blocks, config.kv_block_nbytes), config, torch.device("cpu"))
    cache.blocks.fill_(1.0)
    return cache


def test_a_block_is_one_page_of_the_arena(cache: KVCache) -> None:
    cache.blocks[4] = 7.0
    pages = torch.from_numpy(cache.arena.pages).view(torch.float32)
    assert pages[4].eq(7.0).all()
    assert pages[[0, 1, 2, 3, 5]].eq(1.0).all()


def test_cleared_blocks_are_zero_and_the_others_stay(cache: KVCache) -> None:
    cache.blocks[[1, 3]] = float("nan")
    cache.clear((3, 1))
    assert cache.blocks[[1, 3]].eq(0).all()
    assert cache.blocks[[0, 2, 4, 5]].eq(1).all()


@pytest.mark.parametrize(("num_tokens", "kept"), [(8, [4, 4, 0]), (6, [4, 2, 0]), (1, [1, 0, 0]), (12, [4, 4, 4])])
def test_what_lies_past_a_requests_tokens_is_cleared_in_every_layer(cache: KVCache, num_tokens: int, kept: list[int]) -> None:
    cache.clear_after((5, 0, 2), num_tokens)
    for block, count in zip((5, 0, 2), kept, strict=True):
        assert cache.blocks[block, :, :, :count].eq(1).all()
        assert cache.blocks[block, :, :, count:].eq(0).all()
    assert cache.blocks[[1, 3, 4]].eq(1).all()


def test_recycling_moves_the_generation_of_those_blocks_only(cache: KVCache) -> None:
    before = cache.arena.generations_of(range(6))
    cache.recycle((2, 5))
    moved = [new - old for new, old in zip(cache.arena.generations_of(range(6)), before, strict=True)]
    assert moved == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(("role", "num_groups"), [("E", 0), ("P", 1), ("D", 1), ("EPD", 1)])
def test_only_a_worker_with_the_language_model_has_a_kv_cache_group(
    engine_config: Callable[..., EngineConfig], role: str, num_groups: int
) -> None:
    spec = get_kv_cache_spec(engine_config(role, is_alone=False))
    assert len(spec) == num_groups
    assert all(group.block_nbytes == 3 * 2 * 4 * 2 * 16 * 4 for group in spec)  # layers, K and V, tokens, heads, width, bytes
