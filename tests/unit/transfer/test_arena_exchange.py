"""The exchange against peers that break its rules. Messages are written byte by byte, not with the code under test."""

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import msgspec
import pytest

from triptych.errors import FailureReason, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.arena_exchange import ArenaExchange
from triptych.transfer.arena_registry import ArenaRegistry

TIMEOUT_S = 10.0
ADDRESS = f"triptych-{0:032x}"


def make_exchange(worker_id: str, timeout_s: float = 5.0) -> tuple[ArenaExchange, Arena]:
    arena = Arena.create("ec", 2, 64)
    registry = ArenaRegistry(worker_id, with_checksums=True)
    registry.add("ec", arena)
    return ArenaExchange(registry, timeout_s=timeout_s), arena


@pytest.fixture
def exchange() -> Iterator[ArenaExchange]:
    made, _ = make_exchange("p0")
    with closing(made):
        yield made


def connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(TIMEOUT_S)
    connection.connect(f"\0{address}")
    return connection


def request(**fields: object) -> bytes:
    return msgspec.msgpack.encode({"version": 1, "arena": "ec"} | fields)


NONSENSE = {
    "no message": b"",
    "no msgpack": b"\xc1\xc1\xc1",
    "a pickle": b"\x80\x04\x95\x0b\x00",
    "a field too many": request(path="/etc/passwd"),
    "a number for a name": request(arena=7),
    "too long": request(arena="x" * 2000),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_consumer_that_sends_nonsense_is_hung_up_on_and_others_are_served(exchange: ArenaExchange, kind: str) -> None:
    with connect(exchange.address) as connection:
        connection.send(NONSENSE[kind])
        assert connection.recv(100) == b""
    with connect(exchange.address) as connection:
        connection.send(request())
        packet, fds, _, _ = socket.recv_fds(connection, 1000, 1)
        assert msgspec.msgpack.decode(packet) == {"version": 1, "worker_id": "p0", "refusal": ""}
        assert Arena.map(fds[0]).num_pages == 2


@pytest.mark.parametrize(("fields", "word"), [({"version": 2}, "version 1"), ({"arena": "kv"}, "no arena 'kv'")])
def test_a_request_that_cannot_be_met_is_refused_in_words_and_without_memory(
    exchange: ArenaExchange, fields: dict[str, object], word: str
) -> None:
    with connect(exchange.address) as connection:
        connection.send(request(**fields))
        packet, fds, _, _ = socket.recv_fds(connection, 1000, 1)
    assert fds == []
    assert word in msgspec.msgpack.decode(packet)["refusal"]


def reply(**fields: object) -> bytes:
    return msgspec.msgpack.encode({"version": 1, "worker_id": "e0", "refusal": ""} | fields)


def arena_fd() -> int:
    with closing(Arena.create("ec", 2, 64)) as arena:
        return os.dup(arena.fd)


def plain_fd() -> int:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 8192)
    return fd


WRONG_REPLIES: dict[str, tuple[bytes, Callable[[], int] | None, FailureReason]] = {
    "nothing": (b"", None, FailureReason.PEER_LOST),
    "no msgpack": (b"\xc1", arena_fd, FailureReason.MISMATCH),
    "a field too many": (reply(more=1), arena_fd, FailureReason.MISMATCH),
    "another version": (reply(version=2), arena_fd, FailureReason.MISMATCH),
    "another worker": (reply(worker_id="e1"), arena_fd, FailureReason.MISMATCH),
    "no memory": (reply(), None, FailureReason.MISMATCH),
    "memory that can shrink": (reply(), plain_fd, FailureReason.MISMATCH),
    "a refusal with memory": (reply(refusal="no"), arena_fd, FailureReason.MISMATCH),
}


@pytest.mark.parametrize("kind", WRONG_REPLIES)
def test_a_wrong_reply_is_an_error_for_this_read_and_its_memory_is_let_go(exchange: ArenaExchange, kind: str) -> None:
    packet, make_fd, expected = WRONG_REPLIES[kind]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{ADDRESS}")
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1000)
                fds = [make_fd()] if make_fd else []
                socket.send_fds(connection, [packet], fds)
                for fd in fds:
                    os.close(fd)

        gc.collect()  # other tests' garbage may hold descriptors
        before = len(os.listdir("/proc/self/fd"))
        server = threading.Thread(target=answer)
        server.start()
        with pytest.raises(TransferError) as caught:
            exchange.obtain(ADDRESS, "e0", "ec").result(TIMEOUT_S)
        server.join(TIMEOUT_S)
        assert caught.value.reason is expected
        assert len(os.listdir("/proc/self/fd")) == before


def test_an_arena_is_obtained_once_and_shared(exchange: ArenaExchange) -> None:
    producer, arena = make_exchange("e0")
    with closing(producer):
        futures = [exchange.obtain(producer.address, "e0", "ec") for _ in range(20)]
        mapped = {id(future.result(TIMEOUT_S)) for future in futures}
        assert len(mapped) == 1
        arena.pages[0] = 9
        assert exchange.obtain(producer.address, "e0", "ec").result(TIMEOUT_S).pages[0, 0] == 9


def test_an_arena_that_was_closed_is_refused(exchange: ArenaExchange) -> None:
    producer, arena = make_exchange("e0")
    with closing(producer):
        arena.close()
        with pytest.raises(TransferError, match="closed") as caught:
            exchange.obtain(producer.address, "e0", "ec").result(TIMEOUT_S)
        assert caught.value.reason is FailureReason.MISMATCH


def memory_held(arena: Arena) -> int:
    """How many descriptors of this process stand for the arena's memory."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            count += os.path.samestat(os.stat(f"/proc/self/fd/{fd}"), os.fstat(arena.fd))
    return count


def test_a_peer_that_speaks_out_of_turn_is_dropped(exchange: ArenaExchange) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{ADDRESS}")
        listener.listen()
        obtained = exchange.obtain(ADDRESS, "e0", "ec")
        with listener.accept()[0] as connection, closing(Arena.create("ec", 2, 64)) as arena:
            connection.settimeout(TIMEOUT_S)
            connection.recv(1000)
            socket.send_fds(connection, [reply()], [arena.fd])
            obtained.result(TIMEOUT_S)
            before = memory_held(arena)
            socket.send_fds(connection, [reply()], [arena.fd])
            assert connection.recv(1000) == b""
            assert memory_held(arena) == before


def test_closing_ends_what_is_under_way_and_does_not_wait_for_peers() -> None:
    exchange, _ = make_exchange("p0", timeout_s=1000.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{ADDRESS}")
        listener.listen()
        obtained = exchange.obtain(ADDRESS, "e0", "ec")  # nobody will answer
        exchange.close()
        exchange.close()
    with pytest.raises(TransferError) as caught:
        obtained.result(0)
    assert caught.value.reason is FailureReason.INTERNAL
    assert not [thread for thread in threading.enumerate() if thread.name == "arena-exchange"]


def test_no_two_exchanges_share_an_address() -> None:
    made = [make_exchange("e0")[0] for _ in range(3)]
    assert len({exchange.address for exchange in made}) == 3
    for exchange in made:
        exchange.close()
