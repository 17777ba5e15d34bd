"""`FileDataPlane`: through a shared directory of safetensors files, for debugging and for hosts that share nothing else.

    directory/                    the same for all workers
    ├── 3f…a1/                    one worker's, under a random name: its address
    │   ├── owner                 locked (flock) while the worker lives
    │   ├── 0b…77.safetensors     one published item: `content`, uint8 [nbytes]
    │   └── .9d….tmp              being written
    └── .new-77…0c/               a worker that is just starting

A published file never changes: publish writes a copy, and only a whole file gets its name (written beside it, synced, renamed). So a
read needs no generations: it finds what was published, or nothing. Files go when their lease ends, when their pages are recycled
(`sweep`, which every publish calls) and with `close`. After `kill -9` they stay readable until the next worker that
starts with the directory finds the owner's lock free and removes them.

All names are digests or random numbers made here; what a peer sends is only ever compared or hashed.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Lock
from time import monotonic

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from triptych.errors import ConfigError, FailureReason, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.arena_registry import ArenaRegistry
from triptych.transfer.data_plane import DataPlane
from triptych.transfer.lease import LeaseTable
from triptych.transfer.read_checks import check_content, check_ticket, copy_pages, part_to_read
from triptych.transfer.read_pool import ReadPool
from triptych.transfer.ticket import Ticket

_ADDRESS = re.compile(r"[0-9a-f]{32}")
_OWNER = "owner"
_MAX_FILE_OVERHEAD_NBYTES = 64 * 1024  # the safetensors header


class FileDataPlane(DataPlane):
    """`directory` is made if it is not there. Raises `ConfigError` if it cannot be used."""

    name = "file"

    def __init__(
        self,
        worker_id: str,
        directory: Path,
        num_threads: int = 2,
        verify_checksums: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(ArenaRegistry(worker_id, with_checksums=verify_checksums))
        self._verify_checksums = verify_checksums
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_dead_owners(directory)
            self._address, self._owner_fd = _make_own_directory(directory)
        except OSError as error:
            raise ConfigError(f"the directory {directory} of the file data plane cannot be used ({error.strerror}).") from error
        self._lock = Lock()  # of _leases and _published
        self._leases = LeaseTable(clock)  # by file name
        self._published: dict[str, Ticket] = {}  # by file name
        self._pool = ReadPool(num_threads, "file-read")

    @property
    def address(self) -> str:
        """The name of this worker's own directory in the shared one, which may be mounted elsewhere on another host."""
        return self._address

    def publish(
        self, name: str, pages: Sequence[int], nbytes: int, lease_s: float, subject: str = "", *, is_divisible: bool = False
    ) -> Ticket:
        """As the interface says; returns when the file is there. Raises `TransferError` (INTERNAL) if it cannot be written."""
        self.sweep()
        ticket = super().publish(name, pages, nbytes, lease_s, subject, is_divisible=is_divisible)
        file_name = _file_name(ticket)
        with self._lock:
            if file_name not in self._published:
                self._write(ticket, file_name)
            self._published[file_name] = ticket
            self._leases.grant(file_name, lease_s)
        return ticket

    def sweep(self) -> None:
        """Remove the files whose lease has ended or whose pages were recycled, since nobody may read them any more."""
        with self._lock:
            ended = set(self._leases.expired())
            for file_name, ticket in self._published.items():
                if self._registry.get(ticket.arena).generations_of(ticket.pages) != ticket.generations:
                    ended.add(file_name)
            for file_name in ended:
                self._leases.release(file_name)
                del self._published[file_name]
                (self._directory / self.address / file_name).unlink(missing_ok=True)

    def read(self, ticket: Ticket, arena: Arena, pages: Sequence[int], num_skipped: int = 0) -> "Future[None]":
        result: Future[None] = Future()
        try:
            part = part_to_read(ticket, num_skipped)
            address = check_ticket(part, self.name, arena, pages)
            if not _ADDRESS.fullmatch(address):
                raise TransferError(FailureReason.MISMATCH, "the ticket's address is not a file data plane's.")
        except TransferError as error:
            result.set_exception(error)
            return result
        self._pool.start(result, partial(self._load, ticket, part, address, arena, tuple(pages)))
        return result

    def close(self) -> None:
        self._pool.close()
        with self._lock:
            if self._owner_fd < 0:
                return
            self._published.clear()
            shutil.rmtree(self._directory / self.address, ignore_errors=True)
            os.close(self._owner_fd)
            self._owner_fd = -1

    def _write(self, ticket: Ticket, file_name: str) -> None:
        own = self._directory / self.address
        # [len(pages), page_nbytes], cut to the content below
        rows = np.empty((len(ticket.pages), ticket.page_nbytes), np.uint8)
        arena = self._registry.get(ticket.arena)
        copy_pages(arena.pages, ticket.pages, rows, range(len(ticket.pages)), ticket.nbytes)
        data = save({"content": rows.reshape(-1)[: ticket.nbytes]}, metadata=_metadata(ticket))
        temporary = own / f".{secrets.token_hex(16)}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(own / file_name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            message = f"the item cannot be written to the shared directory ({error.strerror})."
            raise TransferError(FailureReason.INTERNAL, message) from error

    def _load(self, ticket: Ticket, part: Ticket, address: str, arena: Arena, pages: tuple[int, ...]) -> None:
        start = ticket.nbytes - part.nbytes
        content = self._content_of(ticket, self._directory / address / _file_name(ticket), start)
        # [len(pages), page_nbytes]: the content, and nothing of interest after it
        rows = np.zeros((len(pages), arena.page_nbytes), np.uint8)
        rows.reshape(-1)[: min(content.size, part.nbytes)] = content[: part.nbytes]
        copy_pages(rows, range(len(pages)), arena.pages, pages, part.nbytes)
        check_content(part, arena, pages, nbytes_arrived=content.size, verify_checksum=self._verify_checksums)

    def _content_of(self, ticket: Ticket, path: Path, start: int) -> NDArray[np.uint8]:
        """What the file holds from byte `start` on, uint8. All that can be wrong with a file is MISSING, PEER_LOST or CORRUPT."""
        try:
            if path.stat().st_size > ticket.nbytes + _MAX_FILE_OVERHEAD_NBYTES:
                raise TransferError(FailureReason.CORRUPT, "the published file is too long.")
            with safe_open(path, framework="numpy") as file:
                if file.metadata() != _metadata(ticket) or list(file.keys()) != ["content"]:
                    raise TransferError(FailureReason.CORRUPT, "the published file is not the ticket's.")
                # An empty tensor cannot be sliced.
                content: NDArray[np.uint8] = file.get_slice("content")[start:] if start else file.get_tensor("content")
        except SafetensorError as error:
            raise TransferError(FailureReason.CORRUPT, f"the published file is broken ({error}).") from error
        except OSError as error:
            if path.parent.is_dir():
                raise TransferError(FailureReason.MISSING, f"{ticket.producer} has no such item (any more).") from error
            raise TransferError(FailureReason.PEER_LOST, f"{ticket.producer} has gone, its directory with it.") from error
        if content.dtype != np.uint8 or content.ndim != 1:
            raise TransferError(FailureReason.CORRUPT, "the published file holds no bytes.")
        return content


def _metadata(ticket: Ticket) -> dict[str, str]:
    return {"format": "triptych-1", "producer": ticket.producer, "arena": ticket.arena, "checksum": ticket.checksum}


def _file_name(ticket: Ticket) -> str:
    """A digest of what tells published contents of one worker apart. The same pages in the same generations are the same content."""
    pages = (ticket.arena, ticket.pages, ticket.generations, ticket.page_nbytes, ticket.nbytes)
    identity = (ticket.producer, *pages, ticket.subject)
    return f"{blake3(repr(identity).encode()).hexdigest()[:32]}.safetensors"


def _make_own_directory(directory: Path) -> tuple[str, int]:
    """The new directory's name, and the descriptor that holds its lock. It gets its name only once it is locked."""
    address = secrets.token_hex(16)
    unborn = directory / f".new-{address}"
    unborn.mkdir(mode=0o700)
    fd = os.open(unborn / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    unborn.rename(directory / address)
    return address, fd


def _remove_dead_owners(directory: Path) -> None:
    for owned in directory.iterdir():
        if _ADDRESS.fullmatch(owned.name):
            _remove_if_dead(owned)


def _remove_if_dead(owned: Path) -> None:
    try:
        fd = os.open(owned / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # being removed by its owner or by another worker that starts
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(owned, ignore_errors=True)
    except BlockingIOError:
        return  # its owner lives
    finally:
        os.close(fd)
