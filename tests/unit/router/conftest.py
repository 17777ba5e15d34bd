"""A cluster of fake workers, and the real app in front of one."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import aiohttp
import msgspec
import pytest
import uvicorn
from aiohttp import web
from PIL import Image

from triptych.config import ClusterLayout, ModelConfig
from triptych.demo import CHECKPOINT
from triptych.engine.arithmetic_runner import Fabric, expected_tokens
from triptych.errors import OverloadedError, TriptychError, UnauthorizedError
from triptych.media.item import MediaItem
from triptych.models.inspect import resolve_model
from triptych.router.fake_worker_client import CONFIG, FakeCosts, FakeWorkerClient
from triptych.router.http_worker_client import HttpWorkerClient, make_session
from triptych.router.metrics import RouterMetrics
from triptych.router.options import RouterOptions
from triptych.router.pipeline import Pipeline
from triptych.router.placement import Placement
from triptych.router.pool import WorkerPool
from triptych.router.router import Router, make_app
from triptych.router.running_request import GenerateJob
from triptych.router.serving import Serving, open_serving
from triptych.router.timing import Stopwatch
from triptych.sampling_params import SamplingParams
from triptych.worker.protocol import (
    EC_PATH,
    ENCODE_HEADER,
    ENCODE_PATH,
    GENERATE_PATH,
    INFO_PATH,
    KV_PATH,
    RELEASE_PATH,
    WATCH_PATH,
    ECDelivery,
    EncodeRequest,
    GenerateRequest,
    KVDelivery,
    ReleaseRequest,
)


def key_of(number: int) -> str:
    return f"{number:08x}" + "0" * 56


@dataclass
class Cluster:
    """Workers by name: E0, E1, P0, D0, EPD0 ..."""

    fabric: Fabric
    workers: dict[str, FakeWorkerClient]
    pool: WorkerPool
    placement: Placement
    pipeline: Pipeline
    metrics: RouterMetrics

    def __getitem__(self, name: str) -> FakeWorkerClient:
        return self.workers[name]

    def add(self, name: str) -> FakeWorkerClient:
        worker = self.workers[name] = FakeWorkerClient(name, name.rstrip("0123456789"), self.fabric)
        self.pool.join(worker)
        return worker

    async def generate(self, job: GenerateJob, stopwatch: Stopwatch | None = None) -> list[int]:
        """`stopwatch`, of the caller's own: to be looked at afterwards."""
        async with self.pipeline.run(job, stopwatch or Stopwatch(asyncio.get_running_loop().time)) as running:
            return [token.token_id async for batch in running.tokens() for token in batch]

    def assert_idle(self) -> None:
        """Nothing is left behind."""
        assert self.pipeline.num_encodes_under_way == 0
        assert [sum(worker.outstanding.values()) for worker in self.pool.workers] == [0] * len(self.pool.workers)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def _make_cluster(layout: str, *, costs: FakeCosts | None = None, **options: Any) -> Cluster:
    parsed, fabric = ClusterLayout.parse(layout), Fabric()
    config = replace(CONFIG, is_alone=len(parsed.roles) == 1)
    metrics = RouterMetrics()
    pool = WorkerPool(parsed, on_lost=lambda worker: placement.forget_worker(worker))
    workers: dict[str, FakeWorkerClient] = {}
    for role in parsed.roles:
        name = f"{role}{sum(str(other.config.role) == str(role) for other in workers.values())}"
        workers[name] = FakeWorkerClient(name, str(role), fabric, costs=costs, config=config)
        pool.join(workers[name])
    placement = Placement(pool, metrics, wait_s=options.pop("worker_wait_s", 15.0))
    return Cluster(fabric, workers, pool, placement, Pipeline(pool, placement, metrics, **options), metrics)


@pytest.fixture
def make_cluster() -> Callable[..., Cluster]:
    """`layout`, `costs`, and the pipeline's options. Within a running loop."""
    return _make_cluster


def _make_job(
    prompt: Sequence[int] = (11, 12, 13), *, pictures: Sequence[int] = (), num_rows: int = 4, name: str = "r",
    max_tokens: int = 6, **sampling: Any,
) -> GenerateJob:  # fmt: skip
    token_ids, items = list(prompt), list[MediaItem]()
    for number in pictures:
        items.append(MediaItem(key_of(number), "image", ((len(token_ids), num_rows),), num_rows, (1, 4, 4)))
        token_ids += [5] * num_rows + [20 + number]
    media = {key_of(number): b"picture %d" % number for number in pictures}
    return GenerateJob(name, tuple(token_ids), SamplingParams(max_tokens=max_tokens, **sampling), tuple(items), media)


@pytest.fixture
def make_job() -> Callable[..., GenerateJob]:
    """A prompt, then each picture as `num_rows` placeholders and one token."""
    return _make_job


@pytest.fixture
def expected() -> Callable[[GenerateJob], list[int]]:
    return lambda job: expected_tokens(job.token_ids, job.items, job.sampling.max_tokens, job.sampling.seed)


# --- the app ---


@dataclass
class Served:
    """The app on a loopback port. `workers` by name."""

    url: str
    workers: dict[str, FakeWorkerClient]
    serving: Serving
    session: aiohttp.ClientSession

    async def post(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            is_json = response.headers["content-type"].startswith("application/json")
            return response.status, await response.json() if is_json else await response.text()

    async def stream(self, body: dict[str, Any]) -> list[str]:
        """What follows each `data: `."""
        async with self.session.post(self.url + "/v1/chat/completions", json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


@pytest.fixture(scope="session")
def demo_model() -> ModelConfig:
    return resolve_model(CHECKPOINT, name="demo")


@asynccontextmanager
async def _serve(
    model: ModelConfig, layout: str, *, present: Sequence[str] | None = None, cluster_secret: str = "", **limits: Any
) -> AsyncGenerator[Served]:
    parsed, fabric = ClusterLayout.parse(layout), Fabric()
    config = replace(CONFIG, is_alone=len(parsed.roles) == 1)
    async with open_serving(RouterOptions(model, layout=parsed, cluster_secret=cluster_secret, **limits)) as serving:
        workers: dict[str, FakeWorkerClient] = {}
        for role in present if present is not None else [str(role) for role in parsed.roles]:
            name = f"{role}{sum(str(other.config.role) == role for other in workers.values())}"
            workers[name] = FakeWorkerClient(name, role, fabric, config=config)
            serving.pool.join(workers[name])
        app = make_app(Router(serving, "demo", model.max_model_len, 200_000, cluster_secret))
        server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="warning"))
        listener = socket.create_server(("127.0.0.1", 0))  # connections wait in its backlog until the server is up
        port = listener.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        async with aiohttp.ClientSession() as session:
            yield Served(f"http://127.0.0.1:{port}", workers, serving, session)
        server.should_exit = True
        await task


@pytest.fixture
def serve(demo_model: ModelConfig) -> Callable[..., AbstractAsyncContextManager[Served]]:
    """`layout`, `present` (roles that have joined; all by default), `cluster_secret`, and the limits among `RouterOptions`."""

    def open(layout: str, **options: Any) -> AbstractAsyncContextManager[Served]:
        return _serve(demo_model, layout, **options)

    return open


@pytest.fixture
def png() -> Callable[..., bytes]:
    def make(size: tuple[int, int] = (112, 112), colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
        buffer = BytesIO()
        Image.new("RGB", size, colour).save(buffer, "PNG")
        return buffer.getvalue()

    return make


# --- a worker behind HTTP ---


class FakeServer:
    """One fake worker behind HTTP, on its own port."""

    def __init__(self, worker: FakeWorkerClient) -> None:
        self.worker = worker
        self.heartbeat_s = 0.02
        self.secret = ""  # without which it answers 401
        app = web.Application(middlewares=[self.guard])
        app.router.add_post(GENERATE_PATH, self.generate)
        app.router.add_post(ENCODE_PATH, self.encode)
        app.router.add_post(EC_PATH, self.deliver)
        app.router.add_post(KV_PATH, self.deliver_kv)
        app.router.add_post(RELEASE_PATH, self.release)
        app.router.add_get(INFO_PATH, self.info)
        app.router.add_get(WATCH_PATH, self.watch)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = ""
        self.odd_answer = b""  # in place of an encode's

    async def start(self) -> None:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    @web.middleware
    async def guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.secret and request.headers.get("authorization") != f"Bearer {self.secret}":
            return refuse(UnauthorizedError("who are you?"))
        return await handler(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        message = msgspec.json.decode(await request.read(), type=GenerateRequest)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        events = self.worker.generate(message)
        try:
            first = await anext(events)
        except TriptychError as error:
            return refuse(error)
        await response.prepare(request)
        await response.write(b"data: " + msgspec.json.encode(first) + b"\n\n")
        async for event in events:
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        return response

    async def encode(self, request: web.Request) -> web.Response:
        message = msgspec.json.decode(request.headers[ENCODE_HEADER], type=EncodeRequest)
        if self.odd_answer:
            return web.Response(body=self.odd_answer)
        try:
            return web.Response(body=msgspec.json.encode(await self.worker.encode(message, await request.read())))
        except TriptychError as error:
            return refuse(error)

    async def deliver(self, request: web.Request) -> web.Response:
        await self.worker.deliver(msgspec.json.decode(await request.read(), type=ECDelivery))
        return web.Response(status=204)

    async def deliver_kv(self, request: web.Request) -> web.Response:
        await self.worker.deliver_kv(msgspec.json.decode(await request.read(), type=KVDelivery))
        return web.Response(status=204)

    async def release(self, request: web.Request) -> web.Response:
        await self.worker.release(msgspec.json.decode(await request.read(), type=ReleaseRequest).id)
        return web.Response(status=204)

    async def info(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.worker.info))

    async def watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while self.heartbeat_s:
            await response.write(b"data: {}\n\n")
            await asyncio.sleep(self.heartbeat_s)
        await asyncio.sleep(3600)  # silent
        return response


def refuse(error: TriptychError) -> web.Response:
    body = {"error": {"message": error.message, "type": error.type, "param": None, "code": error.code}}
    headers = {"retry-after": "7"} if isinstance(error, OverloadedError) else None
    return web.Response(status=error.status, body=msgspec.json.encode(body), headers=headers)


@asynccontextmanager
async def _serve_worker(worker: FakeWorkerClient) -> AsyncGenerator[tuple[FakeServer, HttpWorkerClient]]:
    server = FakeServer(worker)
    await server.start()
    async with make_session() as session:
        client = await HttpWorkerClient.connect(server.url, session, silence_s=0.2)
        try:
            yield server, client
        finally:
            await server.runner.cleanup()


@pytest.fixture
def served() -> Callable[[FakeWorkerClient], AbstractAsyncContextManager[tuple[FakeServer, HttpWorkerClient]]]:
    """A fake worker behind HTTP, and a client for it."""
    return _serve_worker
