from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration

from triptych.demo import CHECKPOINT
from triptych.errors import ConfigError
from triptych.models.inspect import resolve_model
from triptych.models.loader import Parts, load_model

pytestmark = pytest.mark.usefixtures("dense_attention")


def names_and_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("checkpoint", ["demo", "random"])
def test_the_two_parts_hold_exactly_the_parameters_of_the_whole(checkpoint: str, qwen_folder: Path) -> None:
    folder = CHECKPOINT if checkpoint == "demo" else qwen_folder
    config = resolve_model(folder)
    whole = names_and_values(Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32))
    tower = names_and_values(load_model(config, Parts.TOWER).model)
    language_model = names_and_values(load_model(config, Parts.LANGUAGE_MODEL).model)
    assert tower.keys() == {name for name in whole if name.startswith("model.visual.")}
    assert language_model.keys() == whole.keys() - tower.keys()
    for name, value in {**tower, **language_model}.items():
        assert torch.equal(value, whole[name])  # a meta tensor would raise


def test_a_loaded_model_is_ready_to_serve(qwen_folder: Path) -> None:
    told: list[float] = []
    loaded = load_model(resolve_model(qwen_folder, dtype="bfloat16"), Parts.FULL, progress=told.append)
    assert not loaded.model.training
    assert {(p.requires_grad, p.dtype) for p in loaded.model.parameters()} == {(False, torch.bfloat16)}
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) > 2


def test_nothing_is_printed_while_loading(qwen_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for parts in Parts:
        load_model(resolve_model(qwen_folder), parts)
    assert capfd.readouterr() == ("", "")


def test_a_text_only_model_loads_whole_and_as_language_model(llama_folder: Path) -> None:
    config = resolve_model(llama_folder)
    whole = names_and_values(AutoModelForCausalLM.from_pretrained(llama_folder))
    for parts in (Parts.FULL, Parts.LANGUAGE_MODEL):
        assert names_and_values(load_model(config, parts).model).keys() == whole.keys()
    with pytest.raises(ConfigError, match="takes text only"):
        load_model(config, Parts.TOWER)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_the_part_that_needs_it(
    qwen_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in qwen_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(qwen_folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight") and "visual" not in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = resolve_model(tmp_path)
    load_model(config, Parts.TOWER)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors, for example model\.language_model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(config, Parts.LANGUAGE_MODEL)
    assert capfd.readouterr() == ("", "")  # the sentence is all that is said
