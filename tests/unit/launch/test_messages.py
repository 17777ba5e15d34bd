import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triptych.config import ClusterLayout, ConnectorConfig, EngineConfig, ModelConfig, Role
from triptych.launch.messages import ChildEvent, Command, Exited, Reported, Route, Signal, Spawn, receive, send
from triptych.router.options import RouterOptions
from triptych.worker.protocol import StartReport

MODEL = ModelConfig(
    path=Path("/model"), name="m", family="qwen2_5_vl", weights_digest="d", dtype="float32", max_model_len=128,
    vocab_size=16, hidden_size=8, num_layers=1, num_kv_heads=1, head_dim=8,
)  # fmt: skip
SECRET = "0123456789abcdef"
CONFIG = EngineConfig(
    MODEL, Role.parse("EP"), is_alone=False, connector=ConnectorConfig("file", Path("/shared")), cluster_secret=SECRET
)
ROUTER = RouterOptions(model=MODEL, layout=ClusterLayout.parse("E1P2D3"), cluster_secret=SECRET)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Spawn("encode-prefill-0", CONFIG, "127.0.0.1", "http://127.0.0.1:8000"), Command),
        (Signal("decode-0", 15), Command),
        (Route(ROUTER), Command),
        (Reported("decode-0", StartReport(loaded=0.5)), ChildEvent),
        (Exited("decode-0", "SIGKILL"), ChildEvent),
    ],
)
def test_a_message_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket], message: Any, kind: Any) -> None:
    send(pair[0], message)
    assert receive(pair[1], kind) == message
    assert SECRET not in repr(message)


def test_messages_sent_together_arrive_one_by_one(pair: tuple[socket.socket, socket.socket]) -> None:
    for number in range(20):
        send(pair[0], Signal("decode-0", number))
    assert [receive(pair[1], Signal) for _ in range(20)] == [Signal("decode-0", number) for number in range(20)]


def test_a_closed_end_reads_as_none(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert receive(pair[1], Signal) is None
