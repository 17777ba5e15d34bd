"""`Arena`: memory in pages of one size, which its owner writes and peers of the same host read through a mapping of their own.

One memfd: no file anywhere, nothing left after `kill -9`. P is num_pages, B is page_nbytes.

    0         8         16          24           32                          align(32 + 8 P, 4096)
    ┌─────────┬─────────┬───────────┬────────────┬─────────┬───┬───────────┬─────┬────────┬────────┬───┬──────────┐
    │ magic   │ version │ num_pages │ page_nbytes│ gen[0]  │ … │ gen[P-1]  │ pad │ page 0 │ page 1 │ … │ page P-1 │
    └─────────┴─────────┴───────────┴────────────┴─────────┴───┴───────────┴─────┴────────┴────────┴───┴──────────┘
      uint64    uint64    uint64      uint64       uint64 each                     B bytes each, without gaps

The owner maps it for writing, once, and then seals it: it can neither shrink (no peer's read can end in SIGBUS) nor grow, and nobody
can map it for writing again, so a peer's bug cannot reach the owner's cache. Peers map it read-only.

A page's generation says how often it was given up. The owner bumps it *before* it writes new content; a reader that finds
the same generation before and after its copy has therefore copied the old content whole.

An arena in device memory would keep the generations in such a header, on the host, and give `pages` as device memory.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError, FailureReason, TransferError

_MAGIC = 0x7472697074796368  # "triptych"
_VERSION = 1
_NUM_HEADER_FIELDS = 4
_ALIGNMENT = 4096
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python's fcntl module does not name it before 3.13
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Arena:
    """`num_pages` pages of `page_nbytes` bytes. Either may be zero: a role without a cache has an empty arena."""

    def __init__(self, fd: int, memory: mmap.mmap, num_pages: int, page_nbytes: int) -> None:
        """Not for callers: use `create` or `map`."""
        self.num_pages = num_pages
        self.page_nbytes = page_nbytes
        self.fd = fd  # of the memfd, to hand to peers; -1 in a peer's mapping
        self._memory = memory
        self._release_fd = weakref.finalize(self, close_fd, fd)  # an open descriptor would keep the memory alive
        start = _pages_start(num_pages)
        stop = start + num_pages * page_nbytes
        # [num_pages], uint64
        self.generations: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, num_pages, _NUM_HEADER_FIELDS * 8)
        # [num_pages, page_nbytes], bytes
        self.pages: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[start:stop].reshape(num_pages, page_nbytes)

    @classmethod
    def create(cls, name: str, num_pages: int, page_nbytes: int) -> Self:
        """A zeroed arena that this process owns. `name` shows in /proc only. Raises `ConfigError` if the memory cannot be had."""
        total = _total_nbytes(num_pages, page_nbytes)
        fd = os.memfd_create(f"triptych-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, total)
            memory = mmap.mmap(fd, total)
            _seal(fd)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise ConfigError(f"arena '{name}' of {total} bytes cannot be had ({error}); make the cache smaller.") from error
        header = np.frombuffer(memory, np.uint64, _NUM_HEADER_FIELDS)
        header[:] = (_MAGIC, _VERSION, num_pages, page_nbytes)
        return cls(fd, memory, num_pages, page_nbytes)

    @classmethod
    def map(cls, fd: int) -> Self:
        """A peer's arena, read-only. Takes `fd` over and closes it, also when it raises `TransferError` (MISMATCH).

        The mapping lives as long as this object or an array taken from it.
        """
        try:
            nbytes = os.fstat(fd).st_size
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS or nbytes < _ALIGNMENT:
                raise TransferError(FailureReason.MISMATCH, "the peer's memory is not a sealed arena.")
            memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransferError(FailureReason.MISMATCH, f"the peer's arena cannot be mapped ({error}).") from error
        finally:
            os.close(fd)
        header = np.frombuffer(memory, np.uint64, _NUM_HEADER_FIELDS)
        magic, version, num_pages, page_nbytes = (int(value) for value in header)
        if (magic, version) != (_MAGIC, _VERSION) or _total_nbytes(num_pages, page_nbytes) != nbytes:
            raise TransferError(
                FailureReason.MISMATCH,
                f"the peer's arena has a wrong header: version {version}, {num_pages} pages of {page_nbytes} bytes in {nbytes} bytes.",
            )
        return cls(-1, memory, num_pages, page_nbytes)

    def recycle(self, pages: Sequence[int]) -> None:
        """Give up the content of `pages`. Call it before they are written again: reads of the old content then end as STALE."""
        self.generations[list(pages)] += np.uint64(1)
        memory_fence()

    def generations_of(self, pages: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.generations[list(pages)].tolist())

    def close(self) -> None:
        """Idempotent. Arrays (and tensors) taken from `pages` stay valid: the memory goes when the last of them does."""
        self.generations = np.empty(0, np.uint64)
        self.pages = np.empty((0, self.page_nbytes), np.uint8)
        self.fd = -1
        self._release_fd()
        try:
            self._memory.close()
        except BufferError:  # somebody still holds an array; the mapping ends with it
            return


def memory_fence() -> None:
    """Order this thread's memory accesses before the call against those after it, for readers in other processes.

    x86 needs none; on ARM, releasing a lock and then acquiring one is what Python offers.
    """
    for lock in (threading.Lock(), threading.Lock()):
        with lock:
            pass


def _pages_start(num_pages: int) -> int:
    header_nbytes = 8 * (_NUM_HEADER_FIELDS + num_pages)
    return -(-header_nbytes // _ALIGNMENT) * _ALIGNMENT


def _total_nbytes(num_pages: int, page_nbytes: int) -> int:
    return _pages_start(num_pages) + num_pages * page_nbytes


def close_fd(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _seal(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:  # Linux before 5.1: peers map it read-only of their own accord
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
