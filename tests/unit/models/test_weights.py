import json
import os
from os import SEEK_END
from pathlib import Path

import pytest

from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.models.weights import check_unchanged, digest_weights, stamp_weights


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


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "processor_config.json"])
def test_the_settings_beside_the_weights_change_the_digest(folder: Path, name: str) -> None:
    digests = {digest_weights(folder)}
    for content in ('{"size": 2}', '{"size": 3}'):
        (folder / name).write_text(content)
        digests.add(digest_weights(folder))
    assert len(digests) == 3


NBYTES = 20 * 1024**2  # more than is hashed in one piece


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text("{}")
    write_weights(folder / "model.safetensors", bytes(NBYTES))
    return folder


@pytest.mark.parametrize("place", [-NBYTES, -NBYTES // 2, -12_345_678, -4097, -1])
def test_one_other_byte_anywhere_in_a_large_file_changes_the_digest(large: Path, place: int) -> None:
    """Also where a sample would not look: an adapter merged into one layer leaves the others as they were."""
    before = digest_weights(large)
    with (large / "model.safetensors").open("r+b") as file:
        file.seek(place, SEEK_END)
        file.write(b"x")
        file.flush()
        changed = digest_weights(large)
        file.seek(place, SEEK_END)
        file.write(b"\0")
    assert changed != before
    assert digest_weights(large) == before


def test_a_file_that_is_longer_changes_the_digest(folder: Path) -> None:
    before = digest_weights(folder)
    write_weights(folder / "model.safetensors", bytes(1001))
    assert digest_weights(folder) != before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "preprocessor_config.json"])
def test_files_that_changed_since_the_start_are_refused(folder: Path, name: str) -> None:
    (folder / "preprocessor_config.json").write_text("{}")
    config = ModelConfig(
        path=folder, name="m", family="f", weights_digest=digest_weights(folder), weights_stamp=stamp_weights(folder), dtype="float32",
        max_model_len=1, vocab_size=1, hidden_size=1, num_layers=1, num_kv_heads=1, head_dim=1,
    )  # fmt: skip
    check_unchanged(config)
    status = (folder / name).stat()
    os.utime(folder / name, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ConfigError, match="have changed since the start; start router and workers again"):
        check_unchanged(config)


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
