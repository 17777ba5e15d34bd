import json
from pathlib import Path

import pytest

from triptych.errors import ConfigError
from triptych.models.weights import digest_weights


def write_weights(file: Path, data: bytes) -> None:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    )
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    write_weights(tmp_path / "model.safetensors", bytes(1000))
    return tmp_path


def test_the_digest_follows_the_content_not_the_place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert digest_weights(copy) == digest_weights(folder)


def test_weights_and_config_change_the_digest(folder: Path) -> None:
    digests = {digest_weights(folder)}
    write_weights(folder / "model.safetensors", bytes(999) + b"x")
    digests.add(digest_weights(folder))
    write_weights(folder / "model.safetensors", bytes(1001))
    digests.add(digest_weights(folder))
    (folder / "config.json").write_text('{"rope_theta": 2}')
    digests.add(digest_weights(folder))
    assert len(digests) == 4


def test_a_large_file_is_told_from_another_by_samples(folder: Path) -> None:
    """17 MB with every byte different: what a fine-tune changes."""
    nbytes = 17 * 1024**2
    write_weights(folder / "model.safetensors", bytes(nbytes))
    before = digest_weights(folder)
    write_weights(folder / "model.safetensors", bytes(nbytes - 1) + b"x")
    assert digest_weights(folder) != before


def test_shards_are_read_from_their_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write_weights(folder / "b.safetensors", b"123")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}))
    whole = digest_weights(folder)
    write_weights(folder / "b.safetensors", b"124")
    assert digest_weights(folder) != whole
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks b\.safetensors"):
        digest_weights(folder)


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_a_file_that_was_cut_short_is_refused(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match="download it again"):
        digest_weights(folder)


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only safetensors are read"):
        digest_weights(folder)
