"""`load_model`: a model, or only its tower, or only its language model, read from the safetensors files.

A part is the family's own class with the other part's modules replaced by empty ones before any memory is allocated (the library
builds on the meta device). `from_pretrained` then reads what is left, under whatever names the checkpoint has.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from inspect import signature
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoImageProcessor
from transformers.utils import logging

from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.models.adapter import Model, ModelAdapter
from triptych.models.gemma3 import Gemma3Adapter
from triptych.models.idefics3 import Idefics3Adapter
from triptych.models.internvl import InternVLAdapter
from triptych.models.layout.registry import get_layout_adapter, read_json
from triptych.models.llava_onevision import LlavaOnevisionAdapter
from triptych.models.qwen_vl import Qwen3VLAdapter, QwenVLAdapter
from triptych.models.weights import check_unchanged

ATTENTION = "triptych"  # the name under which runner/attention.py registers itself; must be registered before a load

_ADAPTERS: Mapping[str, type[ModelAdapter]] = {
    "qwen2_vl": QwenVLAdapter,
    "qwen2_5_vl": QwenVLAdapter,
    "qwen3_vl": Qwen3VLAdapter,
    "qwen3_vl_moe": Qwen3VLAdapter,
    "internvl": InternVLAdapter,
    "llava_onevision": LlavaOnevisionAdapter,
    "gemma3": Gemma3Adapter,
    "idefics3": Idefics3Adapter,
    "smolvlm": Idefics3Adapter,
}


ModelClass = Any  # a subclass of PreTrainedModel; see `Model`


class Parts(Enum):
    FULL = "full"
    TOWER = "tower"
    LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    adapter: ModelAdapter


class Absent(nn.Module):
    """In place of a module that this part of the model does not have."""


def load_model(
    config: ModelConfig,
    parts: Parts = Parts.FULL,
    device: str | torch.device = "cpu",
    progress: Callable[[float], None] = lambda _: None,
) -> LoadedModel:
    """In eval mode, without gradients, on `device`; `progress` is told the share of tensors read, 0 to 1.

    Raises `ConfigError` when the installed transformers does not know the model, or the checkpoint lacks tensors or has changed.
    """
    model_class = _model_class(config)
    check_unchanged(config)
    adapter_class, layout = _ADAPTERS.get(config.family, ModelAdapter), get_layout_adapter(config.path)
    has_tower = hasattr(model_class, "get_image_features")
    if parts is Parts.TOWER and not has_tower:
        raise ConfigError(f"model '{config.name}' takes text only, so there is nothing for an encode worker to load.")
    model = _read(model_class if parts is Parts.FULL else _part_of(model_class, parts), config, parts, has_tower, progress)
    model.eval().requires_grad_(False)
    model.to(torch.device(device))
    progress(1.0)
    if not has_tower or parts is Parts.LANGUAGE_MODEL:
        return LoadedModel(model, adapter_class(layout))
    processor = AutoImageProcessor.from_pretrained(config.path, backend="pil")
    return LoadedModel(model, adapter_class(layout, processor, tuple(signature(model.base_model.get_image_features).parameters)))


def _model_class(config: ModelConfig) -> ModelClass:
    architecture = read_json(config.path / "config.json")["architectures"][0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ConfigError(f"transformers {transformers.__version__} has no {architecture}; a newer version may.")
    return model_class


def _part_of(model_class: ModelClass, parts: Parts) -> ModelClass:
    """A class that the library takes for `model_class` (it looks checkpoint conversions up by name), but builds one part only."""

    def init(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        _strip(self, parts)

    names = {"__init__": init, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), {**names, "_keys_to_ignore_on_load_unexpected": [r".*"]})


def _strip(model: Model, parts: Parts) -> None:
    """The language model is the decoder and the head; the tower is every other child of the model and of its base."""
    decoder, base = model.get_decoder(), model.base_model
    kept = [decoder, model.get_output_embeddings()]
    language_model = {id(weight) for module in kept if module is not None for weight in module.parameters()}
    for parent in (model, base):
        for name, child in list(parent.named_children()):
            weights = list(child.parameters())
            if child is base or decoder is parent or not weights:  # in a text-only model the base is the decoder
                continue
            is_language_model = all(id(weight) in language_model for weight in weights)
            if is_language_model != (parts is Parts.LANGUAGE_MODEL):
                setattr(parent, name, Absent())
    if parts is Parts.TOWER:
        model.all_tied_weights_keys = {}  # head and embedding, which are tied, are both absent


def _read(
    model_class: ModelClass, config: ModelConfig, parts: Parts, has_tower: bool, progress: Callable[[float], None]
) -> Model:
    attention: Any = {"text_config": ATTENTION} if has_tower else ATTENTION
    with _quiet(progress):
        try:
            model, report = model_class.from_pretrained(
                config.path,
                dtype=getattr(torch, config.dtype),
                attn_implementation="sdpa" if parts is Parts.TOWER else attention,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"model '{config.name}' cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"the checkpoint of '{config.name}' lacks {len(missing)} tensors, for example {missing[0]}.")
    return model


@contextmanager
def _quiet(progress: Callable[[float], None]) -> Generator[None]:
    """Send the library's progress bar to `progress`, and keep its warnings (of weights that we leave unread) to itself."""

    def count(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        items = list(args[0])
        for index, item in enumerate(items):
            progress(index / len(items))
            yield item

    verbosity = logging.get_verbosity()
    previous = logging.set_tqdm_hook(count)
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(previous)
