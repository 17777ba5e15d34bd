"""`LocalWorkerClient`: a worker in the same process. `LLM` serves through the router's own pipeline with it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from triptych.engine.events import EncodeEvent, GenerateEvent
from triptych.router.worker_client import WorkerClient
from triptych.worker.protocol import ECDelivery, EncodeRequest, GenerateRequest, WorkerInfo


class InProcessWorker(Protocol):
    """What `worker.Worker` offers; named here because that class imports torch, and the router must not."""

    @property
    def info(self) -> WorkerInfo: ...
    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]: ...
    async def encode(self, request: EncodeRequest, media: bytes) -> EncodeEvent: ...
    async def deliver(self, delivery: ECDelivery) -> None: ...
    async def abort(self, id: str, /) -> None: ...
    async def release(self, id: str, /) -> None: ...
    async def close(self) -> None: ...


class LocalWorkerClient(WorkerClient):
    def __init__(self, worker: InProcessWorker) -> None:
        self.info = worker.info
        self._worker = worker
        self._closed = asyncio.Event()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        return self._worker.generate(request)

    async def encode(self, request: EncodeRequest, media: bytes) -> EncodeEvent:
        return await self._worker.encode(request, media)

    async def deliver(self, delivery: ECDelivery) -> None:
        await self._worker.deliver(delivery)

    async def abort(self, id: str) -> None:
        await self._worker.abort(id)

    async def release(self, id: str) -> None:
        await self._worker.release(id)

    async def watch(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        self._closed.set()
        await self._worker.close()
