"""`resolve_model`: what a model folder says about itself, read from its JSON files before any weight is loaded. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.config import ModelConfig
from triptych.demo import CHECKPOINT
from triptych.errors import ConfigError
from triptych.models.layout.registry import get_layout_adapter, read_json
from triptych.models.weights import digest_weights, stamp_weights

DEMO = "demo"
DTYPES = ("float32", "bfloat16", "float16")

# Only what our paged attention computes: every layer reads all earlier keys, or a window of them.
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Settings of language models that keep other state than keys and values per layer, or share it: setting -> what it is.
_OTHER_STATE = {
    "num_kv_shared_layers": "layers that share keys and values",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "mamba_d_conv": "state-space layers",
    "ssm_cfg": "state-space layers",
    "conv_L_cache": "convolution layers",
    "kv_lora_rank": "latent attention",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "alibi": "biases by distance (ALiBi)",
}

# What hub checkpoints of these families leave out of config.json, from the family's configuration class in transformers.
_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}


def resolve_model(
    path_or_name: str | Path,
    *,
    name: str | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    device: str = "auto",
) -> ModelConfig:
    """Everything that workers and router need to know about a model, or one `ConfigError` that says why it cannot be served.

    `path_or_name` is "demo", a local folder, or a model's name on the Hugging Face hub. `dtype` "auto" is the checkpoint's
    own on "cuda", and float32 on any other `device` (this module does not look for a GPU: its caller knows).
    """
    path = _find_folder(path_or_name)
    config = read_json(path / "config.json")
    text = text_config(config)
    _check_family(config, text)
    get_layout_adapter(path)  # raises for a multimodal family without a layout
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"'{path}' has no tokenizer.json; convert the tokenizer to the fast format and save it there.")
    heads = _positive(text, "num_attention_heads")
    hidden_size = _positive(text, "hidden_size")
    return ModelConfig(
        path=path,
        name=name or (path.name if Path(path_or_name).is_dir() else str(path_or_name)),
        family=config["model_type"],
        weights_stamp=stamp_weights(path),  # taken before the digest, so that a change meanwhile is noticed
        weights_digest=digest_weights(path),
        dtype=_resolve_dtype(dtype, config, text, device),
        max_model_len=_resolve_length(max_model_len, text),
        vocab_size=_positive(text, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=_positive(text, "num_hidden_layers"),
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden_size // heads,
        num_feature_levels=1 + len(config.get("vision_config", {}).get("deepstack_visual_indexes") or ()),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's settings: nested in newer multimodal checkpoints, at the top in older and in text-only ones."""
    text = config.get("text_config") or config
    return {**_TEXT_DEFAULTS.get(text.get("model_type", ""), {}), **text}


def read_eos_token_ids(path: Path) -> tuple[int, ...]:
    """The ids that end a generation: generation_config.json's, else config.json's; empty if neither names one."""
    generation = path / "generation_config.json"
    config = read_json(path / "config.json")
    places = [read_json(generation) if generation.is_file() else {}, config, text_config(config)]
    for place in places:
        ids = place.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _find_folder(path_or_name: str | Path) -> Path:
    if str(path_or_name) == DEMO:
        return CHECKPOINT
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return path.resolve()
    # 0.25 s to import, and only needed here
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(str(path_or_name), allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except HFValidationError:
        raise ConfigError(f"no folder '{path_or_name}'; give a model folder, a model's name on the hub, or {DEMO}.") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix("Got: ").rstrip(".")
        raise ConfigError(f"no folder '{path_or_name}', and no such model could be had from the hub ({why}).") from None


def _check_family(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Refuse what the engine would compute wrongly; see the tables above."""
    family = config.get("model_type")
    if not family or not config.get("architectures"):
        raise ConfigError("config.json names no model_type or no architectures; is it a causal language model's?")
    if not str(config["architectures"][0]).endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise ConfigError(f"{config['architectures'][0]} generates no text; Triptych serves causal language models.")
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"family '{family}' is an encoder-decoder; Triptych serves causal language models.")
    if config.get("quantization_config"):
        raise ConfigError(f"this checkpoint of family '{family}' is quantised, which is not supported; take the original one.")
    other = [what for setting, what in _OTHER_STATE.items() if text.get(setting)]
    other += [f"layers of type {kind}" for kind in text.get("layer_types") or () if kind not in _LAYER_TYPES]
    if other:
        raise ConfigError(f"family '{family}' is not attention-only: its language model has {other[0]}, which is not supported.")
    kinds = _rope_types(text.get("rope_parameters") or text.get("rope_scaling") or {})
    moving = kinds & {"dynamic", "longrope", "su"}
    if moving:
        raise ConfigError(
            f"rope_type '{min(moving)}' makes a request's positions depend on the others in its batch, which is not supported."
        )


def _rope_types(parameters: Mapping[str, Any]) -> set[str]:
    """`rope_type` (once called `type`); some families have one set of parameters per type of layer."""
    kinds = {parameters.get("rope_type") or parameters.get("type") or "default"}
    for nested in parameters.values():
        if isinstance(nested, Mapping):
            kinds |= _rope_types(nested)
    return kinds


def _positive(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"config.json's {key} is {value!r}; the language model needs a positive number there.")
    return value


def _resolve_dtype(dtype: str, config: Mapping[str, Any], text: Mapping[str, Any], device: str) -> str:
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"dtype '{dtype}' is not known; choose auto, {', '.join(DTYPES)}.")
        return dtype
    if not device.startswith("cuda"):
        return "float32"
    places = (config, text)
    stored = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), "bfloat16")
    if stored not in DTYPES:
        raise ConfigError(f"the checkpoint's dtype is '{stored}'; set --dtype to one of {', '.join(DTYPES)}.")
    return stored


def _resolve_length(max_model_len: int | None, text: Mapping[str, Any]) -> int:
    longest = _positive(text, "max_position_embeddings")
    if max_model_len is None:
        return longest
    if not 0 < max_model_len <= longest:
        raise ConfigError(
            f"max_model_len is {max_model_len}; this model's own limit is {longest}, and it must be greater than 0."
        )
    return max_model_len
