import fcntl
import gc
import mmap
import os
import struct
from collections.abc import Callable

import numpy as np
import pytest

from triptych.errors import ConfigError, FailureReason, TransferError
from triptych.transfer.arena import Arena


def mapped(arena: Arena) -> Arena:
    return Arena.map(os.dup(arena.fd))


def test_a_peer_sees_what_the_owner_writes_and_cannot_write_itself() -> None:
    arena = Arena.create("kv", 3, 10)
    arena.pages[1] = range(10)
    peer = mapped(arena)
    assert (peer.num_pages, peer.page_nbytes) == (3, 10)
    assert peer.pages[1].tobytes() == bytes(range(10))
    arena.pages[2, 0] = 7  # also what is written after the peer mapped it
    assert peer.pages[2, 0] == 7
    for write in (lambda: peer.pages.__setitem__(0, 1), lambda: peer.recycle([0])):
        with pytest.raises(ValueError, match="read-only"):
            write()


def test_nobody_but_the_owner_can_map_it_for_writing_or_change_its_size() -> None:
    arena = Arena.create("kv", 3, 10)
    size = os.fstat(arena.fd).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, size)
    for other_size in (0, size - 1, size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, other_size)


def test_new_pages_are_zero_and_have_generation_zero() -> None:
    arena = Arena.create("kv", 5, 16)
    assert not arena.pages.any()
    assert arena.generations_of(range(5)) == (0, 0, 0, 0, 0)


def test_recycling_bumps_the_generations_of_these_pages_alone_and_peers_see_it() -> None:
    arena = Arena.create("kv", 5, 16)
    peer = mapped(arena)
    arena.recycle([1, 3])
    arena.recycle([3])
    arena.recycle([])
    assert arena.generations_of([4, 3, 2, 1, 0]) == (0, 2, 0, 1, 0)
    assert peer.generations_of([3, 1]) == (2, 1)


def test_the_layout_is_the_one_drawn_in_the_module() -> None:
    arena = Arena.create("kv", 1000, 24)  # the generations fill more than one 4096-byte block
    arena.recycle([999])
    arena.pages[0], arena.pages[999] = 1, 2
    raw = os.pread(arena.fd, os.fstat(arena.fd).st_size, 0)
    assert raw[:8] == b"triptych"[::-1]
    assert struct.unpack_from("<4Q", raw)[1:] == (1, 1000, 24)
    assert struct.unpack_from("<Q", raw, 32 + 8 * 999) == (1,)
    start = 8192  # 32 + 8000, rounded up
    assert raw[start : start + 24] == bytes([1]) * 24
    assert raw[start + 999 * 24 :] == bytes([2]) * 24


@pytest.mark.parametrize(("num_pages", "page_nbytes"), [(0, 64), (0, 0)])
def test_an_arena_may_have_no_pages(num_pages: int, page_nbytes: int) -> None:
    arena = Arena.create("none", num_pages, page_nbytes)
    arena.recycle([])
    peer = mapped(arena)
    assert arena.pages.shape == peer.pages.shape == (0, page_nbytes)
    assert peer.generations_of([]) == ()
    arena.close()


def test_memory_that_cannot_be_had_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="make the cache smaller"):
        Arena.create("huge", 2**40, 2**30)


def test_it_leaves_no_file_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    arena = Arena.create("kv", 4, 4096)
    assert set(os.listdir("/dev/shm")) == before
    assert os.readlink(f"/proc/self/fd/{arena.fd}") == "/memfd:triptych-kv (deleted)"


def test_close_is_idempotent_and_leaves_views_alone() -> None:
    arena = Arena.create("kv", 2, 8)
    fd, view = arena.fd, arena.pages[1]
    arena.close()
    arena.close()
    view[:] = 5
    assert view.tobytes() == bytes([5]) * 8
    with pytest.raises(OSError):
        os.fstat(fd)


def test_the_memory_goes_with_the_last_view() -> None:
    def num_mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("triptych-last-view" in line for line in maps)

    arena = Arena.create("last-view", 2, 8)
    view = arena.pages[1]
    peer = mapped(arena)
    assert num_mappings() == 2
    del peer
    arena.close()
    gc.collect()
    assert num_mappings() == 1
    del view, arena
    gc.collect()
    assert num_mappings() == 0


def test_an_arena_that_nobody_holds_any_more_keeps_no_descriptor() -> None:
    arena = Arena.create("forgotten", 2, 8)
    fd = arena.fd
    del arena
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(fd)


def memfd(content: bytes, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header(*, magic: bytes = b"hcytpirt", version: int = 1, num_pages: int = 2, page_nbytes: int = 8) -> bytes:
    return magic + struct.pack("<3Q", version, num_pages, page_nbytes)


def padded(head: bytes, nbytes: int = 4096 + 16) -> bytes:
    return head.ljust(nbytes, b"\0")


HOSTILE: dict[str, Callable[[], int]] = {
    "empty": lambda: memfd(b""),
    "shorter than a header": lambda: memfd(header()),
    "other magic": lambda: memfd(padded(header(magic=b"hcytpirT"))),
    "other version": lambda: memfd(padded(header(version=2))),
    "a page too many": lambda: memfd(padded(header(num_pages=3))),
    "larger pages": lambda: memfd(padded(header(page_nbytes=9))),
    "numbers that overflow": lambda: memfd(padded(header(num_pages=2**63, page_nbytes=2**63))),
    "bytes too many": lambda: memfd(padded(header(), 4096 + 17)),
    "can still shrink": lambda: memfd(padded(header()), fcntl.F_SEAL_GROW),
    "no memfd": lambda: os.open("/dev/null", os.O_RDONLY),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_memory_that_is_not_an_arena_is_a_mismatch_and_its_descriptor_is_closed(kind: str) -> None:
    fd = HOSTILE[kind]()
    with pytest.raises(TransferError) as caught:
        Arena.map(fd)
    assert caught.value.reason is FailureReason.MISMATCH
    with pytest.raises(OSError):
        os.fstat(fd)


def test_the_hostile_examples_are_wrong_in_one_thing_each() -> None:
    arena = Arena.map(memfd(padded(header())))
    assert arena.pages.shape == (2, 8)
    assert np.array_equal(arena.generations, [0, 0])
