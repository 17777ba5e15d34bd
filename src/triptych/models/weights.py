"""`digest_weights`: a fingerprint of a model folder's weights that takes milliseconds, not the time to read them."""

from pathlib import Path

import msgspec
from blake3 import blake3

from triptych.errors import ConfigError
from triptych.models.layout.registry import read_json

_WHOLE_NBYTES = 16 * 1024**2  # files up to this size are read whole
_NUM_SAMPLES = 256  # of larger ones: so many samples, evenly spaced
_SAMPLE_NBYTES = 4096


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
    """64 hex digits over config.json and, for each weights file, its name, size, safetensors header and a sample of its data."""
    digest = blake3((model_dir / "config.json").read_bytes())
    for file in find_weights(model_dir):
        nbytes = file.stat().st_size
        digest.update(f"\0{file.name}\0{nbytes}\0".encode())
        digest.update(read_header(file))
        with file.open("rb") as stream:
            if nbytes <= _WHOLE_NBYTES:
                digest.update(stream.read())
                continue
            for sample in range(_NUM_SAMPLES):
                stream.seek(sample * (nbytes - _SAMPLE_NBYTES) // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_NBYTES))
    return digest.hexdigest()


def read_header(file: Path) -> bytes:
    """The JSON header of a safetensors file. Raises `ConfigError` when the file is none, or shorter than its header says."""
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
    return header
