from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from triptych.demo import CHECKPOINT
from triptych.errors import MediaError, RequestError
from triptych.media.header import MediaHeader
from triptych.models.layout.adapter import ModelFiles
from triptych.models.layout.qwen_vl import QwenVLLayout
from triptych.models.layout.registry import get_layout_adapter

SETTINGS: list[dict[str, Any]] = [
    {},  # the processor's own defaults
    {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2},  # as Qwen2.5-VL's on the hub
    {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16, "merge_size": 2},  # as Qwen3-VL's
    {"size": {"shortest_edge": 784, "longest_edge": 1_000_000}, "max_pixels": 50_176},  # the second outranks the first
]


def layout(settings: Mapping[str, Any]) -> QwenVLLayout:
    return QwenVLLayout(ModelFiles(config={"image_token_id": 5}, preprocessor=settings))


def sizes(count: int) -> list[tuple[int, int]]:
    rng = Random(7)
    extreme = [(1, 1), (1, 200), (200, 1), (28, 28), (14, 14), (13, 15), (42, 42), (8000, 40), (41, 8200), (5000, 5000)]
    common = [(rng.randint(1, 2000), rng.randint(1, 2000)) for _ in range(count)]
    thin = [(rng.randint(1, 60), rng.randint(1, 6000)) for _ in range(count)]
    return [(h, w) for h, w in [*extreme, *common, *thin] if max(h, w) <= 200 * min(h, w)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_grid_and_rows_are_the_image_processors_on_hundreds_of_sizes(settings: dict[str, Any]) -> None:
    processor = Qwen2VLImageProcessorPil(**settings)
    adapter = layout(settings)
    patch, unit = processor.patch_size, processor.patch_size * processor.merge_size
    shortest, longest = processor.size["shortest_edge"], processor.size["longest_edge"]
    chosen = sizes(240)
    assert len(chosen) >= 400
    for height, width in chosen:
        found = adapter.layout(MediaHeader("image", height=height, width=width), 1)
        new_height, new_width = smart_resize(height, width, unit, shortest, longest)
        assert found.grid == (1, new_height // patch, new_width // patch), (height, width)
        assert found.num_rows == processor.get_number_of_image_patches(height, width) // processor.merge_size**2
        assert found.text == "<|image_pad|>" * found.num_rows


def test_the_grid_is_that_of_real_pixels() -> None:
    """Through the whole processor of the demo's folder, in case its arithmetic is not what it runs."""
    processor, adapter = AutoImageProcessor.from_pretrained(CHECKPOINT, backend="pil"), get_layout_adapter(CHECKPOINT)
    for height, width in [(1, 1), (30, 500), (112, 112), (200, 1), (333, 517), (2000, 1500)]:
        prepared = processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
        found = adapter.layout(MediaHeader("image", height=height, width=width), 1)
        assert list(found.grid) == prepared["image_grid_thw"][0].tolist()
        assert found.num_rows * 4 == len(prepared["pixel_values"])


@pytest.mark.parametrize(("height", "width"), [(1, 201), (4021, 20)])
def test_a_shape_that_the_processor_refuses_is_a_request_error(height: int, width: int) -> None:
    adapter = layout({})
    with pytest.raises(ValueError, match="aspect ratio"):
        smart_resize(height, width)
    with pytest.raises(MediaError, match=f"is {width} x {height}"):
        adapter.layout(MediaHeader("image", height=height, width=width), 1)


def test_a_modality_that_the_model_does_not_take_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="takes no audio input; it takes image"):
        layout({}).layout(MediaHeader("audio", samples=16_000), 1)


def test_the_settings_are_part_of_the_key_whatever_their_order() -> None:
    one, same = layout({"patch_size": 14, "merge_size": 2}), layout({"merge_size": 2, "patch_size": 14})
    assert one.processor_settings() == same.processor_settings()
    assert one.processor_settings() != layout({"patch_size": 14, "merge_size": 2, "max_pixels": 9}).processor_settings()
