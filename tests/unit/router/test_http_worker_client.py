"""The client over HTTP against a small server that speaks worker/protocol.py, with the arithmetic fake behind it.

The same contract runs over the fake itself: whatever is behind the interface, a caller sees the same.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from triptych.engine.events import Encoded, EncodeFailed, Failed, Finished, GenerateEvent, HandedOver, NewTokens
from triptych.errors import FailureReason, InternalError, OverloadedError, RequestError, TriptychError, WorkerLostError
from triptych.router.fake_worker_client import FakeCosts, FakePlane, FakeWorkerClient
from triptych.router.http_worker_client import HttpWorkerClient, make_session
from triptych.router.running_request import GenerateJob
from triptych.router.worker_client import WorkerClient
from triptych.worker.protocol import (
    ABORT_PATH,
    EC_PATH,
    ENCODE_HEADER,
    ENCODE_PATH,
    GENERATE_PATH,
    INFO_PATH,
    RELEASE_PATH,
    WATCH_PATH,
    AbortRequest,
    ECDelivery,
    ECTransferParams,
    EncodeRequest,
    GenerateRequest,
    KVTransferParams,
    ReleaseRequest,
)

Make = Callable[..., Any]


class FakeServer:
    """One fake worker behind HTTP, on its own port."""

    def __init__(self, worker: FakeWorkerClient) -> None:
        self.worker = worker
        self.heartbeat_s = 0.02
        app = web.Application()
        app.router.add_post(GENERATE_PATH, self.generate)
        app.router.add_post(ENCODE_PATH, self.encode)
        app.router.add_post(EC_PATH, self.deliver)
        app.router.add_post(ABORT_PATH, self.abort)
        app.router.add_post(RELEASE_PATH, self.release)
        app.router.add_get(INFO_PATH, self.info)
        app.router.add_get(WATCH_PATH, self.watch)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = ""

    async def start(self) -> None:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

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
        try:
            return web.Response(body=msgspec.json.encode(await self.worker.encode(message, await request.read())))
        except TriptychError as error:
            return refuse(error)

    async def deliver(self, request: web.Request) -> web.Response:
        await self.worker.deliver(msgspec.json.decode(await request.read(), type=ECDelivery))
        return web.Response(status=204)

    async def abort(self, request: web.Request) -> web.Response:
        await self.worker.abort(msgspec.json.decode(await request.read(), type=AbortRequest).id)
        return web.Response(status=204)

    async def release(self, request: web.Request) -> web.Response:
        await self.worker.release(msgspec.json.decode(await request.read(), type=ReleaseRequest).request_id)
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
async def served(worker: FakeWorkerClient) -> AsyncGenerator[tuple[FakeServer, HttpWorkerClient]]:
    server = FakeServer(worker)
    await server.start()
    async with make_session() as session:
        client = await HttpWorkerClient.connect(server.url, session, silence_s=0.2)
        try:
            yield server, client
        finally:
            await server.runner.cleanup()


@pytest.fixture(params=["fake", "http"])
async def client_and_worker(request: pytest.FixtureRequest) -> AsyncIterator[tuple[WorkerClient, FakeWorkerClient]]:
    worker = FakeWorkerClient("EPD0", "EPD", FakePlane())
    if request.param == "fake":
        yield worker, worker
        return
    async with served(worker) as (_, client):
        yield client, worker


def message_of(job: GenerateJob, **kv: Any) -> GenerateRequest:
    return GenerateRequest(
        job.request_id, job.token_ids, len(job.token_ids), job.sampling, ECTransferParams(job.items), KVTransferParams(**kv)
    )


async def collect(client: WorkerClient, request: GenerateRequest) -> list[GenerateEvent]:
    return [event async for event in client.generate(request)]


Pair = tuple[WorkerClient, FakeWorkerClient]


async def test_a_clients_info_is_the_workers(client_and_worker: Pair) -> None:
    client, worker = client_and_worker
    assert client.info == worker.info


async def test_a_stream_is_its_tokens_and_one_terminal_event(
    client_and_worker: Pair, make_job: Make, expected: Callable[[GenerateJob], list[int]]
) -> None:
    client, _ = client_and_worker
    *tokens, last = await collect(client, message_of(make_job()))
    assert [token.token_id for event in tokens if isinstance(event, NewTokens) for token in event.tokens] == expected(make_job())
    assert isinstance(last, Finished)
    assert last.reason == "length"


async def test_a_hand_over_carries_its_ticket(client_and_worker: Pair, make_job: Make) -> None:
    client, _ = client_and_worker
    last = (await collect(client, message_of(make_job(), do_remote_decode=True)))[-1]
    assert isinstance(last, HandedOver)
    assert last.ticket.num_tokens == len(make_job().token_ids)


async def test_an_encode_takes_the_bytes_as_they_are_and_gives_a_ticket(client_and_worker: Pair) -> None:
    client, worker = client_and_worker
    event = await client.encode(EncodeRequest("e", "0" * 64, "image", 4, (1, 4, 4)), b"\x00\xff\r\n")
    assert isinstance(event, Encoded)
    assert event.ticket is not None
    assert worker.record.media == [b"\x00\xff\r\n"]
    assert worker.record.encodes[0].grid == (1, 4, 4)


async def test_a_failed_encode_is_an_answer_and_no_exception(client_and_worker: Pair) -> None:
    client, worker = client_and_worker
    worker.faults.encodes.append(FailureReason.BAD_MEDIA)
    event = await client.encode(EncodeRequest("e", "0" * 64, "image", 4), b"")
    assert isinstance(event, EncodeFailed)
    assert event.reason == FailureReason.BAD_MEDIA


async def test_a_refusal_comes_back_as_its_own_type(client_and_worker: Pair, make_job: Make) -> None:
    client, worker = client_and_worker
    worker.faults.generates.append(RequestError("no such thing."))
    with pytest.raises(RequestError, match="no such thing"):
        await collect(client, message_of(make_job()))
    worker.faults.generates.append(OverloadedError("full", retry_after_s=7.0))
    with pytest.raises(OverloadedError) as caught:
        await collect(client, message_of(make_job()))
    assert caught.value.retry_after_s == 7.0


async def test_a_failed_request_is_an_event(client_and_worker: Pair, make_job: Make) -> None:
    client, worker = client_and_worker
    worker.faults.generates.append(Failed("", "no KV", "kv_unavailable", 503, FailureReason.STALE))
    assert await collect(client, message_of(make_job())) == [Failed("r", "no KV", "kv_unavailable", 503, FailureReason.STALE)]


async def test_leaving_a_stream_early_aborts_it(client_and_worker: Pair, make_job: Make) -> None:
    client, worker = client_and_worker
    worker.costs = FakeCosts(decode_s=0.01)
    events = client.generate(message_of(make_job()))
    await anext(events)
    await events.aclose()
    await until(lambda: worker.record.aborted == ["r"])


async def test_cancelling_an_encode_aborts_it(client_and_worker: Pair) -> None:
    client, worker = client_and_worker
    worker.costs = FakeCosts(encode_s=3600)
    task = asyncio.create_task(client.encode(EncodeRequest("e", "0" * 64, "image", 4), b"x"))
    await until(lambda: len(worker.record.encodes) == 1)
    task.cancel()
    await until(lambda: worker.record.aborted == ["e"])


async def test_deliveries_and_releases_arrive(client_and_worker: Pair) -> None:
    client, worker = client_and_worker
    delivery = ECDelivery("r", "0" * 64, failure=FailureReason.BAD_MEDIA, message="broken")
    await client.deliver(delivery)
    await client.release("r")
    await client.abort("r")
    assert worker.record.deliveries == [delivery]
    assert worker.record.released == ["r"]


async def until(holds: Callable[[], bool]) -> None:
    """Poll, since what is waited for happens behind a socket."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 (nothing there could set an event)
            await asyncio.sleep(0.005)


# --- HTTP only


async def test_a_server_that_dies_within_a_stream_is_a_lost_worker(make_job: Make) -> None:
    worker = FakeWorkerClient("EPD0", "EPD", FakePlane(), costs=FakeCosts(decode_s=0.01))
    worker.faults.die_after_tokens = 2
    async with served(worker) as (_, client):
        with pytest.raises(WorkerLostError, match="EPD0"):
            await collect(client, message_of(make_job()))


async def test_a_port_where_nobody_listens_is_a_lost_worker(make_job: Make) -> None:
    async with served(FakeWorkerClient("EPD0", "EPD", FakePlane())) as (server, client):
        await server.runner.cleanup()
        for call in (
            collect(client, message_of(make_job())),
            client.encode(EncodeRequest("e", "k", "image", 1), b""),
            client.release("r"),
        ):
            with pytest.raises(WorkerLostError):
                await call
        async with make_session() as session:
            with pytest.raises(WorkerLostError):
                await HttpWorkerClient.connect(server.url, session)


async def test_a_watch_ends_with_the_connection_and_with_silence() -> None:
    for end in ("connection", "silence"):
        async with served(FakeWorkerClient("EPD0", "EPD", FakePlane())) as (server, client):
            watch = asyncio.create_task(client.watch())
            done, _ = await asyncio.wait({watch}, timeout=0.1)
            assert not done
            if end == "connection":
                await server.runner.cleanup()
            else:
                server.heartbeat_s = 0.0
            await asyncio.wait_for(watch, 2)


async def test_what_the_protocol_does_not_know_is_an_internal_error() -> None:
    worker = FakeWorkerClient("EPD0", "EPD", FakePlane())
    async with served(worker) as (server, client):
        del client
        server.worker.info = msgspec.structs.replace(worker.info, role="X")

        async def odd(request: web.Request) -> web.Response:
            return web.Response(body=b'{"worker_id": 5}')

        app = web.Application()
        app.router.add_get(INFO_PATH, odd)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with make_session() as session:
            with pytest.raises(InternalError, match="protocol"):
                await HttpWorkerClient.connect(f"http://127.0.0.1:{runner.addresses[0][1]}", session)
        await runner.cleanup()


async def test_a_ticket_longer_than_a_readers_line_limit_arrives(make_job: Make) -> None:
    worker = FakeWorkerClient("EPD0", "EPD", FakePlane())
    async with served(worker) as (_, client):
        worker.faults.generates.append(Failed("", "x" * 1_000_000, "internal_error", 500))
        (event,) = await collect(client, message_of(make_job()))
        assert isinstance(event, Failed)
        assert len(event.message) == 1_000_000
