"""The router's HTTP front: routes, error answers, and the process that serves them."""

import asyncio
import socket
import time
from uuid import uuid4

import msgspec
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from triptych.errors import ConfigError, RequestError, UnknownModelError
from triptych.http_server import ERROR_HANDLERS, Guard, StoppingServer, bind, read_body, unless_client_leaves, warn_if_open
from triptych.router.options import RouterOptions
from triptych.router.protocol import ChatCompletionRequest, ModelCard, ModelList
from triptych.router.serving import Serving, open_serving
from triptych.router.stream import AnswerHead, answer_as_chunks, answer_in_one
from triptych.worker.protocol import RegisterRequest


class Router:
    """The routes' own state: what is served, under which name, and who may register."""

    def __init__(self, serving: Serving, name: str, max_model_len: int, max_body_nbytes: int, cluster_secret: str = "") -> None:
        self.serving = serving
        self.name = name
        self.max_body_nbytes = max_body_nbytes
        self.guard = Guard(cluster_secret)
        self.card = ModelCard(id=name, created=int(time.time()), max_model_len=max_model_len)

    async def chat_completions(self, request: Request) -> Response:
        body = await read_body(request, self.max_body_nbytes)
        wanted = ChatCompletionRequest.parse(body)
        if wanted.model not in (None, "", self.name):
            raise self._unknown(wanted.model)
        chat = wanted.to_chat()
        head = AnswerHead(
            id=f"chatcmpl-{uuid4().hex}",
            created=int(time.time()),
            model=self.name,
            tokenizer=self.serving.chat.renderer.tokenizer,
            wants_logprobs=bool(wanted.logprobs),
            wants_usage=wanted.include_usage,
            num_choices=chat.n,
        )
        answer = self.serving.chat.answer(chat)
        try:
            # Errors before the first token still have a status of their own.
            first = await unless_client_leaves(request, anext(answer))
            if wanted.stream:
                return StreamingResponse(answer_as_chunks(head, first, answer), media_type="text/event-stream")
            whole = await unless_client_leaves(request, answer_in_one(head, first, answer))
            return Response(whole.model_dump_json(), media_type="application/json")
        except BaseException:
            await answer.aclose()
            raise

    async def models(self, _: Request) -> Response:
        return Response(ModelList(data=[self.card]).model_dump_json(), media_type="application/json")

    async def model(self, request: Request) -> Response:
        if request.path_params["id"] != self.name:
            raise self._unknown(request.path_params["id"])
        return Response(self.card.model_dump_json(), media_type="application/json")

    def _unknown(self, name: str) -> UnknownModelError:
        return UnknownModelError(f"there is no model '{name}' here; this server has '{self.name}'.")

    async def health(self, _: Request) -> Response:
        missing = [stage.name.lower() for stage in self.serving.pool.missing_stages()]
        status = "unavailable" if missing else "ok"
        return JSONResponse({"status": status, "missing": missing}, status_code=503 if missing else 200)

    async def metrics(self, _: Request) -> Response:
        return Response(self.serving.metrics.render(self.serving.pool.workers), media_type=CONTENT_TYPE_LATEST)

    async def list_workers(self, _: Request) -> Response:
        workers = [
            {
                "id": worker.id,
                "url": worker.client.url,
                "role": str(worker.role),
                "state": "ready",
                "outstanding": {stage.name.lower(): amount for stage, amount in worker.outstanding.items()},
            }
            for worker in self.serving.pool.workers
        ]
        return JSONResponse({"workers": workers})

    async def register_worker(self, request: Request) -> Response:
        try:
            message = msgspec.json.decode(await read_body(request, 2**16), type=RegisterRequest)
        except msgspec.MsgspecError as error:
            raise RequestError(f"the registration cannot be read: {error}.") from None
        try:
            worker = await self.serving.membership.register(message.url)
        except ConfigError as error:
            raise RequestError(error.message) from None
        return JSONResponse({"id": worker.id, "role": str(worker.role)})


def make_app(router: Router) -> Starlette:
    routes = [
        Route("/v1/chat/completions", router.chat_completions, methods=["POST"]),
        Route("/v1/models", router.models, methods=["GET"]),
        Route("/v1/models/{id:path}", router.model, methods=["GET"]),  # a hub's names have a slash
        Route("/health", router.health, methods=["GET"]),
        Route("/metrics", router.metrics, methods=["GET"]),
        Route("/workers", router.list_workers, methods=["GET"]),
        Route("/workers", router.guard.over(router.register_worker), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)


# --- the process ---------------------------------------------------------------------------------------------------


def run_router(options: RouterOptions) -> None:
    """Serve until SIGINT or SIGTERM. Raises `ConfigError` for a model that cannot be rendered for, `StartError` for a port in use."""
    with bind(options.host, options.port) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, listener))


async def _serve(options: RouterOptions, listener: socket.socket) -> None:
    warn_if_open(listener, options.cluster_secret)
    model = options.model
    async with open_serving(options) as serving:
        serving.membership.look_for(options.worker_urls)
        app = make_app(Router(serving, model.name, model.max_model_len, options.max_body_nbytes, options.cluster_secret))
        await StoppingServer(app, serving.pipeline.stop).serve(sockets=[listener])
