"""Tiny random models, one per family, saved as the hub has them; and prompts about pictures for them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from triptych.config import MediaConfig
from triptych.media.header import read_header
from triptych.media.item import MediaItem
from triptych.models.layout.adapter import ItemLayout, find_items
from triptych.models.layout.registry import get_layout_adapter

IMAGE = 90
SIZES = [(60, 60), (120, 30), (31, 150)]  # (width, height)


def noise(seed: int, size: tuple[int, int]) -> bytes:
    """A picture of random pixels; `size` is (width, height)."""
    buffer = BytesIO()
    Image.frombytes("RGB", size, Random(seed).randbytes(3 * size[0] * size[1])).save(buffer, "PNG")
    return buffer.getvalue()


TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
QWEN_VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
SQUARE_56 = {"size": {"height": 56, "width": 56}}


@dataclass(frozen=True)
class Family:
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    oracle_options: dict[str, Any] = field(default_factory=dict[str, Any])  # how its processor class calls the image processor
    types_name: str = ""  # what it calls the marks of media tokens


def qwen(vision: dict[str, Any], text: dict[str, Any] | None = None) -> Family:
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 24 * 28 * 28}
    config = {
        "text_config": {**TEXT, **MROPE, **(text or {})},
        "vision_config": {**QWEN_VISION, **vision},
        "image_token_id": IMAGE,
    }
    patch_size = vision.get("patch_size", 14)
    preprocessor = {"image_processor_type": "Qwen2VLImageProcessor", "size": size, "patch_size": patch_size}
    return Family(
        {**config, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
        preprocessor,
        {},
        "mm_token_type_ids",
    )


IDEFICS: dict[str, Any] = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {**VISION, "image_size": 28, "patch_size": 7},
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "tie_word_embeddings": False,
}
DEEPSTACK = {"deepstack_visual_indexes": [0, 1], "patch_size": 16, "num_position_embeddings": 64}

FAMILIES = {
    "qwen2_vl": qwen({"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 14}),
    "qwen2_5_vl": qwen({"fullatt_block_indexes": [1], "window_size": 56, "patch_size": 14}),
    "qwen3_vl": qwen(DEEPSTACK),
    "qwen3_vl_moe": qwen(DEEPSTACK, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "internvl": Family(
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**VISION, "image_size": [56, 56], "patch_size": [14, 14]},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "GotOcr2ImageProcessor", **SQUARE_56, "max_patches": 4},
        {"crop_to_patches": True},
    ),
    "llava_onevision": Family(
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                **VISION,
                "model_type": "siglip_vision_model",
                "image_size": 56,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]],
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            **SQUARE_56,
            "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]],
        },
    ),
    "gemma3": Family(
        {
            "text_config": {
                **TEXT,
                "head_dim": 8,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            },
            "vision_config": {
                **VISION,
                "model_type": "siglip_vision_model",
                "image_size": 56,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "Gemma3ImageProcessor", **SQUARE_56, "do_pan_and_scan": None},
        types_name="token_type_ids",
    ),
    "idefics3": Family(
        IDEFICS,
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
    ),
    "smolvlm": Family(
        IDEFICS,
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
    ),
}


@dataclass(frozen=True)
class Case:
    """A saved model, the whole of it in memory, and three pictures."""

    name: str
    family: Family
    folder: Path
    whole: Any
    files: list[bytes]

    def lay_out(self, data: bytes, items_in_request: int) -> ItemLayout:
        return get_layout_adapter(self.folder).layout(read_header(data, MediaConfig()), items_in_request)

    def tower_inputs_of_the_library(self, files: Sequence[bytes]) -> dict[str, Any]:
        """As its processor class would make them, for all pictures of a request."""
        processor = transformers.AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        images = [Image.open(BytesIO(data)).convert("RGB") for data in files]
        prepared = processor(images=[images], return_tensors="pt", **self.family.oracle_options)
        return {name: value for name, value in prepared.items() if name not in ("num_patches", "num_crops")}


def save_tiny_model(name: str, folder: Path, files: list[bytes]) -> Case:
    family = FAMILIES[name]
    config = transformers.AutoConfig.for_model(name, **family.config)
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for weight_name, weight in whole.named_parameters():
        if weight_name.endswith("mm_input_projection_weight"):  # Gemma 3's is zero at first, and so would be every picture's rows
            torch.nn.init.normal_(weight)
    whole.save_pretrained(folder)
    save_tokenizer(name, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    return Case(name, family, folder, whole, files)


# By the start of a family's name: what stands for a picture in the template, the token of its rows, and those beside them.
PICTURE_TOKENS = {
    "qwen": ("<|image_pad|>", "<|image_pad|>"),
    "internvl": ("<IMG_CONTEXT>", "<IMG_CONTEXT>", "<img>", "</img>"),
    "llava": ("<image>", "<image>"),
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "idefics3": ("<image>", "<image>", "<fake_token_around_image>", "<global-img>"),
    "smolvlm": ("<image>", "<image>", "<fake_token_around_image>", "<global-img>"),
}
TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{{ part.text if part.type == 'text' else 'PLACEHOLDER' }}{% endfor %}{% endif %}{% endfor %}:"""


def save_tokenizer(name: str, folder: Path) -> None:
    """A token per printable character, then the family's own, as the model's configuration numbers them; and a chat template."""
    placeholder, row, *others = next(tokens for start, tokens in PICTURE_TOKENS.items() if name.startswith(start))
    characters = {chr(code): index for index, code in enumerate(range(32, 32 + 79), 1)}
    ids = {**characters, "?!": 80, row: IMAGE, **{token: IMAGE + index for index, token in enumerate(others, 2)}}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="?!"))
    tokenizer.pre_tokenizer = Split("", "isolated")  # type: ignore[assignment]  # the library's stubs know no setter
    tokenizer.add_special_tokens([row, *others])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", placeholder))


def build_prompt(layouts: list[ItemLayout]) -> tuple[list[int], list[MediaItem]]:
    """With a separator in the middle of each item, where a family may have some."""
    ids = [1, 2]
    for layout in layouts:
        ids += [7, *[IMAGE] * layout.num_rows, 8]
    ids += [3, 4, 5]
    runs = find_items(ids, layouts)
    return ids, [MediaItem("0" * 64, "image", run, each.num_rows, each.grid) for run, each in zip(runs, layouts, strict=True)]
