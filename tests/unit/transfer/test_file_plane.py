"""What is the file data plane's alone: its files."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from triptych.errors import ConfigError, FailureReason, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.file import FileDataPlane
from triptych.transfer.ticket import Ticket


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def arena() -> Arena:
    made = Arena.create("ec", 4, 100)
    made.pages[:] = np.arange(400, dtype=np.uint16).reshape(4, 100) % 251
    return made


@pytest.fixture
def producer(tmp_path: Path, clock: Clock, arena: Arena) -> Iterator[FileDataPlane]:
    with closing(FileDataPlane("../../e0", tmp_path, clock=clock)) as plane:
        plane.register("../ec", arena)
        yield plane


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[FileDataPlane]:
    with closing(FileDataPlane("p0", tmp_path)) as plane:
        yield plane


def files_of(plane: FileDataPlane, directory: Path) -> list[Path]:
    return sorted(path for path in (directory / plane.address).iterdir() if path.name != "owner")


def reason_of(consumer: FileDataPlane, ticket: Ticket) -> FailureReason:
    with pytest.raises(TransferError) as caught:
        consumer.read(ticket, Arena.create("to", 4, 100), range(len(ticket.pages))).result(10.0)
    return caught.value.reason


def test_a_ticket_is_one_safetensors_file_with_the_content(producer: FileDataPlane, tmp_path: Path) -> None:
    ticket = producer.publish("../ec", [1, 0], 150, 5.0)
    (file,) = files_of(producer, tmp_path)
    expected = bytes(n % 251 for n in range(100, 200)) + bytes(range(50))
    assert load_file(file)["content"].tobytes() == expected
    assert ticket.planes == {"file": producer.address}


def test_file_names_are_digests_whatever_workers_and_arenas_are_called(producer: FileDataPlane, tmp_path: Path) -> None:
    producer.publish("../ec", [1, 0], 150, 5.0)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    stems = {part.removesuffix(".safetensors") for name in names for part in name.split("/")}
    assert all(len(stem) == 32 and set(stem) <= set("0123456789abcdef") for stem in stems - {"owner"})


def test_publishing_the_same_content_again_renews_its_lease(producer: FileDataPlane, clock: Clock, tmp_path: Path) -> None:
    producer.publish("../ec", [1], 100, 5.0)
    inode = files_of(producer, tmp_path)[0].stat().st_ino
    clock.now_s = 4.0
    producer.publish("../ec", [1], 100, 5.0)
    clock.now_s = 8.9
    producer.sweep()
    assert [file.stat().st_ino for file in files_of(producer, tmp_path)] == [inode]
    clock.now_s = 9.0
    producer.sweep()
    assert files_of(producer, tmp_path) == []


def test_a_file_goes_when_its_lease_ends_and_is_missing_then(
    producer: FileDataPlane, consumer: FileDataPlane, clock: Clock, tmp_path: Path
) -> None:
    ticket = producer.publish("../ec", [1], 100, 5.0)
    clock.now_s = 5.0
    producer.publish("../ec", [2], 100, 5.0)  # sweeps
    assert len(files_of(producer, tmp_path)) == 1
    assert reason_of(consumer, ticket) is FailureReason.MISSING


def test_a_file_goes_when_its_pages_are_recycled(producer: FileDataPlane, arena: Arena, tmp_path: Path) -> None:
    producer.publish("../ec", [1, 2], 200, 5.0)
    producer.publish("../ec", [3], 100, 5.0)
    arena.recycle([2])
    producer.sweep()
    assert len(files_of(producer, tmp_path)) == 1


def test_an_unswept_file_delivers_what_was_published_although_its_pages_are_others_now(
    producer: FileDataPlane, consumer: FileDataPlane, arena: Arena
) -> None:
    ticket = producer.publish("../ec", [1], 100, 5.0)
    arena.recycle([1])
    arena.pages[1] = 0xEE
    destination = Arena.create("to", 1, 100)
    consumer.read(ticket, destination, [0]).result(10.0)
    assert destination.pages[0].tobytes() == bytes(n % 251 for n in range(100, 200))


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def overwrite(file: Path) -> None:
    file.write_bytes(b"\x80\x04\x95" * 100)


def flip_a_bit(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def read_metadata(file: Path) -> dict[str, str]:
    raw = file.read_bytes()
    return msgspec.json.decode(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut short": shorten,
    "empty": empty,
    "a bit flipped": flip_a_bit,
    "no safetensors": overwrite,
    "far too long": lambda file: os.truncate(file, 10**9),
    "somebody else's": lambda file: save_file({"content": np.zeros(150, np.uint8)}, file),
    "fewer bytes": lambda file: save_file({"content": np.zeros(149, np.uint8)}, file, read_metadata(file)),
    "more bytes": lambda file: save_file({"content": np.zeros(151, np.uint8)}, file, read_metadata(file)),
    "other numbers": lambda file: save_file({"content": np.zeros(150, np.float32)}, file, read_metadata(file)),
    "another shape": lambda file: save_file({"content": np.zeros((1, 150), np.uint8)}, file, read_metadata(file)),
    "another name": lambda file: save_file({"tensor": np.zeros(150, np.uint8)}, file, read_metadata(file)),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("verify_checksums", [True, False])
def test_a_damaged_file_is_corrupt(producer: FileDataPlane, tmp_path: Path, kind: str, verify_checksums: bool) -> None:
    ticket = producer.publish("../ec", [1, 0], 150, 5.0)
    DAMAGE[kind](files_of(producer, tmp_path)[0])
    with closing(FileDataPlane("p0", tmp_path, verify_checksums=verify_checksums)) as consumer:
        if kind == "a bit flipped" and not verify_checksums:
            consumer.read(ticket, Arena.create("to", 4, 100), [0, 1]).result(10.0)  # only the checksum can tell
        else:
            assert reason_of(consumer, ticket) is FailureReason.CORRUPT


def test_a_file_that_is_far_too_long_is_not_even_opened(producer: FileDataPlane, consumer: FileDataPlane, tmp_path: Path) -> None:
    ticket = producer.publish("../ec", [1, 0], 150, 5.0)
    (file,) = files_of(producer, tmp_path)
    save_file({"content": np.zeros(100_000, np.uint8)}, file, read_metadata(file))
    with pytest.raises(TransferError, match="too long"):
        consumer.read(ticket, Arena.create("to", 4, 100), [0, 1]).result(10.0)


def test_a_file_that_is_still_being_written_is_missing(
    producer: FileDataPlane, consumer: FileDataPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = producer.publish("../ec", [1], 100, 5.0)
    seen: list[FailureReason] = []

    def fsync(fd: int) -> None:
        seen.append(reason_of(consumer, msgspec.structs.replace(ticket, pages=(2,))))

    monkeypatch.setattr(os, "fsync", fsync)
    producer.publish("../ec", [2], 100, 5.0)
    assert seen == [FailureReason.MISSING]


def test_a_disk_that_is_full_fails_the_publish_and_leaves_nothing(
    producer: FileDataPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(TransferError, match="No space left"):
        producer.publish("../ec", [2], 100, 5.0)
    assert files_of(producer, tmp_path) == []
    producer.sweep()


def test_what_a_killed_worker_left_stays_readable_until_the_next_one_starts(tmp_path: Path, consumer: FileDataPlane) -> None:
    script = """
import sys, msgspec
from pathlib import Path
from triptych.transfer.arena import Arena
from triptych.transfer.file import FileDataPlane
plane = FileDataPlane("e0", Path(sys.argv[1]))
plane.register("ec", Arena.create("ec", 1, 100))
print(msgspec.json.encode(plane.publish("ec", [0], 100, 60.0)).decode(), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    ticket = msgspec.json.decode(process.stdout.readline(), type=Ticket)
    FileDataPlane("p1", tmp_path).close()  # starts while the producer lives, and spares it
    process.kill()
    process.communicate()
    consumer.read(ticket, Arena.create("to", 1, 100), [0]).result(10.0)
    FileDataPlane("p1", tmp_path).close()
    assert not (tmp_path / ticket.planes["file"]).exists()
    assert (tmp_path / consumer.address).exists()
    assert reason_of(consumer, ticket) is FailureReason.PEER_LOST


def test_strangers_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "owner").touch()
    (tmp_path / "readme.txt").touch()
    FileDataPlane("p1", tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "readme.txt"}


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        FileDataPlane("p1", tmp_path / "file")
