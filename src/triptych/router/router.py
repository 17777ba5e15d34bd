"""The router's HTTP front: routes, error answers, and the process that serves them."""

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import uvloop
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Receive

from triptych.errors import (
    ConfigError,
    InternalError,
    OverloadedError,
    RequestError,
    TooLargeError,
    TriptychError,
    UnknownModelError,
)
from triptych.http_server import StoppingServer, bind
from triptych.models.inspect import resolve_model
from triptych.router.options import RouterOptions
from triptych.router.protocol import ChatCompletionRequest, ModelCard, ModelList, error_body
from triptych.router.serving import Serving, ServingLimits, open_serving
from triptych.router.stream import AnswerHead, answer_as_chunks, answer_in_one
from triptych.worker.protocol import RegisterRequest

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 3  # for answers to leave after their requests were ended

T = TypeVar("T")


class _ClientLeftError(Exception):
    """Nobody is there to answer."""


class Router:
    """The routes' own state: what is served, and under which name."""

    def __init__(self, serving: Serving, name: str, max_model_len: int, max_body_nbytes: int) -> None:
        self.serving = serving
        self.name = name
        self.max_body_nbytes = max_body_nbytes
        self.card = ModelCard(id=name, created=int(time.time()), max_model_len=max_model_len)

    async def chat_completions(self, request: Request) -> Response:
        body = await _read_body(request, self.max_body_nbytes)
        wanted = ChatCompletionRequest.parse(body)
        if wanted.model not in (None, "", self.name):
            raise UnknownModelError(f"there is no model '{wanted.model}' here; this server has '{self.name}'.")
        head = AnswerHead(
            id=f"chatcmpl-{uuid4().hex}",
            created=int(time.time()),
            model=self.name,
            tokenizer=self.serving.chat.renderer.tokenizer,
            wants_logprobs=bool(wanted.logprobs),
            wants_usage=wanted.include_usage,
        )
        answer = self.serving.chat.answer(wanted.to_chat())
        try:
            # Errors before the first token still have a status of their own.
            first = await _unless_client_leaves(request, anext(answer))
            if wanted.stream:
                return StreamingResponse(answer_as_chunks(head, first, answer), media_type="text/event-stream")
            whole = await _unless_client_leaves(request, answer_in_one(head, first, answer))
            return Response(whole.model_dump_json(), media_type="application/json")
        except BaseException:
            await answer.aclose()
            raise

    async def models(self) -> Response:
        return Response(ModelList(data=[self.card]).model_dump_json(), media_type="application/json")

    async def health(self) -> Response:
        missing = [stage.name.lower() for stage in self.serving.pool.missing_stages()]
        status = "unavailable" if missing else "ok"
        return JSONResponse({"status": status, "missing": missing}, status_code=503 if missing else 200)

    async def metrics(self) -> Response:
        return Response(self.serving.metrics.render(self.serving.pool.workers), media_type=CONTENT_TYPE_LATEST)

    async def list_workers(self) -> Response:
        workers = [
            {
                "id": worker.id,
                "role": str(worker.role),
                "state": worker.state,
                "outstanding": {stage.name.lower(): amount for stage, amount in worker.outstanding.items()},
            }
            for worker in self.serving.pool.workers
        ]
        return JSONResponse({"workers": workers})

    async def register_worker(self, request: Request) -> Response:
        try:
            message = msgspec.json.decode(await _read_body(request, 2**16), type=RegisterRequest)
        except msgspec.MsgspecError as error:
            raise RequestError(f"the registration cannot be read: {error}.") from None
        try:
            worker = await self.serving.membership.register(message.url)
        except ConfigError as error:
            raise RequestError(error.message) from None
        return JSONResponse({"id": worker.id, "role": str(worker.role)})


def make_app(router: Router) -> FastAPI:
    """The routes of one router, and the one place where errors become answers."""
    app = FastAPI(title="Triptych", openapi_url=None, docs_url=None, redoc_url=None)
    app.post("/v1/chat/completions", response_model=None)(router.chat_completions)
    app.get("/v1/models", response_model=None)(router.models)
    app.get("/health", response_model=None)(router.health)
    app.get("/metrics", response_model=None)(router.metrics)
    app.get("/workers", response_model=None)(router.list_workers)
    app.post("/workers", response_model=None)(router.register_worker)
    app.add_exception_handler(TriptychError, _answer_error)
    app.add_exception_handler(_ClientLeftError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """OpenAI's error shape for whatever was raised before the first byte."""
    if isinstance(error, _ClientLeftError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {str(error.detail).lower()}."
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)
    if isinstance(error, RequestValidationError):
        error = RequestError(f"the request cannot be read: {error.errors()[0]['msg']}.")
    if not isinstance(error, TriptychError):
        logger.error("a route failed", exc_info=error)
        error = InternalError(f"the router failed: {type(error).__name__}.")
    headers = {"retry-after": str(max(1, round(error.retry_after_s)))} if isinstance(error, OverloadedError) else None
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


async def _read_body(request: Request, limit: int) -> bytes:
    message = f"the body is larger than {limit} bytes; send fewer or smaller pictures."
    if int(request.headers.get("content-length") or 0) > limit:
        raise TooLargeError(message)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLargeError(message)
    return bytes(body)


async def _unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Raises `_ClientLeftError` once the connection is closed; `work` is then cancelled."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_disconnect(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientLeftError
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- the process ---------------------------------------------------------------------------------------------------


def run_router(options: RouterOptions) -> None:
    """Serve until SIGINT or SIGTERM. Raises `ConfigError` for a model that cannot be served, `StartError` for a port in use."""
    with bind(options.host, options.port) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, listener))


async def _serve(options: RouterOptions, listener: socket.socket) -> None:
    model = resolve_model(options.model, name=options.name or None)
    limits = ServingLimits(options.max_in_flight, options.request_timeout_s)
    async with open_serving(model, options.layout, options.media, limits) as serving:
        serving.membership.look_for(options.worker_urls)
        app = make_app(Router(serving, model.name, model.max_model_len, options.max_body_nbytes))
        await StoppingServer(app, serving.pipeline.stop).serve(sockets=[listener])
