"""The HTTP front of a worker (routes as in protocol.py), and `run_worker`, which is the process."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from triptych.config import EngineConfig
from triptych.engine.events import Failed, GenerateEvent
from triptych.errors import InternalError, RequestError, TriptychError, WorkerLostError
from triptych.http_server import ERROR_HANDLERS, Guard, StoppingServer, bind, read_body, unless_client_leaves, warn_if_open
from triptych.worker.metrics import make_registry
from triptych.worker.protocol import (
    ABORT_PATH,
    EC_PATH,
    ENCODE_HEADER,
    ENCODE_PATH,
    GENERATE_PATH,
    INFO_PATH,
    KV_PATH,
    RELEASE_PATH,
    WATCH_PATH,
    AbortRequest,
    ECDelivery,
    EncodeRequest,
    GenerateRequest,
    KVDelivery,
    ReleaseRequest,
    StartReport,
)
from triptych.worker.registration import Registration
from triptych.worker.worker import Worker

logger = logging.getLogger(__name__)

MAX_CONTROL_NBYTES = 64 * 1024**2  # of a generate request: a million token ids are about 8 MB
WATCH_INTERVAL_S = 1.0
BACKLOG = 1024

M = TypeVar("M")


class WorkerApp:
    """The routes of one worker."""

    def __init__(self, worker: Worker, registration: Registration | None) -> None:
        self._worker = worker
        self._registration = registration
        self._metrics = make_registry(str(worker.config.role), worker.gauges, worker.counters)
        self._is_stopping = asyncio.Event()

    def to_asgi(self) -> Starlette:
        guard = Guard(self._worker.config.cluster_secret)
        for_members = (
            ("POST", GENERATE_PATH, self.generate),
            ("POST", ENCODE_PATH, self.encode),
            ("POST", EC_PATH, self.deliver),
            ("POST", KV_PATH, self.deliver_kv),
            ("POST", ABORT_PATH, self.abort),
            ("POST", RELEASE_PATH, self.release),
            ("GET", INFO_PATH, self.info),
            ("GET", WATCH_PATH, self.watch),
        )
        routes = [Route(path, guard.over(endpoint), methods=[method]) for method, path, endpoint in for_members]
        routes.append(Route("/health", self.health, methods=["GET"]))
        routes.append(Route("/metrics", self.metrics, methods=["GET"]))
        return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)

    async def stop(self) -> None:
        """End the watch streams, which tells the router, and every other stream with an error."""
        self._is_stopping.set()
        await self._worker.close()

    async def generate(self, request: Request) -> Response:
        message = await _message(request, GenerateRequest)
        events = self._worker.generate(message)
        return StreamingResponse(_to_sse(message.request_id, events), media_type="text/event-stream")

    async def encode(self, request: Request) -> Response:
        header = request.headers.get(ENCODE_HEADER, "")
        message = _decode(header.encode("latin-1"), EncodeRequest)  # the bytes as they came: Starlette reads headers as Latin-1
        media = await read_body(request, self._worker.config.media.max_media_nbytes)
        event = await unless_client_leaves(request, self._worker.encode(message, media))
        return Response(msgspec.json.encode(event), media_type="application/json")

    async def deliver(self, request: Request) -> Response:
        await self._worker.deliver(await _message(request, ECDelivery))
        return Response(status_code=204)

    async def deliver_kv(self, request: Request) -> Response:
        await self._worker.deliver_kv(await _message(request, KVDelivery))
        return Response(status_code=204)

    async def abort(self, request: Request) -> Response:
        await self._worker.abort((await _message(request, AbortRequest)).id)
        return Response(status_code=204)

    async def release(self, request: Request) -> Response:
        await self._worker.release((await _message(request, ReleaseRequest)).id)
        return Response(status_code=204)

    async def info(self, _: Request) -> Response:
        if self._is_stopping.is_set() or not self._worker.is_alive:
            raise WorkerLostError("this worker is on its way out.")  # a router that asks would send work here
        return Response(msgspec.json.encode(self._worker.info), media_type="application/json")

    async def watch(self, _: Request) -> Response:
        return StreamingResponse(self._heartbeats(), media_type="text/event-stream")

    async def health(self, _: Request) -> Response:
        is_alive = self._worker.is_alive
        return JSONResponse({"status": "ok" if is_alive else "engine dead"}, status_code=200 if is_alive else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._metrics), media_type=CONTENT_TYPE_LATEST)

    async def _heartbeats(self) -> AsyncIterator[bytes]:
        """Ends when the engine does, so that the router stops to send work here."""
        watchers = self._registration
        if watchers is not None:
            watchers.watchers += 1
        try:
            while self._worker.is_alive and not self._is_stopping.is_set():
                yield b"data: {}\n\n"
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_stopping.wait(), WATCH_INTERVAL_S)
        finally:
            if watchers is not None:
                watchers.watchers -= 1


async def _to_sse(request_id: str, events: AsyncIterator[GenerateEvent]) -> AsyncIterator[bytes]:
    """The status line is sent by now, so that an error becomes the last event."""
    try:
        async for event in events:
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"
    except TriptychError as error:
        yield b"data: " + msgspec.json.encode(Failed(request_id, error.message, error.type, error.status)) + b"\n\n"


async def _message(request: Request, kind: type[M]) -> M:
    return _decode(await read_body(request, MAX_CONTROL_NBYTES), kind)


def _decode(body: bytes, kind: type[M]) -> M:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise RequestError(f"this is not a {kind.__name__}: {error}.") from error


def run_worker(
    config: EngineConfig, *, host: str, port: int, router_url: str | None, report: Callable[[StartReport], None]
) -> None:
    """Load, serve until SIGTERM or SIGINT, clean up. Raises `StartError` or `ConfigError` when it cannot start, and `InternalError` when its
    engine broke: whoever watches the process starts it anew."""
    with bind(host, port) as listener:
        warn_if_open(listener, config.cluster_secret)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        worker = Worker(config, lambda loaded: report(StartReport(loaded=loaded)))
        registration = Registration(router_url, url, config.cluster_secret) if router_url is not None else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(worker, registration, listener, lambda: report(StartReport(1.0, url))))
        if worker.engine_error is not None:
            raise InternalError(f"the engine broke: {type(worker.engine_error).__name__}: {worker.engine_error}")


async def _serve(
    worker: Worker, registration: Registration | None, listener: socket.socket, report_ready: Callable[[], None]
) -> None:
    app = WorkerApp(worker, registration)
    keeping = asyncio.create_task(registration.keep()) if registration is not None else None

    async def stop() -> None:
        if keeping is not None:
            keeping.cancel()  # its watchers leave now, which is no reason to register again
        await app.stop()

    server = StoppingServer(app.to_asgi(), stop)
    listener.listen(BACKLOG)  # from here on calls wait instead of being refused
    report_ready()
    ending = asyncio.create_task(_end_with_engine(worker, server))
    await server.serve(sockets=[listener])
    await ending


async def _end_with_engine(worker: Worker, server: StoppingServer) -> None:
    """A front without engine is of no use to anybody."""
    await worker.engine_ended()
    server.should_exit = True
