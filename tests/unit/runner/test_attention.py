"""Paged attention against a reference that looks at one query at a time, over a cache whose unused slots hold NaN where they may."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from triptych.config import CacheConfig, EngineConfig, ModelConfig
from triptych.media.item import MediaItem
from triptych.output import NewRequestData
from triptych.runner.attention import paged_attention
from triptych.runner.block_table import BlockTable
from triptych.runner.input_batch import InputBatch, InputBatchBuilder, TokenWindow
from triptych.runner.kv_cache import KVCache
from triptych.runner.request_state import RequestState
from triptych.sampling_params import SamplingParams
from triptych.transfer.arena import Arena

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 2, 6, 8, 4
SINKS = torch.linspace(-1, 1, NUM_HEADS)


@dataclass
class Sequence:
    """All of a request's queries, keys and values, of which a step computes [start, end)."""

    query: torch.Tensor  # [length, NUM_HEADS, HEAD_DIM]
    key: torch.Tensor  # [length, NUM_KV_HEADS, HEAD_DIM]
    value: torch.Tensor
    start: int
    end: int
    blocks: tuple[int, ...]
    items: tuple[MediaItem, ...] = ()


def sequence(seed: int, start: int, end: int, blocks: tuple[int, ...], items: tuple[MediaItem, ...] = ()) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(end, NUM_HEADS, HEAD_DIM), (end, NUM_KV_HEADS, HEAD_DIM), (end, NUM_KV_HEADS, HEAD_DIM)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return Sequence(query, key, value, start, end, blocks, items)


ITEM = MediaItem("ab" * 32, "image", ((3, 2), (6, 2)), 4)
BATCH = [
    sequence(1, 6, 7, (11, 3)),  # a decode
    sequence(2, 0, 9, (0, 14, 5), (ITEM,)),  # a whole prompt
    sequence(3, 5, 11, (8, 1, 9)),  # a later chunk
    sequence(4, 13, 14, (2, 15, 7, 4)),  # a longer decode
    sequence(5, 3, 8, (12, 13), (ITEM,)),  # a chunk that begins with an item
]


def reference(
    each: Sequence, atomic: bool, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[end - start, NUM_HEADS, HEAD_DIM], by the definition."""
    item_of = {token for first, length in (each.items[0].runs if each.items else ()) for token in range(first, first + length)}
    out = torch.empty(each.end - each.start, NUM_HEADS, HEAD_DIM)
    for i in range(each.start, each.end):
        visible = [
            j
            for j in range(each.end)
            if (j <= i or (atomic and i in item_of and j in item_of)) and (window is None or j > i - window)
        ]
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = each.key[visible, kv_head] @ each.query[i, head] / math.sqrt(HEAD_DIM)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores)
            total = weights.sum() + (0 if sinks is None else torch.exp(sinks[head]))
            out[i - each.start, head] = (weights / total) @ each.value[visible, kv_head]
    return out


def make_cache() -> KVCache:
    model = ModelConfig(Path(), "m", "m", "", "float32", 64, 10, 48, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
    config = EngineConfig(model=model, cache=CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=16))
    return KVCache(Arena.create("kv", 16, config.kv_block_nbytes), config, torch.device("cpu"))


def make_batch(cache: KVCache, sequences: list[Sequence], atomic: bool) -> InputBatch:
    table = BlockTable(1, 8, 4, BLOCK_SIZE)
    windows: list[TokenWindow] = []
    for index, each in enumerate(sequences):
        ids = tuple(range(each.end))
        data = NewRequestData(str(index), ids, each.items, SamplingParams(max_tokens=1), each.end, each.start, ())
        state = RequestState(data, np.zeros((1, each.end), np.int64), 0, table.allocate(each.blocks))
        windows.append(TokenWindow(state, each.start, each.end))
    return InputBatchBuilder(table, cache, 1, torch.int64, atomic).build(windows)


def in_batch_order(batch: InputBatch, sequences: list[Sequence]) -> list[Sequence]:
    return [sequences[int(window.request.request_id)] for window in batch.windows]


def attend(sequences: list[Sequence], layer: int = 1, atomic: bool = False, **kwargs: Any) -> list[torch.Tensor]:
    """Per sequence, in the order given: [end - start, NUM_HEADS, HEAD_DIM]."""
    cache = make_cache()
    cache.blocks[:, 1 - layer] = float("nan")  # the other layer's K and V must not be touched
    cache.blocks[[block for block in range(16) if all(block not in each.blocks for each in sequences)]] = float("nan")
    for each in sequences:
        for token in range(each.start):
            cache.blocks[each.blocks[token // BLOCK_SIZE], layer, 0, token % BLOCK_SIZE] = each.key[token]
            cache.blocks[each.blocks[token // BLOCK_SIZE], layer, 1, token % BLOCK_SIZE] = each.value[token]
    batch = make_batch(cache, sequences, atomic)
    ordered = in_batch_order(batch, sequences)
    # [1, heads, T, D]
    query, key, value = (
        torch.cat([getattr(each, name)[each.start : each.end] for each in ordered]).transpose(0, 1).unsqueeze(0)
        for name in ("query", "key", "value")
    )
    module: Any = SimpleNamespace(layer_idx=layer)
    out, weights = paged_attention(module, query, key, value, None, step=batch.attention, scaling=HEAD_DIM**-0.5, **kwargs)
    assert weights is None
    assert out.shape == (1, query.shape[2], NUM_HEADS, HEAD_DIM)
    pieces = out[0].split([each.end - each.start for each in ordered])
    by_id = {id(each): piece for each, piece in zip(ordered, pieces, strict=True)}
    return [by_id[id(each)] for each in sequences]


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("atomic", [False, True])
def test_a_ragged_batch_gives_what_the_definition_gives(
    atomic: bool, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    outs = attend(BATCH, atomic=atomic, sliding_window=window, softcap=softcap, s_aux=sinks)
    for each, out in zip(BATCH, outs, strict=True):
        torch.testing.assert_close(out, reference(each, atomic, window, softcap, sinks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sequences", [BATCH[:1], BATCH[1:2], BATCH[2:3], [BATCH[0], BATCH[3]]])
def test_batches_of_one_kind_give_what_the_definition_gives(sequences: list[Sequence], window: int | None) -> None:
    for each, out in zip(sequences, attend(sequences, sliding_window=window), strict=True):
        torch.testing.assert_close(out, reference(each, False, window, None, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["position_bias", "head_mask", "sliding_windows"])
def test_an_argument_that_it_cannot_honour_is_refused(name: str) -> None:
    unknown: dict[str, Any] = {name: 1.0}
    with pytest.raises(ValueError, match=f"does not know the argument '{name}'"):
        attend(BATCH, **unknown)


@pytest.mark.parametrize("given", [{"is_causal": False}, {"dropout": 0.1}])
def test_attention_of_another_kind_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its own masks"):
        attend(BATCH, **given)


def test_arguments_that_say_nothing_are_accepted() -> None:
    outs = attend(BATCH, position_ids=torch.zeros(1), position_bias=None, use_cache=False, is_causal=True)
    torch.testing.assert_close(outs[0], reference(BATCH[0], False, None, None, None), rtol=1e-5, atol=1e-5)
