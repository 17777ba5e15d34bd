"""What the router's and the workers' HTTP servers share: binding before anything is loaded, and an end in bounded time."""

import signal
import socket
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import uvicorn

from triptych.errors import StartError

STOP_TIMEOUT_S = 2  # for answers that are still open when the server stops


class StoppingServer(uvicorn.Server):
    """Before uvicorn waits for open answers, `before_shutdown` ends what they wait for, so that each stream still gets its last event."""

    def __init__(self, app: Any, before_shutdown: Callable[[], Awaitable[None]]) -> None:
        settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": STOP_TIMEOUT_S}
        super().__init__(uvicorn.Config(app, http="httptools", lifespan="off", **settings))
        self._before_shutdown = before_shutdown

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's own, it does not raise the signal again at the end: what stands behind `serve` must still run."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._before_shutdown()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket for `StoppingServer.serve`; port 0 takes a free one. Raises `StartError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}; choose another --port."
        ) from None
    return listener
