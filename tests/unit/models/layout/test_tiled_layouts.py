"""Layouts of the families that cut pictures into tiles, against their image processors and the text their processors write.

A processor cannot be built without torchvision, but its methods can be called on an object that has the fields they read.
"""

from collections.abc import Callable
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.configuration_llava_onevision import LlavaOnevisionConfig
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from triptych.errors import ConfigError
from triptych.media.header import MediaHeader
from triptych.models.layout.adapter import ItemLayout, LayoutAdapter, ModelFiles
from triptych.models.layout.gemma3 import Gemma3Layout
from triptych.models.layout.idefics3 import Idefics3Layout
from triptych.models.layout.internvl import InternVLLayout
from triptych.models.layout.llava_onevision import LlavaOnevisionLayout

ID = 77


def sizes() -> list[tuple[int, int]]:
    """(height, width): common, thin, and square ones."""
    rng = Random(3)
    chosen = [(rng.randint(1, 3000), rng.randint(1, 3000)) for _ in range(200)]
    chosen += [(rng.randint(1, 50), rng.randint(1, 3000)) for _ in range(75)]
    chosen += [(rng.randint(1, 3000), rng.randint(1, 50)) for _ in range(75)]
    chosen += [(side, side) for side in range(32, 1700, 32)]
    return [*chosen, (1, 1), (448, 896), (896, 448), (384, 384), (1, 3000), (3000, 1), (5000, 4000)]


def lay_out(adapter: LayoutAdapter, height: int, width: int, items: int = 1) -> ItemLayout:
    found = adapter.layout(MediaHeader("image", height=height, width=width), items)
    assert found.row_token_id == ID
    return found


@pytest.mark.parametrize("settings", [{}, {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12}])
def test_internvl_is_laid_out_as_its_processor_does(settings: dict[str, Any]) -> None:
    processor = GotOcr2ImageProcessorPil(**settings)
    writer = SimpleNamespace(start_image_token="<img>", image_token="<IMG_CONTEXT>", end_image_token="</img>", image_seq_length=4)
    adapter = InternVLLayout(ModelFiles({"image_token_id": ID, "image_seq_length": 4}, settings))
    for height, width in sizes():
        num_tiles = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        found = lay_out(adapter, height, width)
        assert found.grid == (num_tiles,), (height, width)
        assert found.num_rows == 4 * num_tiles == found.text.count("<IMG_CONTEXT>")
        assert found.text == InternVLProcessor.replace_image_token(writer, {"num_patches": [num_tiles]}, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make_processor", "settings"),
    [
        (Idefics3ImageProcessorPil, {}),
        (Idefics3ImageProcessorPil, {"do_image_splitting": False}),
        (SmolVLMImageProcessorPil, {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}),
    ],
)
def test_idefics3_and_smolvlm_are_laid_out_as_their_processor_does(
    make_processor: Callable[..., Any], settings: dict[str, Any]
) -> None:
    processor = make_processor(**settings)
    tokens = {
        "fake_image_token": "<fake_token_around_image>",
        "global_image_tag": "<global-img>",
        "image_token": "<image>",
        "image_seq_len": 3,
    }
    adapter = Idefics3Layout(ModelFiles({"image_token_id": ID}, settings, {"image_seq_len": 3}))
    for height, width in sizes():
        num_tiles, rows, columns = processor.get_number_of_image_patches(height, width)
        found = lay_out(adapter, height, width)
        fields = {"rows": [[rows]], "cols": [[columns]]}
        assert found.text == Idefics3Processor.replace_image_token(SimpleNamespace(**tokens), fields, 0), (height, width)  # type: ignore[arg-type]
        assert found.grid == (max(num_tiles, 1),)  # the library counts no tile when there is nothing to split
        assert found.num_rows == found.text.count("<image>") == 3 * found.grid[0]


def test_idefics3_rows_follow_from_the_tower_when_no_processor_file_names_them() -> None:
    config = {"image_token_id": ID, "scale_factor": 3, "vision_config": {"image_size": 512, "patch_size": 16}}
    assert Idefics3Layout(ModelFiles(config)).rows_per_tile == 113  # floor((512 / 16)^2 / 3^2)


@pytest.mark.parametrize("num_items", [1, 2])
def test_llava_onevision_is_laid_out_as_its_processor_does(num_items: int) -> None:
    config = LlavaOnevisionConfig()
    said: dict[str, Any] = {
        "image_token_index": ID,
        "image_grid_pinpoints": config.image_grid_pinpoints,
        "vision_config": {"image_size": 384, "patch_size": 14},
    }
    adapter = LlavaOnevisionLayout(ModelFiles(said))
    writer = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    fields = {
        "num_image_tokens": 729,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
        "image_token": "<image>",
        "image_processor": SimpleNamespace(image_grid_pinpoints=config.image_grid_pinpoints),
    }
    for name, value in fields.items():
        setattr(writer, name, value)
    tile = torch.empty(1, 3, 384, 384, device="meta")
    for height, width in sizes():
        given = {"batch_num_images": [num_items], "image_sizes": [[height, width]] * num_items, "pixel_values": [tile]}
        found = lay_out(adapter, height, width, num_items)
        assert found.text == writer.replace_image_token(given, 0), (height, width)
        assert found.num_rows == found.text.count("<image>")


def test_a_llava_onevision_picture_has_another_key_among_others() -> None:
    said = {"image_token_index": ID, "image_grid_pinpoints": [[384, 384]], "vision_config": {"image_size": 384, "patch_size": 14}}
    adapter, header = LlavaOnevisionLayout(ModelFiles(said)), MediaHeader("image", height=9, width=9)
    assert adapter.key_fields(header, 1) != adapter.key_fields(header, 2) == adapter.key_fields(header, 3)
    with pytest.raises(ConfigError, match="image_grid_pinpoints are missing"):
        LlavaOnevisionLayout(ModelFiles({**said, "image_grid_pinpoints": None}))


def test_gemma3_is_laid_out_as_its_processor_does() -> None:
    adapter = Gemma3Layout(ModelFiles({"image_token_index": ID, "mm_tokens_per_image": 5}, {"do_pan_and_scan": None}))
    tokenizer = SimpleNamespace(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>", boi_token_id=1
    )
    writer = SimpleNamespace()
    with suppress(TypeError):  # its base class takes no stand-in; the text is written before that
        Gemma3Processor.__init__(writer, None, tokenizer, image_seq_length=5)  # type: ignore[arg-type]
    found = lay_out(adapter, 100, 700)
    assert found.text == writer.full_image_sequence
    assert (found.num_rows, found.grid) == (5, (1,))
    with pytest.raises(ConfigError, match="do_pan_and_scan"):
        Gemma3Layout(ModelFiles({"image_token_index": ID}, {"do_pan_and_scan": True}))
