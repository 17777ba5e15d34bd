"""`ItemFiles`: a directory of safetensors files, one per item, which all workers share.

    directory/
    ├── 3f…a1.safetensors    an item, named by its key: `rows`, [num_rows, row_width]; replaced or removed whole, never changed
    └── .9d….tmp             being written by the process that holds its lock (flock); without a lock, its writer is dead

    absent -> being written -> complete (synced, then renamed) -> removed: no other has been unused for longer and room is needed,
                                                                           or a reader has found it corrupt

Only complete files are read, and their length, header and checksum are compared before a byte is given out. A file which is removed while it is
read stays readable. A path is made of the own directory and a key of 64 hex digits, never of anything else that came from a peer.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError, FailureReason, TransferError
from triptych.media.key import KEY_PATTERN
from triptych.transfer.read_checks import checksum

_KEY = re.compile(KEY_PATTERN)
_ITEM_NAME = re.compile(rf"{KEY_PATTERN}\.safetensors")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.tmp")
_FORMAT = "triptych-item-1"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LENGTH_NBYTES = 8  # a safetensors file is: length of the header, header (JSON), tensors
_MAX_HEADER_NBYTES = 4096


class _RowsEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _ItemMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    model: str
    checksum: str


class _ItemHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: _RowsEntry
    metadata: _ItemMetadata = msgspec.field(name="__metadata__")


@dataclass(frozen=True, slots=True)
class ItemShape:
    """What an item's file must say of its rows. `model`: digest of the weights that make them."""

    num_rows: int
    row_width: int
    dtype: str
    model: str
    nbytes: int

    def to_header(self, checksum: str) -> _ItemHeader:
        rows = _RowsEntry(_DTYPES[self.dtype], (self.num_rows, self.row_width), (0, self.nbytes))
        return _ItemHeader(rows, _ItemMetadata(_FORMAT, self.model, checksum))


class ItemFiles:
    def __init__(self, directory: Path, max_nbytes: int) -> None:
        """Make the directory if need be, and clear away what dead writers left. Raises `ConfigError` if it cannot be used."""
        self._directory = directory
        self._max_nbytes = max_nbytes
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._new_file():
                self._make_room(0)
        except OSError as error:
            raise ConfigError(f"the directory {directory} of the file EC connector cannot be used ({error.strerror}).") from error

    def put(self, key: str, shape: ItemShape, content: NDArray[np.uint8]) -> str:
        """Keep the item's rows, `content` [nbytes]; not written again if they are there. The checksum of what is there now.

        Raises `TransferError` (INTERNAL) if it cannot be written.
        """
        path = self._path_of(key)
        there = _use(path, shape)
        if there is not None:
            return there
        own = _checksum(content, key)
        try:
            self._make_room(content.size)
            with self._new_file() as (temporary, file):
                file.write(_encode(shape.to_header(own)))
                file.write(content.data)
                file.flush()
                os.fsync(file.fileno())
                temporary.rename(path)
        except OSError as error:
            message = f"item {key[:12]} cannot be written to {self._directory} ({error.strerror})."
            raise TransferError(FailureReason.INTERNAL, message) from error
        return own

    def read(self, key: str, shape: ItemShape, expected_checksum: str, into: NDArray[np.uint8]) -> None:
        """Copy the item's rows into `into`, [nbytes]. Raises `TransferError`: MISSING; MISMATCH, of another shape or model; STALE, replaced
        since `expected_checksum` was given out; CORRUPT, and then the file is removed, so that it will be written again."""
        path = self._path_of(key)
        try:
            with path.open("rb") as file:
                try:
                    _read_checked(file, key, shape, expected_checksum, into)
                except TransferError as error:
                    if error.reason == FailureReason.CORRUPT:
                        _remove(path, file)
                    raise
                with suppress(OSError):  # another user's file cannot be marked as used
                    os.utime(file.fileno())
        except FileNotFoundError as error:
            raise TransferError(FailureReason.MISSING, f"item {key[:12]} is not in {self._directory} (any more).") from error
        except OSError as error:
            message = f"item {key[:12]} cannot be read from {self._directory} ({error.strerror})."
            raise TransferError(FailureReason.INTERNAL, message) from error

    def _path_of(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise TransferError(FailureReason.MISMATCH, "an item's key is not 64 hex digits.")
        return self._directory / f"{key}.safetensors"

    def _make_room(self, nbytes: int) -> None:
        """Remove what dead writers left, and items until `nbytes` more fit, those unused for longest first."""
        items: list[tuple[int, int, Path]] = []  # (last use, bytes, where)
        for path in list(self._directory.iterdir()):
            if _TEMPORARY_NAME.fullmatch(path.name):
                _remove_if_abandoned(path)
            elif _ITEM_NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):  # somebody else has removed it
                    status = path.stat()
                    items.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in items) + nbytes - self._max_nbytes
        for _, size, path in sorted(items):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

    @contextmanager
    def _new_file(self) -> Generator[tuple[Path, BufferedWriter]]:
        """A temporary file under this process's lock. It goes at the end, unless it was renamed."""
        path, file = self._create_locked()
        with file:
            try:
                yield path, file
            finally:
                path.unlink(missing_ok=True)

    def _create_locked(self) -> tuple[Path, BufferedWriter]:
        while True:
            path = self._directory / f".{secrets.token_hex(16)}.tmp"
            file = path.open("xb")
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return path, file
            file.close()  # before it was locked, somebody took it for a dead writer's and removed it


def _remove_if_abandoned(temporary: Path) -> None:
    """A live writer holds the lock of its file."""
    with suppress(FileNotFoundError, BlockingIOError), temporary.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()


def _remove(path: Path, file: BufferedReader) -> None:
    """Unless somebody has put another in its place. Where that is not allowed, whoever may write will replace it."""
    with suppress(OSError):
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            path.unlink()


def _use(path: Path, shape: ItemShape) -> str | None:
    """Mark a complete file of this shape as used, and say its checksum; None if there is none."""
    with suppress(OSError, TransferError), path.open("rb") as file:
        header = _read_header(file)
        if header == shape.to_header(header.metadata.checksum):
            os.utime(file.fileno())
            return header.metadata.checksum
    return None


def _read_checked(file: BufferedReader, key: str, shape: ItemShape, expected_checksum: str, into: NDArray[np.uint8]) -> None:
    header = _read_header(file)
    there = header.metadata.checksum
    if header != shape.to_header(there):
        raise TransferError(FailureReason.MISMATCH, f"the file of item {key[:12]} has {header}, and should have {shape}.")
    if there != expected_checksum:
        raise TransferError(FailureReason.STALE, f"the file of item {key[:12]} has been replaced since its ticket was made.")
    if file.readinto(into.data) != shape.nbytes or _checksum(into, key) != there:
        raise _corrupt("its rows have another checksum")


def _read_header(file: BufferedReader) -> _ItemHeader:
    header_nbytes = int.from_bytes(file.read(_LENGTH_NBYTES), "little")
    if not 0 < header_nbytes <= _MAX_HEADER_NBYTES:
        raise _corrupt(f"its header would have {header_nbytes} bytes")
    try:
        header = msgspec.json.decode(file.read(header_nbytes), type=_ItemHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _corrupt(f"its header is not an item's: {error}") from error
    nbytes = os.fstat(file.fileno()).st_size - _LENGTH_NBYTES - header_nbytes
    if header.rows.data_offsets != (0, nbytes):
        raise _corrupt(f"it has {nbytes} bytes of rows, and its header says {header.rows.data_offsets}")
    return header


def _encode(header: _ItemHeader) -> bytes:
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # so that the rows are aligned
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text


def _checksum(content: NDArray[np.uint8], key: str) -> str:
    return checksum(content.reshape(1, -1), (0,), content.size, key)


def _corrupt(what: str) -> TransferError:
    return TransferError(FailureReason.CORRUPT, f"an item's file is corrupt: {what}.")
