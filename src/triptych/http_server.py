"""What the router's and the workers' HTTP servers share: binding before anything is loaded, bodies of bounded size, clients that
leave, errors as answers, and an end in bounded time.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from triptych.errors import InternalError, OverloadedError, RequestError, StartError, TooLargeError, TriptychError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2  # for answers that are still open when the server stops
KEEP_ALIVE_S = (
    75  # longer than a process may stand still: else it wakes up and closes connections on which calls have come meanwhile
)

T = TypeVar("T")


class ClientLeftError(Exception):
    """Nobody is there to answer."""


class StoppingServer(uvicorn.Server):
    """Before uvicorn waits for open answers, `before_shutdown` ends what they wait for, so that each stream still gets its last event."""

    def __init__(self, app: Any, before_shutdown: Callable[[], Awaitable[None]]) -> None:
        timeouts: dict[str, Any] = {"timeout_graceful_shutdown": STOP_TIMEOUT_S, "timeout_keep_alive": KEEP_ALIVE_S}
        settings: dict[str, Any] = {"log_level": "warning", "access_log": False, **timeouts}
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


async def read_body(request: Request, max_nbytes: int) -> bytes:
    """Raises `TooLargeError` over the limit, `ClientLeftError` when the client goes away meanwhile."""
    error = TooLargeError(f"the body is larger than {max_nbytes} bytes; send fewer or smaller pictures.")
    if int(request.headers.get("content-length") or 0) > max_nbytes:
        raise error
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_nbytes:
                raise error
    except ClientDisconnect:
        raise ClientLeftError from None
    return bytes(body)


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Raises `ClientLeftError` once the connection is closed; `work` is then cancelled. The body must have been read."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_disconnect(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_body(error: TriptychError) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


async def _answer_error(request: Request, error: Exception) -> Response:
    """Whatever was raised before the first byte."""
    if isinstance(error, ClientLeftError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {str(error.detail).lower()}."
        return JSONResponse(error_body(RequestError(message)), status_code=error.status_code, headers=error.headers)
    if not isinstance(error, TriptychError):
        logger.error("a route failed", exc_info=error)
        error = InternalError(f"the server failed: {type(error).__name__}.")
    headers = {"retry-after": str(max(1, round(error.retry_after_s)))} if isinstance(error, OverloadedError) else None
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


ERROR_HANDLERS: Mapping[Any, Any] = dict.fromkeys((TriptychError, ClientLeftError, HTTPException, Exception), _answer_error)
