"""Who may call, and how long what they send may be."""

import logging
import socket
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from triptych.errors import UnauthorizedError
from triptych.http_server import ERROR_HANDLERS, Guard, StoppingServer, authorization, bind, read_body, warn_if_open

SECRET = "a secret of the cluster".replace(" ", "-")


def call(authorization: bytes | None, peer: str = "192.0.2.7") -> Request:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    return Request({"type": "http", "method": "POST", "path": "/workers", "headers": headers, "client": (peer, 5)})


def test_who_shows_the_secret_is_let_in() -> None:
    assert authorization(SECRET) == {"authorization": f"Bearer {SECRET}"}
    Guard(SECRET).check(call(f"Bearer {SECRET}".encode()))


@pytest.mark.parametrize(
    "shown",
    [
        None, b"", b"Bearer", b"Bearer ", SECRET.encode(), f"Bearer {SECRET}x".encode(), f"Bearer {SECRET[:-1]}".encode(),
        f"bearer {SECRET}".encode(), f"Basic {SECRET}".encode(), f"Bearer {SECRET.upper()}".encode(), b"Bearer \xff\xfe\x80",
        "Bearer кот".encode(), f"Bearer {SECRET}, Bearer x".encode(),
    ],
)  # fmt: skip
def test_who_does_not_is_told_what_is_missing_and_not_what_it_is(shown: bytes | None) -> None:
    with pytest.raises(UnauthorizedError, match="TRIPTYCH_CLUSTER_SECRET") as caught:
        Guard(SECRET).check(call(shown))
    assert SECRET not in str(caught.value)
    assert caught.value.status == 401


def test_a_cluster_without_a_secret_lets_everybody_in_and_shows_nothing() -> None:
    assert authorization("") == {}
    for shown in (None, b"", b"Bearer x"):
        Guard("").check(call(shown))


def refused(guard: Guard, peer: str, shown: bytes = b"Bearer other") -> None:
    with pytest.raises(UnauthorizedError):
        guard.check(call(shown, peer))


def test_each_peer_that_is_refused_is_logged_once_without_what_it_showed(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(SECRET)
    for _ in range(3):
        for peer in ("192.0.2.7", "192.0.2.8"):
            refused(guard, peer)
    messages = [record.getMessage() for record in caplog.records]
    assert [next(peer for peer in ("192.0.2.7", "192.0.2.8") if peer in message) for message in messages] == [
        "192.0.2.7",
        "192.0.2.8",
    ]
    assert not any(SECRET in message or "other" in message for message in messages)


def test_a_flood_of_peers_fills_neither_log_nor_memory(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.http_server.MAX_NAMED_PEERS", 3)
    guard = Guard(SECRET)
    for number in range(20):
        refused(guard, f"192.0.2.{number}")
    assert len(caplog.records) == 3
    assert len(guard._refused_peers) == 3  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("host", "secret", "warns"),
    [
        ("127.0.0.1", "", False), ("127.0.0.2", "", False), ("localhost", "", False), ("0.0.0.0", "", True), ("0.0.0.0", SECRET, False),
    ],
)  # fmt: skip
def test_a_server_that_others_can_reach_without_a_secret_says_so_in_one_line(
    host: str, secret: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), closing(bind(host, 0)) as listener:
        warn_if_open(listener, secret)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == warns
    assert all("TRIPTYCH_CLUSTER_SECRET" in line and "0.0.0.0:" in line and "\n" not in line for line in lines)


# --- what is no body


class ThreadServer(StoppingServer):
    """Answers a POST with the length of its body, of at most 300,000 bytes."""

    def __init__(self) -> None:
        self.listens = threading.Event()

        async def length(request: Request) -> PlainTextResponse:
            return PlainTextResponse(str(len(await read_body(request, 300_000))))

        async def nothing() -> None:
            pass

        super().__init__(Starlette(routes=[Route("/", length, methods=["POST"])], exception_handlers=ERROR_HANDLERS), nothing)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listens.set()


@contextmanager
def connected() -> Generator[socket.socket]:
    server, listener = ThreadServer(), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert server.listens.wait(10)
        with socket.create_connection(listener.getsockname(), timeout=10) as connection:
            yield connection
    finally:
        server.should_exit = True
        thread.join(10)


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "URL": b"POST /",
    "method": b"",
    "header": b"POST / HTTP/1.1\r\nhost: x\r\nx: ",
    "name of a header": b"POST / HTTP/1.1\r\nhost: x\r\n",
    "trailer": CHUNKED + b"1\r\nx\r\n0\r\nx: ",
    "extension of a chunk": CHUNKED + b"5;",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_is_no_body_and_has_no_end_ends_the_connection(what: str) -> None:
    with connected() as connection:
        connection.sendall(ENDLESS[what])
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(100):
                connection.sendall(b"a" * 100_000)


def test_many_short_headers_are_as_long_as_one() -> None:
    with connected() as connection:
        connection.sendall(b"POST / HTTP/1.1\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for number in range(100):
                connection.sendall(b"a: b\r\n" * 20_000 + b"%d: x\r\n" % number)


def answer_to(connection: socket.socket, *sent: bytes) -> bytes:
    for data in sent:
        connection.sendall(data)
    answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200 OK"), answer
    return answer.partition(b"\r\n\r\n")[2]


def test_a_long_body_of_short_chunks_earns_no_long_trailer() -> None:
    with connected() as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        for data in (CHUNKED, *[b"1\r\nx\r\n" * 1000] * 50, b"0\r\nx: ", *[b"a" * 1000] * 300):
            connection.sendall(data)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        raise ConnectionResetError


def test_heads_of_a_connection_do_not_add_up() -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 30_000 + b"\r\ncontent-length: 2\r\n\r\n"
    with connected() as connection:
        assert [answer_to(connection, head, b"ab") for _ in range(5)] == [b"2"] * 5


def test_bodies_are_taken_whatever_their_pieces_one_after_the_other() -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 30_000 + b"\r\ncontent-length: 300000\r\n\r\n"
    with connected() as connection:
        for _ in range(4):
            assert answer_to(connection, head, bytes(300_000)) == b"300000"
            assert answer_to(connection, CHUNKED, *[b"1\r\nx\r\n" * 1000] * 50, b"0\r\n\r\n") == b"50000"


def test_a_body_over_the_limit_is_not_read_to_its_end() -> None:
    with connected() as connection:
        connection.sendall(CHUNKED)
        connection.sendall(b"493E1\r\n" + bytes(300_001) + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
