"""What the router's and the workers' HTTP servers share: binding before anything is loaded, calls for members of the cluster only,
heads and bodies of bounded size, clients that leave, errors as answers, and an end in bounded time.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from hmac import compare_digest
from ipaddress import ip_address
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from triptych.config import CLUSTER_SECRET_VARIABLE
from triptych.errors import (
    InternalError,
    OverloadedError,
    RequestError,
    StartError,
    TooLargeError,
    TriptychError,
    UnauthorizedError,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2  # for answers that are still open when the server stops
MAX_HEAD_NBYTES = 64 * 1024
CHUNK_HEAD_NBYTES = 16  # of a chunk of a body, at most: its length and two ends of lines
# Longer than a process may stand still: else it wakes up and closes connections on which calls have come meanwhile.
KEEP_ALIVE_S = 75
MAX_NAMED_PEERS = 1000  # in the log, for calls without the secret

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


class ClientLeftError(Exception):
    """Nobody is there to answer."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """uvicorn's own takes what is no body (URL, headers, trailers, extensions of chunks) whatever its length; here it ends the connection."""

    _num_head_nbytes = 0  # of the request under way

    def data_received(self, data: bytes) -> None:
        self._num_head_nbytes += len(data)
        super().data_received(data)
        self._num_head_nbytes = max(0, self._num_head_nbytes)
        if self._num_head_nbytes > MAX_HEAD_NBYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is longer than {MAX_HEAD_NBYTES} bytes.")

    def on_body(self, body: bytes) -> None:
        self._num_head_nbytes -= len(body) + CHUNK_HEAD_NBYTES
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_nbytes = 0
        super().on_message_complete()


class StoppingServer(uvicorn.Server):
    """Before uvicorn waits for open answers, `before_shutdown` ends what they wait for, so that each stream still gets its last event."""

    def __init__(self, app: Any, before_shutdown: Callable[[], Awaitable[None]]) -> None:
        timeouts: dict[str, Any] = {"timeout_graceful_shutdown": STOP_TIMEOUT_S, "timeout_keep_alive": KEEP_ALIVE_S}
        settings: dict[str, Any] = {"log_level": "warning", "access_log": False, **timeouts}
        # No proxy headers: a peer is whoever is connected, not who a header says.
        super().__init__(uvicorn.Config(app, http=BoundedHeadProtocol, lifespan="off", proxy_headers=False, **settings))
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


def warn_if_open(listener: socket.socket, cluster_secret: str) -> None:
    """One line for a server that other hosts can reach and that has no cluster secret."""
    host, port = listener.getsockname()[:2]
    if not cluster_secret and not ip_address(host.partition("%")[0]).is_loopback:
        logger.warning(
            "whoever reaches %s:%d may act as a member of this cluster; set %s to the same secret on all its members",
            host, port, CLUSTER_SECRET_VARIABLE,
        )  # fmt: skip


def authorization(cluster_secret: str) -> dict[str, str]:
    """The headers that `Guard` asks for; none in a cluster without a secret."""
    return {"authorization": f"Bearer {cluster_secret}"} if cluster_secret else {}


class Guard:
    """Lets in who sends the cluster's secret; everybody if it is empty. Logs each peer that it refuses once."""

    def __init__(self, cluster_secret: str) -> None:
        self._expected = authorization(cluster_secret).get("authorization", "").encode()
        self._refused_peers: set[str] = set()

    def check(self, request: Request) -> None:
        """Raises `UnauthorizedError`. To be called before anything of the body is read."""
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as they came
        if not self._expected or compare_digest(given, self._expected):
            return
        peer = request.client.host if request.client else "an unknown address"
        if peer not in self._refused_peers and len(self._refused_peers) < MAX_NAMED_PEERS:
            self._refused_peers.add(peer)
            logger.warning("refused %s from %s: it came without this cluster's secret", request.url.path[:100], peer)
        raise UnauthorizedError(
            f"only members of this cluster may call this; give the caller the same {CLUSTER_SECRET_VARIABLE}."
        )

    def over(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` behind `check`."""

        async def checked(request: Request) -> Response:
            self.check(request)
            return await endpoint(request)

        return checked


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
    headers: dict[str, str] = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


ERROR_HANDLERS: Mapping[Any, Any] = dict.fromkeys((TriptychError, ClientLeftError, HTTPException, Exception), _answer_error)
