"""`Serving`: the parts of a router, wired once. `router.py` puts HTTP in front of them, `llm.py` a Python object."""

from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from triptych.router.chat import ChatService
from triptych.router.http_worker_client import make_session
from triptych.router.membership import Membership
from triptych.router.metrics import RouterMetrics
from triptych.router.options import RouterOptions
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
async def open_serving(options: RouterOptions) -> AsyncGenerator[Serving]:
    """Everything that a router needs, in the running loop. On leaving, requests that still run end with an error."""
    model, metrics = options.model, RouterMetrics()

    def forget(worker: PooledWorker) -> None:
        placement.forget_worker(worker)
        metrics.lost_workers.labels(str(worker.role)).inc()

    pool = WorkerPool(options.layout, on_lost=forget)
    placement = Placement(pool, metrics, wait_s=options.worker_wait_s)
    pipeline = Pipeline(
        pool,
        placement,
        metrics,
        max_in_flight=options.max_in_flight,
        request_timeout_s=options.request_timeout_s,
        encode_timeout_s=options.encode_timeout_s,
    )
    with ThreadPoolExecutor(RENDER_THREADS, "render") as executor:
        renderer = Renderer(model, options.media, executor)
        async with make_session(options.cluster_secret) as workers, aiohttp.ClientSession(trust_env=False) as web:
            chat = ChatService(
                renderer, pipeline, pool, metrics, web,
                max_model_len=model.max_model_len, vocab_size=model.vocab_size,
                request_timeout_s=options.request_timeout_s,
            )  # fmt: skip
            membership = Membership(pool, workers, model.weights_digest)
            try:
                yield Serving(pool, membership, pipeline, chat, metrics)
            finally:
                await membership.close()
                await pipeline.stop()
                await pool.close()
