import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.demo import CHECKPOINT
from triptych.errors import ConfigError
from triptych.models.inspect import read_eos_token_ids, resolve_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that passes every check, with an empty weights file."""
    write_config(tmp_path, LLAMA)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def test_the_demo_resolves_to_what_its_config_says() -> None:
    config, said = resolve_model("demo"), json.loads((CHECKPOINT / "config.json").read_text())
    text = said["text_config"]
    assert (config.path, config.name, config.family) == (CHECKPOINT, "demo", "qwen2_5_vl")
    assert (config.hidden_size, config.num_layers) == (text["hidden_size"], text["num_hidden_layers"])
    assert config.num_kv_heads == text["num_key_value_heads"]
    assert config.head_dim == text["hidden_size"] // text["num_attention_heads"]
    assert config.row_width == text["hidden_size"]
    assert config.max_model_len == text["max_position_embeddings"]


def test_flat_and_nested_configs_of_one_model_say_the_same(qwen_folder: Path, tmp_path: Path) -> None:
    """Hub checkpoints of Qwen2-VL have the language model's settings at the top."""
    nested = json.loads((qwen_folder / "config.json").read_text())
    flat = {**nested.pop("text_config"), **nested}
    for file in qwen_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_config(tmp_path, flat)
    one, other = resolve_model(qwen_folder, name="m"), resolve_model(tmp_path, name="m")
    fields = ("family", "vocab_size", "hidden_size", "num_layers", "num_kv_heads", "head_dim", "max_model_len")
    assert [getattr(one, each) for each in fields] == [getattr(other, each) for each in fields]


def test_a_folder_is_served_under_its_name_or_the_one_given(folder: Path) -> None:
    assert resolve_model(folder).name == folder.name
    assert resolve_model(folder, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [("auto", "cpu", "float32"), ("auto", "auto", "float32"), ("auto", "cuda:1", "bfloat16"), ("float16", "cpu", "float16")],
)
def test_dtype_auto_depends_on_the_device(folder: Path, dtype: str, device: str, expected: str) -> None:
    assert resolve_model(folder, dtype=dtype, device=device).dtype == expected


def test_deepstack_levels_widen_a_row(qwen_folder: Path, tmp_path: Path) -> None:
    for file in qwen_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((qwen_folder / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [5, 11, 17]
    write_config(tmp_path, config)
    assert resolve_model(tmp_path).row_width == 4 * 32


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "not attention-only.*linear_attention"),
        ({"linear_num_value_heads": 4}, "linear attention"),
        ({"num_kv_shared_layers": 2}, "share keys and values"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope_type 'dynamic'"),
        ({"alibi": True}, "ALiBi"),
        ({"architectures": ["BertModel"]}, "BertModel generates no text"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"model_type": "kosmos", "vision_config": {}}, "multimodal family 'kosmos' is not supported; supported are"),
        ({"architectures": None}, "names no model_type or no architectures"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(folder: Path, change: dict[str, Any], says: str) -> None:
    resolve_model(folder, device="cuda")
    write_config(folder, {**LLAMA, **change})
    with pytest.raises(ConfigError, match=says):
        resolve_model(folder, device="cuda")


@pytest.mark.parametrize("rope", [{"rope_type": "yarn"}, {"type": "mrope", "mrope_section": [1, 1, 2]}, {"rope_type": "llama3"}])
def test_rope_that_depends_on_the_request_alone_is_taken(folder: Path, rope: dict[str, Any]) -> None:
    write_config(folder, {**LLAMA, "rope_scaling": rope})
    assert resolve_model(folder).num_layers == 2


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"has no .*{name}"):
        resolve_model(folder)


def test_a_model_that_takes_pictures_needs_its_preprocessor(qwen_folder: Path, tmp_path: Path) -> None:
    for file in qwen_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert resolve_model(tmp_path).family == "qwen2_5_vl"


def test_broken_files_are_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json' is not valid JSON"):
        resolve_model(folder)


@pytest.mark.parametrize("length", [0, -1, 513])
def test_a_length_that_the_model_does_not_have_is_refused(folder: Path, length: int) -> None:
    assert resolve_model(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match=f"max_model_len is {length}; this model's own limit is 512"):
        resolve_model(folder, max_model_len=length)


def test_an_unknown_dtype_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'int8' is not known; choose auto, float32"):
        resolve_model(folder, dtype="int8")


def test_a_name_that_is_neither_folder_nor_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, says in (("no-such/model", ", and no such model could be had from the hub"), ("../x", "; give a model folder")):
        with pytest.raises(ConfigError, match=f"no folder '{name}'{says}"):
            resolve_model(name)


def test_end_of_sequence_ids_come_from_generation_config_first(folder: Path) -> None:
    assert read_eos_token_ids(folder) == ()
    write_config(folder, {**LLAMA, "eos_token_id": 7})
    assert read_eos_token_ids(folder) == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert read_eos_token_ids(folder) == (2, 0)


def test_the_router_side_imports_neither_torch_nor_transformers() -> None:
    script = """
import sys
import triptych.media.fetch, triptych.media.header, triptych.media.key, triptych.models.inspect, triptych.models.layout.registry
from triptych.models.inspect import resolve_model
from triptych.models.layout.registry import get_layout_adapter
get_layout_adapter(resolve_model("demo").path)
print([name for name in ("torch", "transformers", "numpy", "huggingface_hub") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
