"""Which layout serves which family, by config.json's `model_type`; and the reading of the files it is computed from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.errors import ConfigError
from triptych.models.layout.adapter import LayoutAdapter, ModelFiles
from triptych.models.layout.gemma3 import Gemma3Layout
from triptych.models.layout.idefics3 import Idefics3Layout
from triptych.models.layout.internvl import InternVLLayout
from triptych.models.layout.llava_onevision import LlavaOnevisionLayout
from triptych.models.layout.qwen_vl import QwenVLLayout

MULTIMODAL_LAYOUTS: Mapping[str, type[LayoutAdapter]] = {
    "qwen2_vl": QwenVLLayout,
    "qwen2_5_vl": QwenVLLayout,
    "qwen3_vl": QwenVLLayout,
    "qwen3_vl_moe": QwenVLLayout,
    "internvl": InternVLLayout,
    "llava_onevision": LlavaOnevisionLayout,
    "gemma3": Gemma3Layout,
    "idefics3": Idefics3Layout,
    "smolvlm": Idefics3Layout,
}

_TOWER_CONFIGS = ("vision_config", "audio_config", "thinker_config")


def get_layout_adapter(model_dir: Path) -> LayoutAdapter:
    """The layout of the model in `model_dir`. Raises `ConfigError` for a multimodal family without one, or for missing files."""
    config = read_json(model_dir / "config.json")
    layout_class = find_layout_class(config)
    if layout_class is LayoutAdapter:
        return LayoutAdapter(ModelFiles(config))
    return layout_class(read_model_files(model_dir, config))


def find_layout_class(config: Mapping[str, Any]) -> type[LayoutAdapter]:
    """By `model_type`; a model without a tower takes text only."""
    family = config.get("model_type", "")
    if family in MULTIMODAL_LAYOUTS:
        return MULTIMODAL_LAYOUTS[family]
    if any(key in config for key in _TOWER_CONFIGS):
        known = ", ".join(sorted(MULTIMODAL_LAYOUTS))
        raise ConfigError(f"multimodal family '{family}' is not supported; supported are {known}, and text-only models.")
    return LayoutAdapter


def read_model_files(model_dir: Path, config: Mapping[str, Any]) -> ModelFiles:
    """Newer checkpoints keep the image processor's settings inside processor_config.json, older ones in a file of their own.

    With both, those inside outrank the others, as in transformers' `AutoImageProcessor`, which prepares the pixels.
    """
    path = model_dir / "processor_config.json"
    processor = read_json(path) if path.exists() else {}
    path = model_dir / "preprocessor_config.json"
    preprocessor = processor.get("image_processor") or (read_json(path) if path.exists() else None)
    if preprocessor is None:
        raise ConfigError(f"'{model_dir}' has no preprocessor_config.json; a model that takes pictures needs it.")
    return ModelFiles(config=config, preprocessor=preprocessor, processor=processor)


def read_json(path: Path) -> dict[str, Any]:
    """Raises `ConfigError` when the file is missing or is no JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"'{path.parent}' has no readable {path.name} ({error.strerror}); is it a model folder?") from None
    except ValueError as error:
        raise ConfigError(f"'{path}' is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"'{path}' holds no JSON object.")
    return content
