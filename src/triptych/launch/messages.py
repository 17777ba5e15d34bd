"""What the launcher and its processes say to each other: msgspec structs as JSON, one per packet of a SOCK_SEQPACKET socket pair.

A packet arrives whole or not at all, so the workers share the fork server's end of the pair for their start reports.
"""

import socket
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from triptych.config import EngineConfig
from triptych.router.options import RouterOptions
from triptych.worker.protocol import StartReport

MAX_PACKET_NBYTES = 1 << 16


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="route"):
    """Be the router: the first and only command that a router's process gets."""

    options: RouterOptions


class Spawn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="spawn"):
    """Fork a worker. It serves on a free port of `host` and registers itself with `router_url`."""

    name: str
    config: EngineConfig
    host: str
    router_url: str


class Signal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="signal"):
    name: str
    signum: int


class Reported(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reported"):
    """A child's start report."""

    name: str
    report: StartReport


class Exited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="exited"):
    """A child is gone. `reason` in words: "exit code 1", "SIGKILL"."""

    name: str
    reason: str


ForkServerCommand = Spawn | Signal
Command = Route | ForkServerCommand
ChildEvent = Reported | Exited

M = TypeVar("M")


def send(sock: socket.socket, message: Command | ChildEvent) -> None:
    sock.send(msgspec.json.encode(message, enc_hook=_path_to_text))


def receive(sock: socket.socket, kind: type[M]) -> M | None:
    """The next message; None when every holder of the other end is gone."""
    packet = sock.recv(MAX_PACKET_NBYTES)
    return msgspec.json.decode(packet, type=kind, dec_hook=_text_to_path) if packet else None


def _path_to_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


def _text_to_path(kind: type[Any], value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError
