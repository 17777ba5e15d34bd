"""A whole cluster in this process: real workers (engine threads, shared memory between them) under the router's own pipeline."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from oracle import Wanted
from worker_rig import held_by

from triptych.config import CacheConfig, ClusterLayout, DeviceConfig, EngineConfig, SchedulerConfig
from triptych.media.item import MediaItem
from triptych.models.inspect import resolve_model
from triptych.router.metrics import RouterMetrics
from triptych.router.pipeline import Pipeline
from triptych.router.placement import Placement
from triptych.router.pool import WorkerPool
from triptych.router.running_request import GenerateJob
from triptych.router.timing import Stopwatch
from triptych.sampling_params import SamplingParams
from triptych.worker.worker import Worker


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


def job_of(name: str, wanted: Wanted, stop_ids: tuple[int, ...], sampling: SamplingParams | None = None) -> GenerateJob:
    """The request as the router would send it, made from the oracle's tokens."""
    keys = [blake2b(data, digest_size=32).hexdigest() for data in wanted.request.pictures]
    items = tuple(
        MediaItem(key, "image", (run,), run[1], grid) for key, run, grid in zip(keys, wanted.runs, wanted.grids, strict=True)
    )
    stops = stop_ids if wanted.request.has_stop else ()
    greedy = SamplingParams(max_tokens=wanted.request.max_tokens, temperature=0.0, stop_token_ids=stops, logprobs=0)
    return GenerateJob(name, wanted.prompt, sampling or greedy, items, dict(zip(keys, wanted.request.pictures, strict=True)))


@dataclass
class Cluster:
    pipeline: Pipeline
    workers: list[Worker]

    async def ask(self, job: GenerateJob) -> Answer:
        answer = Answer()
        async with self.pipeline.run(job, Stopwatch()) as running:
            async for tokens in running.tokens():
                answer.tokens += [token.token_id for token in tokens]
                answer.logprobs += [token.logprob for token in tokens]
        return answer

    async def assert_nothing_is_held(self) -> None:
        """Aborts and releases travel for a moment; then nothing is held for anybody anywhere."""
        deadline = asyncio.get_running_loop().time() + 10.0
        while any(map(held_by, self.workers)) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert {worker.info.worker_id: held_by(worker) for worker in self.workers if held_by(worker)} == {}


@asynccontextmanager
async def running_cluster(
    layout: str,
    *,
    model: str | Path = "demo",
    block_size: int = 16,
    num_kv_blocks: int | None = None,
    chunk: int = 2048,
    max_num_seqs: int = 64,
    encoder_cache_rows: int = 4096,
) -> AsyncGenerator[Cluster]:
    roles = ClusterLayout.parse(layout).roles
    base = EngineConfig(
        model=resolve_model(model),
        cache=CacheConfig(
            block_size=block_size,
            kv_cache_nbytes=64 * 1024**2,
            num_kv_blocks=num_kv_blocks,
            encoder_cache_rows=encoder_cache_rows,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk, max_num_seqs=min(max_num_seqs, chunk)),
        device=DeviceConfig(device="cpu", num_threads=1),
    )
    workers = [Worker(replace(base, role=role, is_alone=len(roles) == 1)) for role in roles]
    pool = WorkerPool(ClusterLayout.parse(layout))
    placement = Placement(pool)
    pipeline = Pipeline(pool, placement, RouterMetrics(), max_in_flight=512)
    try:
        for worker in workers:
            pool.join(worker)
        yield Cluster(pipeline, workers)
    finally:
        await pipeline.stop()
        await pool.close()
        for worker in workers:
            await worker.close()
