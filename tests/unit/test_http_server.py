"""Who may call: those who show the cluster's secret; and what the log says of the others."""

import logging
from contextlib import closing

import pytest
from starlette.requests import Request

from triptych.errors import UnauthorizedError
from triptych.http_server import Guard, authorization, bind, warn_if_open

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
