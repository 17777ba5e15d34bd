"""The exchange against peers that break its rules. Messages are written byte by byte, not with the code under test."""

import gc
import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triptych.errors import FailureReason, TransferError
from triptych.transfer.arena import Arena
from triptych.transfer.arena_exchange import ArenaExchange
from triptych.transfer.arena_registry import ArenaRegistry

TIMEOUT_S = 10.0
ADDRESS = f"triptych-{secrets.token_hex(16)}"  # of a peer that a test plays; others may run on this host


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


@pytest.fixture
def patient() -> Iterator[ArenaExchange]:
    """One whose deadlines end no test."""
    made, _ = make_exchange("p0", timeout_s=1000.0)
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
    "no text for a name": request(arena="ec").replace(b"ec", b"\xff\xfe"),
    "nested deep": b"\x82\xa7version\x01\xa5arena" + b"\x91" * 900,
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
    "no text for a name": (reply(worker_id="e0").replace(b"e0", b"\xff\xfe"), arena_fd, FailureReason.MISMATCH),
    "nested deep": (b"\x81\xa7version" + b"\x91" * 900, arena_fd, FailureReason.MISMATCH),
    "too long": (reply(refusal="x" * 2000), arena_fd, FailureReason.MISMATCH),
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


# --- peers that want too much


def ask(connection: socket.socket) -> dict[str, object]:
    """The answer to a right request."""
    connection.send(request())
    packet, fds, _, _ = socket.recv_fds(connection, 1000, 1)
    for fd in fds:
        os.close(fd)
    return msgspec.msgpack.decode(packet)


def is_hung_up_on(connection: socket.socket) -> bool:
    """Waits for the end, or until the patience of `connect` is over."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_flood_of_connections_that_never_ask_keeps_nobody_waiting_and_holds_few_descriptors(
    patient: ArenaExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.transfer.arena_exchange._MAX_SILENT", 4)
    gc.collect()
    before = num_descriptors()
    silent = [connect(patient.address) for _ in range(100)]
    with connect(patient.address) as connection:
        assert ask(connection)["refusal"] == ""
        assert all(is_hung_up_on(each) for each in silent[:-4])
        assert num_descriptors() - before <= 2 * (4 + 1) + 96, "both ends of the last ones, our end of the others"
    for each in silent:
        each.close()


def test_who_connects_and_does_not_ask_is_hung_up_on_at_the_deadline_and_who_has_asked_stays() -> None:
    exchange, _ = make_exchange("p0", timeout_s=0.05)
    with closing(exchange), connect(exchange.address) as asked, connect(exchange.address) as silent:
        ask(asked)
        assert is_hung_up_on(silent)
        with connect(exchange.address) as later:  # as long again
            assert is_hung_up_on(later)
        asked.setblocking(False)
        with pytest.raises(BlockingIOError):
            asked.recv(1)


class Gate:
    """In place of the exchange's lock: stops its thread between two looks at what has happened."""

    def __init__(self) -> None:
        self.is_reached, self.opens = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == "arena-exchange":
            self.is_reached.set()
            self.opens.wait(TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_request_that_comes_with_the_end_of_its_connection_is_nobodys(
    patient: ArenaExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.transfer.arena_exchange._MAX_SILENT", 1)
    gate = Gate()
    with connect(patient.address) as first, connect(patient.address) as second:
        assert is_hung_up_on(first)
        monkeypatch.setattr(patient, "_lock", gate)
        patient.obtain("triptych-" + "f" * 32, "e0", "ec")  # nobody's address: it only wakes the thread
        assert gate.is_reached.wait(TIMEOUT_S)
        third = connect(patient.address)  # the end of the second
        second.send(request())
        gate.opens.set()
        with third:
            assert is_hung_up_on(second)
            assert ask(third)["refusal"] == ""


def test_a_consumer_that_asks_twice_is_hung_up_on(exchange: ArenaExchange) -> None:
    with connect(exchange.address) as connection:
        assert ask(connection)["refusal"] == ""
        connection.send(request())
        assert is_hung_up_on(connection)


def test_one_consumer_too_many_is_hung_up_on_and_served_when_another_has_left(
    patient: ArenaExchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.transfer.arena_exchange._MAX_CONSUMERS", 2)
    with connect(patient.address) as first:
        ask(first)
        with connect(patient.address) as second:
            ask(second)
            with connect(patient.address) as third:
                assert is_hung_up_on(third)
            second.send(request())  # one time too many
            assert is_hung_up_on(second)
        with connect(patient.address) as fourth:
            assert ask(fourth)["refusal"] == ""


def test_one_link_too_many_is_an_error_and_the_others_go_on(exchange: ArenaExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.transfer.arena_exchange._MAX_LINKS", 1)
    producer, _ = make_exchange("e0")
    with closing(producer):
        exchange.obtain(producer.address, "e0", "ec").result(TIMEOUT_S)
        with pytest.raises(TransferError, match="1 links") as caught:
            exchange.obtain(ADDRESS, "e1", "ec").result(TIMEOUT_S)
        assert caught.value.reason is FailureReason.INTERNAL
        assert exchange.obtain(producer.address, "e0", "ec").result(TIMEOUT_S).num_pages == 2


@contextmanager
def no_descriptor_left() -> Generator[None]:
    """None can be opened while inside; those that are open stay."""
    gc.collect()  # what other tests left would be closed meanwhile
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_without_a_free_descriptor_is_an_error_for_this_read_and_none_for_those_after_it(
    exchange: ArenaExchange,
) -> None:
    producer, _ = make_exchange("e0")
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(producer), closing(waiting):
        waiting.settimeout(TIMEOUT_S)
        with no_descriptor_left():
            waiting.connect(f"\0{exchange.address}")  # into the backlog
            with pytest.raises(TransferError) as caught:
                exchange.obtain(producer.address, "e0", "ec").result(TIMEOUT_S)
        assert caught.value.reason is FailureReason.INTERNAL
        assert ask(waiting)["refusal"] == ""
        assert exchange.obtain(producer.address, "e0", "ec").result(TIMEOUT_S).num_pages == 2


def test_an_arena_for_which_no_descriptor_is_left_can_be_had_again_later(exchange: ArenaExchange) -> None:
    with closing(Arena.create("ec", 2, 64)) as arena, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{ADDRESS}")
        listener.listen()
        obtained = exchange.obtain(ADDRESS, "e0", "ec")
        with listener.accept()[0] as connection:
            connection.recv(1000)
            with no_descriptor_left():
                socket.send_fds(connection, [reply()], [arena.fd])
                with pytest.raises(TransferError) as caught:
                    obtained.result(TIMEOUT_S)
    assert caught.value.reason.is_retryable


# --- who is spoken to


@pytest.mark.parametrize(
    "address",
    [
        "", "triptych-", f"triptych-{0:031x}", f"triptych-{0:033x}", f"triptych-{0:032x}\n", f"TRIPTYCH-{0:032x}", f"triptych-{'A' * 32}",
        f"x/triptych-{0:032x}", f"\0triptych-{0:032x}", "triptych-../../../../../../tmp/socket00", "/run/docker.sock",
    ],
)  # fmt: skip
def test_nobody_is_connected_to_whose_address_is_not_an_exchanges(exchange: ArenaExchange, address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        listener.setblocking(False)
        obtained = exchange.obtain(address, "e0", "ec")
        assert obtained.done()
        with pytest.raises(TransferError) as caught:
            obtained.result()
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert caught.value.reason is FailureReason.MISMATCH


def another_user(_: socket.socket) -> int:
    return os.geteuid() + 1


def test_a_peer_of_another_user_is_refused_on_both_ends(exchange: ArenaExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the kernel says of it; test_shm_processes.py has real users, where it may."""
    producer, _ = make_exchange("e0", timeout_s=1000.0)
    monkeypatch.setattr("triptych.transfer.arena_exchange._uid_of_peer", another_user)
    with closing(producer):
        with pytest.raises(TransferError, match="another user") as caught:
            exchange.obtain(producer.address, "e0", "ec").result(TIMEOUT_S)
        with connect(producer.address) as connection:
            assert is_hung_up_on(connection)
    assert caught.value.reason is FailureReason.MISMATCH


@given(st.binary(max_size=64))
@example(request()[:-1])
@example(request() + b"x")
@settings(max_examples=100, deadline=None)
def test_whatever_the_bytes_both_ends_survive_them(packet: bytes) -> None:
    exchange, _ = make_exchange("p0", timeout_s=1.0)
    with closing(exchange), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{ADDRESS}")
        listener.listen()
        obtained = exchange.obtain(ADDRESS, "e0", "ec")
        with listener.accept()[0] as connection:
            connection.send(packet)
            assert isinstance(obtained.exception(TIMEOUT_S), TransferError)
        with connect(exchange.address) as connection:
            connection.send(packet)
            is_hung_up_on(connection)
        with connect(exchange.address) as connection:
            assert ask(connection)["refusal"] == ""
