"""`digest_weights`: a fingerprint of what a model computes: one other byte of weights or settings gives another."""

from pathlib import Path

import msgspec
from blake3 import blake3

from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.models.layout.registry import read_json

_SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json")


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header; its `__metadata__` has none of these fields."""

    data_offsets: tuple[int, int] = (0, 0)  # first byte and one past the last, after the header


def find_weights(model_dir: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` would read. Raises `ConfigError` when there are none, or one is missing."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(f"'{model_dir}' has no model.safetensors (nor an index of shards); only safetensors are read.")
    files = [model_dir / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ConfigError(
            f"'{model_dir}' lacks {', '.join(missing[:3]) or 'weights'}, which its index names; was it copied whole?"
        )
    return files


def digest_weights(model_dir: Path) -> str:
    """64 hex digits over the names and all bytes of the weights and of the JSON files that say how they are used.

    Nothing is sampled: two models that differ in one tensor would share keys, and give each other's answers. A start reads the files once more
    for it, with all cores (3 GiB/s each), and the loads that follow find them in memory. Raises `ConfigError` for files that are damaged.
    """
    for file in find_weights(model_dir):
        _check_length(file)
    digest = blake3(max_threads=blake3.AUTO)
    for file in _digested_files(model_dir):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update_mmap(file)
    return digest.hexdigest()


def stamp_weights(model_dir: Path) -> str:
    """Sizes and times of the files that `digest_weights` reads: while it stays the same, so does the digest."""
    stats = [file.stat() for file in _digested_files(model_dir)]
    return ",".join(f"{stat.st_size}:{stat.st_mtime_ns}" for stat in stats)


def check_unchanged(config: ModelConfig) -> None:
    """Raise `ConfigError` when the files are others than those whose digest stands in `config`, as after an update in place."""
    if config.weights_stamp not in ("", stamp_weights(config.path)):
        raise ConfigError(
            f"the files of '{config.path}' have changed since the start; start router and workers again, so that none mixes old and new."
        )


def _digested_files(model_dir: Path) -> list[Path]:
    return [*filter(Path.is_file, (model_dir / name for name in _SETTINGS)), *find_weights(model_dir)]


def _check_length(file: Path) -> None:
    """Raise `ConfigError` when the file is no safetensors file, or is shorter or longer than its header says."""
    nbytes = file.stat().st_size
    with file.open("rb") as stream:
        header_nbytes = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(header_nbytes, nbytes))
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    except msgspec.DecodeError:
        raise ConfigError(f"'{file}' is no safetensors file, or its beginning is damaged; download it again.") from None
    expected = 8 + header_nbytes + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if nbytes != expected:
        raise ConfigError(f"'{file}' has {nbytes} bytes where its header says {expected}; download it again.")
