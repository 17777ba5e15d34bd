"""Real workers of the demo model in this process, and what a router would send them."""

import asyncio
import io
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from random import Random

import msgspec
import pytest

from triptych.config import (
    CacheConfig,
    ConnectorConfig,
    DeviceConfig,
    EngineConfig,
    MediaConfig,
    ModelConfig,
    Role,
    SchedulerConfig,
)
from triptych.demo.pictures import draw, random_picture
from triptych.engine.core import EngineCore
from triptych.engine.events import GenerateEvent, NewTokens
from triptych.media.item import MediaItem
from triptych.models.inspect import resolve_model
from triptych.sampling_params import SamplingParams
from triptych.worker.protocol import ECTransferParams, EncodeRequest, GenerateRequest, KVTransferParams
from triptych.worker.worker import Worker

IMAGE_PAD = 5  # the demo model's placeholder token
GRID, NUM_ROWS = (1, 8, 8), 16  # of a picture of 112 x 112 pixels, in patches of 14 and rows of 2 x 2 patches


@cache
def model_config() -> ModelConfig:
    return resolve_model("demo")


def config_of(role: str = "EPD", is_alone: bool | None = None, **connector: object) -> EngineConfig:
    """A small worker; EPD serves alone unless it is said otherwise, every other role among others."""
    return EngineConfig(
        model=model_config(),
        role=Role.parse(role),
        is_alone=role == "EPD" if is_alone is None else is_alone,
        cache=CacheConfig(block_size=16, num_kv_blocks=64, encoder_cache_rows=256),
        scheduler=SchedulerConfig(max_num_batched_tokens=64),
        connector=ConnectorConfig(**connector),  # type: ignore[arg-type]
        device=DeviceConfig(device="cpu", num_threads=1),
        media=MediaConfig(max_media_nbytes=64 * 1024),
    )


@asynccontextmanager
async def running(*configs: EngineConfig) -> AsyncGenerator[list[Worker]]:
    workers = [Worker(config) for config in configs]
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.close()


@cache
def picture(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    draw(random_picture(Random(seed), (112, 112))).save(buffer, "PNG")
    return buffer.getvalue()


def key_of(seed: int) -> str:
    return f"{seed:064x}"


def encode_request(encode_id: str = "e", seed: int = 0, *, will_stay: bool = False) -> EncodeRequest:
    return EncodeRequest(encode_id, key_of(seed), "image", NUM_ROWS, GRID, will_stay=will_stay)


def generate_request(
    request_id: str = "r", seed: int | None = None, *, n: int = 4, hands_over: bool = False, num_text: int = 12
) -> GenerateRequest:
    """Text, and the picture of `seed` in its middle."""
    text = [100 + 7 * place for place in range(num_text)]
    half = num_text // 2
    items: tuple[MediaItem, ...] = ()
    if seed is not None:
        items = (MediaItem(key_of(seed), "image", ((half + 1, NUM_ROWS),), NUM_ROWS, GRID),)
        text[half:half] = [3, *[IMAGE_PAD] * NUM_ROWS, 4]
    return GenerateRequest(
        request_id,
        tuple(text),
        len(text),
        SamplingParams(max_tokens=n, temperature=0.0),
        ECTransferParams(items),
        KVTransferParams(do_remote_decode=hands_over),
    )


@dataclass
class Heard:
    """What a request's stream said: the tokens, and every other event in order."""

    tokens: list[int]
    others: list[GenerateEvent]

    @property
    def end(self) -> GenerateEvent:
        return self.others[-1]


async def listen(events: AsyncGenerator[GenerateEvent]) -> Heard:
    heard = Heard([], [])
    async for event in events:
        if isinstance(event, NewTokens):
            heard.tokens += [token.token_id for token in event.tokens]
        else:
            heard.others.append(event)
    return heard


async def between_steps(worker: Worker) -> None:
    """Until the engine has taken in what was sent to it, and has made a step since."""
    loop = asyncio.get_running_loop()
    for _ in range(2):
        done = asyncio.Event()

        def say(_: EngineCore, done: asyncio.Event = done) -> None:
            loop.call_soon_threadsafe(done.set)

        worker._thread.submit(say)  # pyright: ignore[reportPrivateUsage]
        await done.wait()


async def until(worker: Worker, name: str, value: float) -> None:
    """Until a gauge has a value; each look comes after another step of the engine."""
    async with asyncio.timeout(20):
        while worker.gauges()[name] != value:
            await between_steps(worker)


def held_by(worker: Worker) -> dict[str, float]:
    """What a worker holds for somebody, by name: blocks, pins, waits, leases, streams. Empty when all have left."""
    gauges = worker.gauges()
    names = ("requests_running", "requests_waiting", "encodes_queued", "item_waits", "leases", "streams")
    held = {name: gauges[name] for name in (*names, "encoder_cache_items_pinned")}
    held["kv_blocks_in_use"] = gauges["kv_blocks"] - gauges["kv_blocks_free"]
    return {name: value for name, value in held.items() if value}


async def assert_nothing_is_held(worker: Worker) -> None:
    await between_steps(worker)
    assert held_by(worker) == {}


def count_preparations(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that the worker turns into tower inputs from now on."""
    prepared: list[bytes] = []
    media = worker._media  # pyright: ignore[reportPrivateUsage]
    preprocess = media._preprocess  # pyright: ignore[reportPrivateUsage]

    def counted(data: bytes, modality: str, grid: tuple[int, ...], num_rows: int) -> object:
        prepared.append(data)
        return preprocess(data, modality, grid, num_rows)

    monkeypatch.setattr(media, "_preprocess", counted)
    return prepared


def moved(request: GenerateRequest, tokens: list[int], kv: KVTransferParams) -> GenerateRequest:
    """The same request as a decode worker gets it."""
    return msgspec.structs.replace(request, token_ids=(*request.token_ids, *tokens), kv_transfer_params=kv)
