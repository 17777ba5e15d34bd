"""`ArenaExchange`: how workers of one host get each other's arenas, and learn of each other's death.

One thread and one Unix socket per worker. The socket has an unguessable name in Linux's abstract namespace (no file), and both ends
check that the other belongs to the same user. A consumer has one link per arena that it reads:

    OPENING ──connected, request sent──▶ ASKING ──reply with the memfd──▶ LINKED: mapped; the connection stays and says nothing more
       │ nobody listens: PEER_LOST         │ refused: MISMATCH               │ its end is the peer's death
       │ no answer by the deadline: TIMEOUT│ connection ended: PEER_LOST     ▼
       └───────────────────────────────────┴────────────────────────▶ forgotten: the next read tries anew, and a dead
                                                                      peer's address refuses at once

The messages are one packet each way (SOCK_SEQPACKET keeps their bounds), msgspec, with a version. Whoever connects has as long to
ask, may ask once, and is one of so many; so no number of peers, silent ones included, can keep others waiting. A process that forks
after it made an exchange keeps its connections open beyond its death: workers start no child by fork.
"""

import os
import re
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from errno import EMFILE, ENFILE
from functools import partial
from time import monotonic, sleep

import msgspec

from triptych.errors import FailureReason, TransferError
from triptych.transfer.arena import Arena, close_fd
from triptych.transfer.arena_registry import ArenaRegistry

_VERSION = 1
_MAX_MESSAGE_NBYTES = 1024
_MAX_CONSUMERS = 1024  # connected at once; each costs a descriptor
_MAX_SILENT = 64  # of them that have not asked yet; one more, and the first of them goes
_MAX_LINKS = 4096
_ADDRESS = re.compile(r"triptych-[0-9a-f]{32}")
_ARENA_NAME = re.compile(r"[ -~]{1,100}")  # so that a request always fits
_RETRY_S = 0.01  # between two attempts: to connect to a peer whose backlog is full, to accept without a free descriptor
_CLOSE_TIMEOUT_S = 5.0


class ArenaRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    arena: str


class ArenaReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With the arena's file descriptor beside it, unless `refusal` says why not."""

    version: int
    worker_id: str
    refusal: str = ""


@dataclass(slots=True)
class _Link:
    """The way to one arena of one peer. `mapping` is the peer's arena, once it is known."""

    address: str
    producer: str
    arena_name: str
    deadline: float
    mapping: "Future[Arena]" = field(default_factory=Future[Arena])
    connection: socket.socket | None = None  # None while OPENING

    @property
    def key(self) -> tuple[str, str, str]:
        return self.address, self.producer, self.arena_name


class ArenaExchange:
    """Offers the arenas of `registry` under `address`, and obtains those of peers. Thread-safe."""

    def __init__(self, registry: ArenaRegistry, *, timeout_s: float) -> None:
        self.address = f"triptych-{secrets.token_hex(16)}"
        self._registry = registry
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # of _links, _to_open and _is_closed
        self._links: dict[tuple[str, str, str], _Link] = {}
        self._to_open: list[_Link] = []
        self._is_closed = False
        self._consumers: set[socket.socket] = set()  # connections of peers to this worker
        # Those of them that have not asked yet, and until when they may; the first to end first.
        self._silent: dict[socket.socket, float] = {}
        self._listener = _new_socket()
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(128)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._take_wake_up)
        self._thread = threading.Thread(target=self._run, name="arena-exchange", daemon=True)
        self._thread.start()

    def obtain(self, address: str, producer: str, arena_name: str) -> "Future[Arena]":
        """The peer's arena, mapped read-only; done already when it was obtained before. Ends by the timeout at the latest.

        The future raises `TransferError`: MISMATCH (no such arena, another worker, another user), PEER_LOST or TIMEOUT.
        Its callbacks run on the exchange's thread and must not block.
        """
        link = _Link(address, producer, arena_name, monotonic() + self._timeout_s)
        if not _ADDRESS.fullmatch(address) or not _ARENA_NAME.fullmatch(arena_name):
            message = "the ticket's address or arena name is not one that an arena exchange would make."
            link.mapping.set_exception(TransferError(FailureReason.MISMATCH, message))
            return link.mapping
        with self._lock:
            if self._is_closed or (len(self._links) >= _MAX_LINKS and link.key not in self._links):
                why = "is closed" if self._is_closed else f"has {_MAX_LINKS} links, as many as it keeps"
                link.mapping.set_exception(TransferError(FailureReason.INTERNAL, f"the data plane {why}."))
                return link.mapping
            known = self._links.setdefault(link.key, link)
            if known is link:
                self._to_open.append(link)
                os.eventfd_write(self._wake_fd, 1)
        return known.mapping

    def close(self) -> None:
        """Idempotent. What is not obtained yet ends with an error; peers notice at once."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_CLOSE_TIMEOUT_S)

    # --- everything below runs on the exchange's thread ---

    def _run(self) -> None:
        try:
            opening: list[_Link] = []
            while not self._is_closed:
                self._react(self._time_to_next_deadline_s(bool(opening)))
                with self._lock:
                    opening += self._to_open
                    self._to_open.clear()
                opening = [link for link in opening if not self._open(link)]
                self._give_up_who_is_late()
        finally:
            self._shut()

    def _react(self, timeout_s: float | None) -> None:
        """To what happens within the timeout. Apart from the loop, whose variables would keep a dead peer's mapping alive."""
        for key, _ in self._selector.select(timeout_s):
            react: Callable[[], None] = key.data
            react()

    def _time_to_next_deadline_s(self, is_opening: bool) -> float | None:
        with self._lock:
            deadlines = [link.deadline for link in self._links.values() if not link.mapping.done()]
        deadlines += list(self._silent.values())[:1]
        if not deadlines:
            return None
        remaining_s = max(0.0, min(deadlines) - monotonic())
        return min(remaining_s, _RETRY_S) if is_opening else remaining_s

    def _take_wake_up(self) -> None:
        os.eventfd_read(self._wake_fd)

    # --- as a producer ---

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (EMFILE, ENFILE):
                sleep(_RETRY_S)  # no descriptor is left, and this loop would spin
            return  # else the consumer has gone again
        connection.setblocking(False)
        if _uid_of_peer(connection) != os.geteuid() or len(self._consumers) >= _MAX_CONSUMERS:
            connection.close()
            return
        if len(self._silent) >= _MAX_SILENT:
            self._hang_up(next(iter(self._silent)))
        self._consumers.add(connection)
        self._silent[connection] = monotonic() + self._timeout_s
        self._selector.register(connection, selectors.EVENT_READ, partial(self._answer, connection))

    def _answer(self, connection: socket.socket) -> None:
        """A consumer's only request. One that has gone, sends nonsense, does not take its reply or speaks again is hung up on."""
        has_asked = self._silent.pop(connection, None) is None
        try:
            packet = connection.recv(_MAX_MESSAGE_NBYTES + 1)
            if has_asked or not 0 < len(packet) <= _MAX_MESSAGE_NBYTES:
                raise ValueError("not one message")
            reply, fds = self._reply_to(msgspec.msgpack.decode(packet, type=ArenaRequest))
            socket.send_fds(connection, [msgspec.msgpack.encode(reply)], fds)
        except (OSError, ValueError, msgspec.MsgspecError):
            self._hang_up(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        """Idempotent: news of a connection may come after its end."""
        self._silent.pop(connection, None)
        if connection in self._consumers:
            self._consumers.remove(connection)
            self._selector.unregister(connection)
            connection.close()

    def _reply_to(self, request: ArenaRequest) -> tuple[ArenaReply, list[int]]:
        worker_id = self._registry.worker_id
        if request.version != _VERSION:
            return ArenaReply(_VERSION, worker_id, f"{worker_id} speaks version {_VERSION} of the arena exchange."), []
        try:
            arena = self._registry.get(request.arena)
        except TransferError as error:
            return ArenaReply(_VERSION, worker_id, error.message[:200]), []
        if arena.fd < 0:
            return ArenaReply(_VERSION, worker_id, f"{worker_id} has closed its arena."), []
        return ArenaReply(_VERSION, worker_id), [arena.fd]

    # --- as a consumer ---

    def _open(self, link: _Link) -> bool:
        """Connect and ask. False: the peer's backlog is full, so try again. True: asked, or failed for good."""
        if link.mapping.done():
            return True
        try:
            connection = _new_socket()
        except OSError as error:
            self._end(link, TransferError(FailureReason.INTERNAL, f"no peer can be connected to ({error.strerror})."))
            return True
        try:
            connection.connect(f"\0{link.address}")
            if _uid_of_peer(connection) != os.geteuid():
                raise TransferError(FailureReason.MISMATCH, f"the process at {link.producer}'s address is another user's.")
            connection.send(msgspec.msgpack.encode(ArenaRequest(_VERSION, link.arena_name)))
        except BlockingIOError:
            connection.close()
            return False
        except OSError as error:
            connection.close()
            self._end(link, TransferError(FailureReason.PEER_LOST, f"{link.producer} does not listen ({error.strerror})."))
            return True
        except TransferError as error:
            connection.close()
            self._end(link, error)
            return True
        link.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, link, connection))
        return True

    def _hear(self, link: _Link, connection: socket.socket) -> None:
        """The peer's reply, or, on a link that has its arena, the peer's death."""
        try:
            packet, fd = _receive(connection)
        except OSError:
            packet, fd = b"", -1
        if not packet or link.mapping.done():
            close_fd(fd)
            self._end(link, TransferError(FailureReason.PEER_LOST, f"{link.producer} has ended its connection."))
            return
        try:
            arena = _arena_in(packet, fd, link)
        except TransferError as error:
            self._end(link, error)
            return
        link.mapping.set_result(arena)

    def _give_up_who_is_late(self) -> None:
        now = monotonic()
        for connection in [silent for silent, deadline in self._silent.items() if deadline <= now]:
            self._hang_up(connection)
        with self._lock:
            late = [link for link in self._links.values() if not link.mapping.done() and link.deadline <= now]
        for link in late:
            self._end(link, TransferError(FailureReason.TIMEOUT, f"{link.producer} did not hand over its arena in time."))

    def _end(self, link: _Link, error: TransferError) -> None:
        """Forget the link. The mapping itself ends with the last copy that uses it."""
        with self._lock:
            self._links.pop(link.key, None)
        if link.connection is not None:
            self._selector.unregister(link.connection)
            link.connection.close()
        if not link.mapping.done():
            link.mapping.set_exception(error)

    def _shut(self) -> None:
        """Also runs when this thread dies of a bug: nobody waits for it then."""
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
        for link in links:
            self._end(link, TransferError(FailureReason.INTERNAL, "the data plane was closed."))
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake_fd)


def _new_socket() -> socket.socket:
    """Non-blocking; Python closes it on exec."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _uid_of_peer(connection: socket.socket) -> int:
    layout = struct.Struct("3i")  # struct ucred: pid, uid, gid
    return layout.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))[1]


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """One packet and the file descriptor beside it, or -1."""
    packet, fds, flags, _ = socket.recv_fds(connection, _MAX_MESSAGE_NBYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
    if flags & socket.MSG_CTRUNC and not fds:
        raise OSError(EMFILE, "there was one, but this process has none left")
    for fd in fds[1:]:
        os.close(fd)
    return packet, fds[0] if fds else -1


def _arena_in(packet: bytes, fd: int, link: _Link) -> Arena:
    """Map what the reply brings; every way in which it can be wrong is a MISMATCH."""
    try:
        reply = msgspec.msgpack.decode(packet, type=ArenaReply)
    except msgspec.MsgspecError as error:
        close_fd(fd)
        raise TransferError(FailureReason.MISMATCH, f"{link.producer} sent an unreadable reply ({error}).") from error
    wrong = reply.refusal
    if reply.version != _VERSION:
        wrong = f"{link.producer} speaks version {reply.version} of the arena exchange, not {_VERSION}."
    elif reply.worker_id != link.producer:
        wrong = f"the ticket names {link.producer}, but {reply.worker_id} lives at its address."
    elif not wrong and fd < 0:
        wrong = f"{link.producer} sent no arena."
    if wrong:
        close_fd(fd)
        raise TransferError(FailureReason.MISMATCH, wrong)
    return Arena.map(fd)
