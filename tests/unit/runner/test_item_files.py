"""A directory of items under everything that can happen to its files."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from triptych.errors import ConfigError, FailureReason, TransferError
from triptych.runner import item_files
from triptych.runner.item_files import ItemFiles, ItemShape

KEY, OTHER = "a" * 64, "b" * 64
SHAPE = ItemShape(num_rows=3, row_width=5, dtype="bfloat16", model="d" * 64, nbytes=30)
MIB = 1024**2


def content_of(seed: int, nbytes: int = SHAPE.nbytes) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def read(files: ItemFiles, key: str, checksum: str, shape: ItemShape = SHAPE) -> bytes:
    into = np.zeros(shape.nbytes, np.uint8)
    files.read(key, shape, checksum, into)
    return into.tobytes()


def reason_of(action: Callable[[], Any]) -> FailureReason:
    with pytest.raises(TransferError) as caught:
        action()
    return caught.value.reason


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def use(path: Path, seconds: int) -> None:
    """As if it had been used last at that time."""
    os.utime(path, (seconds, seconds))


@pytest.fixture
def files(tmp_path: Path) -> ItemFiles:
    return ItemFiles(tmp_path, MIB)


# --- the format


def test_an_item_is_one_safetensors_file_of_its_key_that_other_programs_can_read(files: ItemFiles, tmp_path: Path) -> None:
    checksum = files.put(KEY, SHAPE, content_of(1))
    assert names_in(tmp_path) == [f"{KEY}.safetensors"]
    path = tmp_path / f"{KEY}.safetensors"
    rows = load_file(path)["rows"]
    assert (rows.dtype, tuple(rows.shape)) == (torch.bfloat16, (3, 5))
    assert rows.view(torch.uint8).numpy().tobytes() == content_of(1).tobytes()
    with safe_open(path, framework="numpy") as opened:
        assert opened.metadata() == {"format": "triptych-item-1", "model": "d" * 64, "checksum": checksum}


def test_the_checksum_is_blake3_over_the_rows_and_the_key(files: ItemFiles) -> None:
    assert files.put(KEY, SHAPE, content_of(1)) == blake3(content_of(1).tobytes() + KEY.encode()).hexdigest()[:16]


def test_a_file_that_another_program_wrote_just_so_is_an_item(files: ItemFiles, tmp_path: Path) -> None:
    rows = torch.from_numpy(content_of(1).copy()).view(torch.bfloat16).view(3, 5)
    checksum = blake3(content_of(1).tobytes() + KEY.encode()).hexdigest()[:16]
    metadata = {"format": "triptych-item-1", "model": "d" * 64, "checksum": checksum}
    save_file({"rows": rows}, tmp_path / f"{KEY}.safetensors", metadata)
    assert read(files, KEY, checksum) == content_of(1).tobytes()


@pytest.mark.parametrize(
    "key", ["", "a" * 63, "a" * 65, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n", "\0" * 64, "é" * 64, "a" * 10**6]
)
def test_a_key_that_is_not_64_hex_digits_names_no_file(files: ItemFiles, tmp_path: Path, key: str) -> None:
    assert reason_of(lambda: files.put(key, SHAPE, content_of(1))) is FailureReason.MISMATCH
    assert reason_of(lambda: read(files, key, "0" * 16)) is FailureReason.MISMATCH
    assert names_in(tmp_path) == []


# --- writing


def test_an_item_that_is_there_is_not_written_again_but_counts_as_used(files: ItemFiles, tmp_path: Path) -> None:
    first = files.put(KEY, SHAPE, content_of(1))
    path = tmp_path / f"{KEY}.safetensors"
    inode = path.stat().st_ino
    use(path, 1000)
    # The same picture from another batch: other last bits. The ticket must be for what is there.
    assert files.put(KEY, SHAPE, content_of(2)) == first
    assert path.stat().st_ino == inode
    assert path.stat().st_mtime > time.time() - 3600
    assert read(files, KEY, first) == content_of(1).tobytes()


@pytest.mark.parametrize(
    "shape", [replace(SHAPE, model="e" * 64), replace(SHAPE, dtype="float16"), replace(SHAPE, num_rows=5, row_width=3)]
)
def test_a_file_of_another_shape_or_model_is_replaced_whole(files: ItemFiles, tmp_path: Path, shape: ItemShape) -> None:
    files.put(KEY, shape, content_of(1))
    path = tmp_path / f"{KEY}.safetensors"
    raw = path.read_bytes()
    with path.open("rb") as opened_before:
        checksum = files.put(KEY, SHAPE, content_of(2))
        assert opened_before.read() == raw, "who was reading the old file goes on reading it"
    assert read(files, KEY, checksum) == content_of(2).tobytes()


def test_nobody_sees_a_file_that_is_still_being_written(
    files: ItemFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[FailureReason] = []

    def fsync(_: int) -> None:
        seen.append(reason_of(lambda: read(files, KEY, "0" * 16)))

    monkeypatch.setattr(os, "fsync", fsync)
    checksum = files.put(KEY, SHAPE, content_of(1))
    assert seen == [FailureReason.MISSING]
    assert read(files, KEY, checksum) == content_of(1).tobytes()


def test_two_who_write_one_item_at_once_leave_one_complete_file(
    files: ItemFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ItemFiles(tmp_path, MIB)
    inner: list[str] = []

    def fsync(_: int) -> None:
        monkeypatch.undo()
        inner.append(other.put(KEY, SHAPE, content_of(2)))

    monkeypatch.setattr(os, "fsync", fsync)
    outer = files.put(KEY, SHAPE, content_of(1))
    assert names_in(tmp_path) == [f"{KEY}.safetensors"]
    assert read(files, KEY, outer) == content_of(1).tobytes()
    # The other's ticket is for rows that are not there any more: an error that a new ticket heals.
    assert reason_of(lambda: read(files, KEY, inner[0])) is FailureReason.STALE
    assert read(other, KEY, other.put(KEY, SHAPE, content_of(2))) == content_of(1).tobytes()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_what_cannot_be_written_fails_alone_with_a_sentence_and_leaves_nothing(
    files: ItemFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fsync(_: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(TransferError, match=f"cannot be written to {tmp_path} .{error.strerror}") as caught:
            files.put(KEY, SHAPE, content_of(1))
    assert caught.value.reason is FailureReason.INTERNAL
    assert names_in(tmp_path) == []
    assert read(files, KEY, files.put(KEY, SHAPE, content_of(1))) == content_of(1).tobytes()


def test_a_directory_that_went_away_fails_the_item_and_not_more(tmp_path: Path) -> None:
    files = ItemFiles(tmp_path / "items", MIB)
    (tmp_path / "items").rmdir()
    assert reason_of(lambda: files.put(KEY, SHAPE, content_of(1))) is FailureReason.INTERNAL
    assert reason_of(lambda: read(files, KEY, "0" * 16)) is FailureReason.MISSING


@pytest.mark.parametrize("where", ["a file/items", "/proc/nowhere"])
def test_a_directory_that_cannot_be_used_is_a_configuration_error(tmp_path: Path, where: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match="of the file EC connector cannot be used"):
        ItemFiles(tmp_path / where, MIB)


def test_a_directory_that_cannot_be_written_to_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        ItemFiles(tmp_path, MIB)


# --- writers that died


WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from triptych.runner import item_files
from triptych.runner.item_files import ItemFiles, ItemShape

def hang(_):
    print("writing", flush=True)
    sys.stdin.read()

os.fsync = hang
ItemFiles(Path(sys.argv[1]), 2**20).put("c" * 64, ItemShape(3, 5, "bfloat16", "d" * 64, 30), np.zeros(30, np.uint8))
"""


def test_what_a_writer_leaves_is_kept_while_it_lives_and_removed_when_it_is_dead(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    (temporary,) = names_in(tmp_path)
    files = ItemFiles(tmp_path, MIB)
    files.put(KEY, SHAPE, content_of(1))
    assert names_in(tmp_path) == [temporary, f"{KEY}.safetensors"]
    process.kill()
    process.communicate()
    files.put(OTHER, SHAPE, content_of(1))
    assert names_in(tmp_path) == [f"{KEY}.safetensors", f"{OTHER}.safetensors"]


def test_a_writer_whose_file_was_taken_for_a_dead_ones_before_it_had_the_lock_starts_again(
    files: ItemFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = item_files.fcntl.flock
    num_taken = 0

    def flock_after_a_sweep(file: Any, operation: int) -> None:
        nonlocal num_taken
        if num_taken < 2:
            num_taken += 1
            for temporary in tmp_path.glob(".*.tmp"):
                temporary.unlink()
        flock(file, operation)

    monkeypatch.setattr(item_files.fcntl, "flock", flock_after_a_sweep)
    checksum = files.put(KEY, SHAPE, content_of(1))
    assert num_taken == 2
    assert read(files, KEY, checksum) == content_of(1).tobytes()
    assert names_in(tmp_path) == [f"{KEY}.safetensors"]


# --- room


def test_the_items_unused_for_longest_go_first_and_strangers_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(bytes(10_000))
    (tmp_path / f"{'A' * 64}.safetensors").write_bytes(bytes(10_000))
    ItemFiles(tmp_path, MIB).put("0" * 64, SHAPE, content_of(0))
    files = ItemFiles(tmp_path, 3 * (tmp_path / f"{'0' * 64}.safetensors").stat().st_size)
    for number in (1, 2):
        files.put(str(number) * 64, SHAPE, content_of(number))
    for number, seconds in ((0, 3000), (1, 1000), (2, 2000)):
        use(tmp_path / f"{str(number) * 64}.safetensors", seconds)
    read(files, "1" * 64, blake3(content_of(1).tobytes() + b"1" * 64).hexdigest()[:16])  # used now
    files.put("3" * 64, SHAPE, content_of(3))
    assert {name[0] for name in names_in(tmp_path)} == {"n", "A", "0", "1", "3"}
    files.put("4" * 64, SHAPE, content_of(4))
    assert {name[0] for name in names_in(tmp_path)} == {"n", "A", "1", "3", "4"}


def test_a_file_that_is_removed_while_it_is_read_is_read_to_its_end(
    files: ItemFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum = files.put(KEY, SHAPE, content_of(1))
    read_header = item_files._read_header  # pyright: ignore[reportPrivateUsage]

    def remove_first(file: Any) -> Any:
        (tmp_path / f"{KEY}.safetensors").unlink()
        return read_header(file)

    monkeypatch.setattr(item_files, "_read_header", remove_first)
    assert read(files, KEY, checksum) == content_of(1).tobytes()
    assert reason_of(lambda: read(files, KEY, checksum)) is FailureReason.MISSING


# --- reading


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut in its length": lambda raw: raw[:5],
    "cut in its header": lambda raw: raw[:40],
    "cut in its rows": lambda raw: raw[:-1],
    "longer than its header says": lambda raw: raw + b"\0",
    "a bit of its rows flipped": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "a header of a terabyte": lambda raw: (2**40).to_bytes(8, "little") + raw[8:],
    "a header of nothing": lambda raw: bytes(8) + raw[8:],
    "no safetensors": lambda raw: b"\x80\x04\x95" * 100,
    "rows that start elsewhere": lambda raw: raw.replace(b"[0,30]", b"[1,30]"),
    "rows that are another's": lambda raw: raw.replace(b'"rows"', b'"tokn"'),
    "no UTF-8": lambda raw: raw.replace(b"triptych", b"\xff\xfetych"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_corrupt_and_is_removed_so_that_it_can_be_written_again(
    files: ItemFiles, tmp_path: Path, kind: str
) -> None:
    checksum = files.put(KEY, SHAPE, content_of(1))
    path = tmp_path / f"{KEY}.safetensors"
    raw = path.read_bytes()
    path.write_bytes(DAMAGE[kind](raw))
    assert path.read_bytes() != raw
    assert reason_of(lambda: read(files, KEY, checksum)) is FailureReason.CORRUPT
    assert names_in(tmp_path) == []
    assert files.put(KEY, SHAPE, content_of(1)) == checksum
    assert read(files, KEY, checksum) == content_of(1).tobytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_done_to_a_file_it_gives_its_rows_or_a_transfer_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("items")
    files = ItemFiles(directory, MIB)
    checksum = files.put(KEY, SHAPE, content_of(1))
    path = directory / f"{KEY}.safetensors"
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        stop = data.draw(st.integers(start, min(len(raw), start + 9)))
        raw[start:stop] = data.draw(st.binary(max_size=9))
    path.write_bytes(raw)
    try:
        assert read(files, KEY, checksum) == content_of(1).tobytes()
    except TransferError as error:
        assert error.reason in {FailureReason.CORRUPT, FailureReason.MISMATCH, FailureReason.STALE}


@pytest.mark.parametrize(
    "shape", [replace(SHAPE, model="e" * 64), replace(SHAPE, dtype="float16"), replace(SHAPE, num_rows=5, row_width=3)]
)
def test_a_file_of_another_shape_or_model_than_expected_is_a_mismatch_and_stays(
    files: ItemFiles, tmp_path: Path, shape: ItemShape
) -> None:
    checksum = files.put(KEY, shape, content_of(1))
    assert reason_of(lambda: read(files, KEY, checksum)) is FailureReason.MISMATCH
    assert names_in(tmp_path) == [f"{KEY}.safetensors"]


def test_a_file_under_the_name_of_another_item_is_corrupt(files: ItemFiles, tmp_path: Path) -> None:
    checksum = files.put(KEY, SHAPE, content_of(1))
    (tmp_path / f"{KEY}.safetensors").rename(tmp_path / f"{OTHER}.safetensors")
    assert reason_of(lambda: read(files, OTHER, checksum)) is FailureReason.CORRUPT


def test_a_corrupt_file_that_has_been_replaced_meanwhile_is_not_removed(
    files: ItemFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum = files.put(KEY, SHAPE, content_of(1))
    path = tmp_path / f"{KEY}.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"!")
    read_header = item_files._read_header  # pyright: ignore[reportPrivateUsage]

    def replace_first(file: Any) -> Any:
        (tmp_path / "new").write_bytes(raw)
        (tmp_path / "new").rename(path)
        return read_header(file)

    with monkeypatch.context() as patch:
        patch.setattr(item_files, "_read_header", replace_first)
        assert reason_of(lambda: read(files, KEY, checksum)) is FailureReason.CORRUPT
    assert read(files, KEY, checksum) == content_of(1).tobytes()
