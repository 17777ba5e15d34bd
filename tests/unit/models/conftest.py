"""Tiny random checkpoints, saved as the hub has them, and a dense attention in place of the runner's paged one."""

import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from triptych.models.loader import ATTENTION

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 90, 91, 92, 93

TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 24 * 28 * 28},
}


def save(model: Any, folder: Path, preprocessor: dict[str, Any] | None) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    if preprocessor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, so that its logits are not degenerate."""
    torch.manual_seed(1)
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
            "patch_size": 14,
            "window_size": 56,
        },
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=START_ID,
        vision_end_token_id=END_ID,
        tie_word_embeddings=False,
    )
    return save(Qwen2_5_VLForConditionalGeneration(config), tmp_path_factory.mktemp("qwen"), PREPROCESSOR)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    return save(LlamaForCausalLM(LlamaConfig(**TEXT)), tmp_path_factory.mktemp("llama"), None)


@pytest.fixture
def dense_attention() -> Iterator[None]:
    """Plain attention under the runner's name, for as long as the test runs: causal, in a window where a layer has one, and
    both ways where the caller's `both_ways`, [T, T], says so."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        scaling: float,
        sliding_window: int | None = None,
        both_ways: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        length, group = query.shape[2], query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
        mask = distance >= 0
        if both_ways is not None:
            mask |= both_ways
        if sliding_window is not None:
            mask &= distance < sliding_window
        output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return output.transpose(1, 2), None

    attention = AttentionInterface()
    before = attention.get(ATTENTION)
    AttentionInterface.register(ATTENTION, attend)
    yield
    if before is not None:
        AttentionInterface.register(ATTENTION, before)


@pytest.fixture(scope="session")
def png() -> Callable[[int, int], bytes]:
    """(width, height) to a file of random pixels, always the same for the same size."""

    def make(width: int, height: int) -> bytes:
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
        buffer = BytesIO()
        Image.fromarray(pixels.numpy()).save(buffer, "PNG")
        return buffer.getvalue()

    return make
