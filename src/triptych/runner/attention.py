"""Paged attention over one ragged batch, as `transformers` calls it, in plain PyTorch.

Registered under `ATTENTION` with transformers' `AttentionInterface`; every layer of a language model then calls `paged_attention`, and the
keyword `step` that the language model was given reaches it unchanged. A step's batch is one sequence of tokens: first the requests that have
one token each ("decodes"; they attend together, padded to the longest), then the others ("prefills"; one call each).

    token:   d0 d1 d2 | p0 p0 p0 p0 | p1 p1
             decodes    prefill 0     prefill 1

Everything that depends on the step but not on the layer (index tensors, masks) is made once per step, here in `AttentionStep`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from triptych.models.loader import ATTENTION
from triptych.runner.kv_cache import KVCache
from triptych.runner.request_state import NO_ITEM

# Keywords that models pass along and that mean nothing for a batch whose order, lengths and masks the step knows.
_IGNORED = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"})


@dataclass(slots=True)
class DecodeGroup:
    """`num` requests with one token each."""

    num: int
    max_length: int  # tokens of the longest, this step's included
    gather_index: Tensor  # [num_layers, 2 * num * blocks]: rows of KVCache.block_rows
    lengths: Tensor  # [num, 1]
    is_ragged: bool  # lengths differ
    masks: dict[int | None, Tensor | None] = field(default_factory=dict[int | None, Tensor | None])

    def mask(self, window: int | None) -> Tensor | None:
        """[num, 1, 1, max_length], True where a request's token looks; None if it looks everywhere. One per window size."""
        if window is not None and window >= self.max_length:
            window = None
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        if window is None and not self.is_ragged:
            return None
        index = torch.arange(self.max_length, device=self.lengths.device)
        mask = index < self.lengths
        if window is not None:
            mask &= index >= self.lengths - window
        return mask[:, None, None, :]


@dataclass(slots=True)
class PrefillWindow:
    """Tokens [start, end) of one request, which are tokens [offset, offset + end - start) of the batch."""

    offset: int
    start: int
    end: int
    gather_index: Tensor  # [num_layers, 2 * blocks]; not used when start is 0: then K and V of the window are all there is
    # [end]: token -> item; empty unless the window reads items whose tokens attend to each other in both directions
    item_indices: NDArray[np.int64]
    masks: dict[int | None, Tensor | None] = field(default_factory=dict[int | None, Tensor | None])

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """[1, 1, end - start, end], True where a token looks; None for plain causal from the first token on."""
        if window is not None and window >= self.end:
            window = None
        if window not in self.masks:
            self.masks[window] = self._make_mask(window, device)
        return self.masks[window]

    def explicit_mask(self, window: int | None, device: torch.device) -> Tensor:
        mask = self.mask(window, device)
        return self._causal(device)[None, None] if mask is None else mask

    def _make_mask(self, window: int | None, device: torch.device) -> Tensor | None:
        if self.start == 0 and window is None and not self.item_indices.size:
            return None
        mask = self._causal(device)
        if self.item_indices.size:
            items = torch.from_numpy(self.item_indices).to(device)
            own = items[self.start :, None]
            mask |= (own == items[None, :]) & (own != NO_ITEM)
        if window is not None:
            query = torch.arange(self.start, self.end, device=device)[:, None]
            mask &= torch.arange(self.end, device=device) > query - window  # bounds the past only
        return mask[None, None]

    def _causal(self, device: torch.device) -> Tensor:
        query = torch.arange(self.start, self.end, device=device)[:, None]
        return torch.arange(self.end, device=device) <= query


@dataclass(slots=True)
class AttentionStep:
    """What the layers of one step share."""

    block_rows: Tensor  # KVCache.block_rows
    token_rows: Tensor  # KVCache.token_rows
    num_tokens: int
    write_index: Tensor  # [num_layers, 2, T]: rows of KVCache.token_rows for this step's K and V
    decodes: DecodeGroup
    prefills: tuple[PrefillWindow, ...]


def make_attention_step(
    kv_cache: KVCache, slots: NDArray[np.int64], decodes: DecodeGroup, prefills: Sequence[PrefillWindow]
) -> AttentionStep:
    """`slots`, [T]: block id * block_size + offset, for each token of the batch."""
    block_size, num_layers = kv_cache.block_size, kv_cache.num_layers
    # A token's row in layer 0, K. Next half: + block_size. Next layer: + 2 * block_size.
    first = (slots // block_size) * (2 * num_layers * block_size) + slots % block_size
    steps = np.arange(2 * num_layers).reshape(num_layers, 2, 1) * block_size
    write_index = torch.from_numpy(first + steps).to(kv_cache.device, non_blocking=True)
    return AttentionStep(kv_cache.block_rows, kv_cache.token_rows, len(slots), write_index, decodes, tuple(prefills))


def make_gather_index(kv_cache: KVCache, block_ids: NDArray[np.int64]) -> Tensor:
    """Rows of `KVCache.block_rows` that hold K (first half) and V of `block_ids`, for every layer: [num_layers, 2 * num_blocks]."""
    num_layers = kv_cache.num_layers
    steps = np.arange(2 * num_layers).reshape(num_layers, 2, 1)
    index = block_ids.reshape(-1) * (2 * num_layers) + steps
    return torch.from_numpy(index.reshape(num_layers, -1)).to(kv_cache.device, non_blocking=True)


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    attention_mask: Tensor | None,
    *,
    step: AttentionStep,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Write this step's K and V into the cache, then attend; returns [1, T, Hq, D]. Raises `ValueError` for an argument that it cannot honour."""
    if attention_mask is not None or dropout or is_causal is False:
        raise ValueError("paged attention makes its own masks, which are causal, and drops nothing out.")
    for name, given in others.items():
        if given is not None and name not in _IGNORED:
            raise ValueError(f"paged attention does not know the argument '{name}' of {type(module).__name__}.")
    layer: int = module.layer_idx  # type: ignore[assignment]
    write_index = step.write_index[layer]
    step.token_rows.index_copy_(0, write_index[0], key[0].transpose(0, 1))
    step.token_rows.index_copy_(0, write_index[1], value[0].transpose(0, 1))
    how = _How(scaling, softcap, s_aux)
    num_decodes = step.decodes.num
    if num_decodes == step.num_tokens:
        return _attend_decodes(step, layer, query, key.shape[1], sliding_window, how), None
    if num_decodes == 0 and len(step.prefills) == 1:
        return _attend_prefill(step, step.prefills[0], layer, (query, key, value), sliding_window, how), None
    out = query.new_empty(1, step.num_tokens, query.shape[1], query.shape[3])
    if num_decodes:
        decodes = query[:, :, :num_decodes]
        out[:, :num_decodes] = _attend_decodes(step, layer, decodes, key.shape[1], sliding_window, how)
    for window in step.prefills:
        own = slice(window.offset, window.offset + window.end - window.start)
        inputs = (query[:, :, own], key[:, :, own], value[:, :, own])
        out[:, own] = _attend_prefill(step, window, layer, inputs, sliding_window, how)
    return out, None


@dataclass(frozen=True, slots=True)
class _How:
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None  # [Hq]: a logit per head that takes part in the softmax and gives nothing

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def _attend_decodes(step: AttentionStep, layer: int, query: Tensor, num_kv_heads: int, window: int | None, how: _How) -> Tensor:
    """[1, Hq, B, D] -> [1, B, Hq, D]"""
    group = step.decodes
    num, (num_heads, head_dim) = group.num, (query.shape[1], query.shape[3])
    # Queries of the heads that share K and V stand where a sequence would: [B, Hkv, Hq / Hkv, D]
    grouped = query[0].transpose(0, 1).reshape(num, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # [2, B, L, Hkv, D] -> K, V: [B, Hkv, L, D]
    rows = step.block_rows.index_select(0, group.gather_index[layer]).view(2, num, -1, num_kv_heads, head_dim)
    key, value = rows[:, :, : group.max_length].transpose(2, 3)
    mask = group.mask(window)
    if how.is_plain:
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=how.scaling)
    else:
        out = _attend_explicitly(grouped, key, value, mask, how)
    return out.reshape(1, num, num_heads, head_dim)


def _attend_prefill(
    step: AttentionStep, prefill: PrefillWindow, layer: int, inputs: tuple[Tensor, Tensor, Tensor], window: int | None, how: _How
) -> Tensor:
    """[1, Hq, n, D] -> [1, n, Hq, D]"""
    query, key, value = inputs
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if prefill.start > 0:
        # [2, 1, L, Hkv, D] -> K, V: [1, Hkv, end, D]; what lies past `end` in the last block is left out
        rows = step.block_rows.index_select(0, prefill.gather_index[layer]).view(2, 1, -1, num_kv_heads, head_dim)
        key, value = rows[:, :, : prefill.end].transpose(2, 3)
    if how.is_plain:
        mask = prefill.mask(window, query.device)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=how.scaling, enable_gqa=num_heads != num_kv_heads
        )
        return out.transpose(1, 2)
    # [1, Hkv, Hq / Hkv * n, D]: head by head, then token by token
    grouped = query.reshape(1, num_kv_heads, -1, head_dim)
    mask = prefill.explicit_mask(window, query.device).repeat(1, 1, num_heads // num_kv_heads, 1)
    out = _attend_explicitly(grouped, key, value, mask, how)
    return out.reshape(1, num_heads, num_tokens, head_dim).transpose(1, 2)


def _attend_explicitly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _How) -> Tensor:
    """Softcap and sinks, which PyTorch's fused attention has not. query: [B, Hkv, G * n, D], G query heads per K head."""
    scale = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
    # [B, Hkv, G * n, L]
    scores = (query @ key.transpose(2, 3)).float() * scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if how.sinks is None:
        return torch.softmax(scores, dim=-1).to(value.dtype) @ value
    per_head = how.sinks.float().view(1, key.shape[1], -1, 1)
    sinks = per_head.repeat_interleave(scores.shape[2] // per_head.shape[2], dim=2).expand(len(scores), -1, -1, 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value


AttentionInterface.register(ATTENTION, paged_attention)
