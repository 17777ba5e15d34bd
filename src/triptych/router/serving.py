"""`Serving`: the parts of a router, wired once. `router.py` puts HTTP in front of them, `llm.py` a Python object."""

from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from triptych.config import ClusterLayout, MediaConfig, ModelConfig
from triptych.router.chat import ChatService
from triptych.router.http_worker_client import make_session
from triptych.router.membership import Membership
from triptych.router.metrics import RouterMetrics
from triptych.router.pipeline import Pipeline
from triptych.router.placement import Placement
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.router.render import Renderer

RENDER_THREADS = 2


@dataclass(frozen=True, slots=True)
class Serving:
    pool: WorkerPool
    membership: Membership
    pipeline: Pipeline
    chat: ChatService
    metrics: RouterMetrics


@asynccontextmanager
async def open_serving(
    model: ModelConfig,
    layout: ClusterLayout | None,
    media: MediaConfig,
    *,
    max_in_flight: int = 256,
    request_timeout_s: float = 600.0,
    worker_wait_s: float = 15.0,
    encode_timeout_s: float = 20.0,
    cluster_secret: str = "",
) -> AsyncGenerator[Serving]:
    """Everything that a router needs, in the running loop. On leaving, requests that still run end with an error."""
    metrics = RouterMetrics()

    def forget(worker: PooledWorker) -> None:
        placement.forget_worker(worker)
        metrics.lost_workers.labels(str(worker.role)).inc()

    pool = WorkerPool(layout, on_lost=forget)
    placement = Placement(pool, metrics, wait_s=worker_wait_s)
    pipeline = Pipeline(
        pool, placement, metrics,
        max_in_flight=max_in_flight, request_timeout_s=request_timeout_s, encode_timeout_s=encode_timeout_s,
    )  # fmt: skip
    with ThreadPoolExecutor(RENDER_THREADS, "render") as executor:
        renderer = Renderer(model, media, executor)
        async with make_session(cluster_secret) as workers, aiohttp.ClientSession(trust_env=False) as web:
            chat = ChatService(
                renderer, pipeline, pool, metrics, web,
                max_model_len=model.max_model_len, request_timeout_s=request_timeout_s,
            )  # fmt: skip
            membership = Membership(pool, workers, model.weights_digest)
            try:
                yield Serving(pool, membership, pipeline, chat, metrics)
            finally:
                await membership.close()
                await pipeline.stop()
                await pool.close()
