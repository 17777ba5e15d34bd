"""The client over HTTP against a small server that speaks worker/protocol.py, with the arithmetic fake behind it.

The same contract runs over the fake itself: whatever is behind the interface, a caller sees the same.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from triptych.engine.arithmetic_runner import Fabric
from triptych.engine.events import Encoded, EncodeFailed, Failed, Finished, GenerateEvent, HandedOver, NewTokens
from triptych.errors import (
    ConfigError,
    FailureReason,
    InternalError,
    OverloadedError,
    RequestError,
    TriptychError,
    WorkerLostError,
)
from triptych.http_server import StoppingServer
from triptych.output import TokenLogprob
from triptych.router.fake_worker_client import FakeCosts, FakeWorkerClient
from triptych.router.http_worker_client import SILENCE_S, HttpWorkerClient, make_session
from triptych.router.running_request import GenerateJob
from triptych.router.worker_client import WorkerClient
from triptych.worker.protocol import (
    ECDelivery,
    ECTransferParams,
    EncodeRequest,
    GenerateRequest,
    KVDelivery,
    KVTransferParams,
)

Make = Callable[..., Any]


@pytest.fixture(params=["fake", "http"])
async def client_and_worker(request: pytest.FixtureRequest, served: Make) -> AsyncIterator[tuple[WorkerClient, FakeWorkerClient]]:
    worker = FakeWorkerClient("EPD0", "EPD", Fabric())
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
    assert last.tickets[-1].num_tokens == len(make_job().token_ids)


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


async def test_deliveries_and_releases_arrive(client_and_worker: Pair, make_job: Make) -> None:
    client, worker = client_and_worker
    delivery = ECDelivery("r", "0" * 64, failure=FailureReason.BAD_MEDIA, message="broken")
    await client.deliver(delivery)
    await client.release("r")
    assert worker.record.deliveries == [delivery]
    last = (await collect(client, message_of(make_job(), do_remote_decode=True)))[-1]
    assert isinstance(last, HandedOver)
    kv_delivery = KVDelivery("unknown", last.tickets, (7,), is_last=True)
    await client.deliver_kv(kv_delivery)
    assert worker.record.kv_deliveries == [kv_delivery]
    assert worker.record.released == ["r"]


async def until(holds: Callable[[], bool]) -> None:
    """Poll, since what is waited for happens behind a socket."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 (nothing there could set an event)
            await asyncio.sleep(0.005)


# --- HTTP only


async def test_a_server_that_dies_within_a_stream_is_a_lost_worker(make_job: Make, served: Make) -> None:
    worker = FakeWorkerClient("EPD0", "EPD", Fabric(), costs=FakeCosts(decode_s=0.01))
    worker.faults.die_after_tokens = 2
    async with served(worker) as (_, client):
        with pytest.raises(WorkerLostError, match="EPD0"):
            await collect(client, message_of(make_job()))


async def test_a_port_where_nobody_listens_is_a_lost_worker(make_job: Make, served: Make) -> None:
    async with served(FakeWorkerClient("EPD0", "EPD", Fabric())) as (server, client):
        await server.runner.cleanup()
        for call in (
            collect(client, message_of(make_job())),
            client.encode(EncodeRequest("e", "0" * 64, "image", 1), b""),
            client.release("r"),
        ):
            with pytest.raises(WorkerLostError):
                await call
        async with make_session() as session:
            with pytest.raises(WorkerLostError):
                await HttpWorkerClient.connect(server.url, session)


async def test_a_watch_ends_with_the_connection_and_with_silence(served: Make) -> None:
    for end in ("connection", "silence"):
        async with served(FakeWorkerClient("EPD0", "EPD", Fabric())) as (server, client):
            watch = asyncio.create_task(client.watch())
            done, _ = await asyncio.wait({watch}, timeout=0.1)
            assert not done
            if end == "connection":
                await server.runner.cleanup()
            else:
                server.heartbeat_s = 0.0
            await asyncio.wait_for(watch, 2)


async def test_a_worker_that_stood_still_does_not_wake_up_closing_connections_that_a_router_still_uses() -> None:
    async def nothing() -> None: ...

    server = StoppingServer(None, nothing)
    assert server.config.timeout_keep_alive > 2 * SILENCE_S


async def test_what_the_protocol_does_not_know_is_an_internal_error(served: Make, make_job: Make) -> None:
    async with served(FakeWorkerClient("EPD0", "EPD", Fabric())) as (server, client):
        server.odd_answer = b'{"event": "gossip", "id": 5}'
        with pytest.raises(InternalError, match="protocol"):
            await client.encode(EncodeRequest("e", "0" * 64, "image", 1), b"")


async def test_a_ticket_longer_than_a_readers_line_limit_arrives(make_job: Make, served: Make) -> None:
    worker = FakeWorkerClient("EPD0", "EPD", Fabric())
    async with served(worker) as (_, client):
        worker.faults.generates.append(Failed("", "x" * 1_000_000, "internal_error", 500))
        (event,) = await collect(client, message_of(make_job()))
        assert isinstance(event, Failed)
        assert len(event.message) == 1_000_000


# --- workers that are not what they should be

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
INFO = FakeWorkerClient("EPD0", "EPD", Fabric()).info
ENCODE = EncodeRequest("e", "0" * 64, "image", 4)


@asynccontextmanager
async def worker_that(answer: Handler, secret: str = "") -> AsyncGenerator[HttpWorkerClient]:
    """Answers every call by `answer`."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with make_session(secret) as session:
            yield HttpWorkerClient(f"http://127.0.0.1:{runner.addresses[0][1]}", INFO, session, silence_s=5.0)
    finally:
        await runner.cleanup()


def every_call(client: HttpWorkerClient, request: GenerateRequest) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "generate": lambda: collect(client, request),
        "encode": lambda: client.encode(ENCODE, b"x"),
        "deliver": lambda: client.deliver(ECDelivery("r", "0" * 64)),
        "release": lambda: client.release("r"),
        "connect": lambda: HttpWorkerClient.connect(client.url, client._session),  # pyright: ignore[reportPrivateUsage]
    }


async def failures(client: HttpWorkerClient, request: GenerateRequest) -> dict[str, TriptychError]:
    """What each call raised; all must."""
    raised: dict[str, TriptychError] = {}
    for name, call in every_call(client, request).items():
        with pytest.raises(TriptychError) as caught:
            await call()
        raised[name] = caught.value
    return raised


async def test_every_call_shows_the_clusters_secret_and_says_what_it_carries(make_job: Make) -> None:
    seen: list[tuple[str, str | None, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("authorization"), request.headers["content-type"]))
        return web.Response(status=500)

    async with worker_that(answer, "0123456789abcdef") as client:
        await failures(client, message_of(make_job()))
        await client.watch()
    assert len({path for path, *_ in seen}) == 6
    assert {shown for _, shown, _ in seen} == {"Bearer 0123456789abcdef"}
    assert [path for path, _, kind in seen if kind != "application/json"] == ["/inference/v1/encode"]


async def test_a_worker_with_another_secret_is_a_mistake_of_the_configuration_and_not_lost(make_job: Make) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=401, text="whatever")

    async with worker_that(answer) as client:
        for error in (await failures(client, message_of(make_job()))).values():
            assert isinstance(error, ConfigError)
            assert "start both with the same TRIPTYCH_CLUSTER_SECRET" in str(error)
            assert client.url in str(error)
        await asyncio.wait_for(client.watch(), 5)  # it cannot be watched, so it does not stay


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_a_refusal_and_its_target_never_hears_of_it(status: int, make_job: Make) -> None:
    heard: list[str] = []

    async def target(request: web.Request) -> web.Response:
        heard.append(request.path)
        return web.Response(body=msgspec.json.encode(INFO))

    async with worker_that(target) as elsewhere:

        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"location": elsewhere.url + request.path})

        async with worker_that(answer, "0123456789abcdef") as client:
            raised = await failures(client, message_of(make_job()))
            await asyncio.wait_for(client.watch(), 5)
    assert heard == []
    assert all(str(status) in str(error) for error in raised.values())


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"data: " + b"x" * 50_000)


async def test_an_answer_without_end_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch, make_job: Make) -> None:
    monkeypatch.setattr("triptych.router.http_worker_client.MAX_EVENT_NBYTES", 10**6)
    async with worker_that(endless) as client:
        for error in (await failures(client, message_of(make_job()))).values():
            assert isinstance(error, InternalError)
            assert "more than" in str(error)


async def test_a_refusal_without_end_ends_at_the_limit(make_job: Make) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=503)
        await response.prepare(request)
        while True:
            await response.write(b" " * 50_000)

    async with worker_that(answer) as client:
        for error in (await failures(client, message_of(make_job()))).values():
            assert "more than 65536 bytes" in str(error)


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"7", b"[" * 50_000, b'{"a":' * 10_000, b'{"error": [1]}', b'{"error": {"message": {}}}', b"\xff\xfe"],
)
async def test_nonsense_is_an_error_of_ours_whatever_its_form(status: int, body: bytes, make_job: Make) -> None:
    async def answer(request: web.Request) -> web.Response:
        data = b"data: " + body + b"\n\n" if status == 200 and "generate" in request.path else body
        return web.Response(status=status, body=data)

    async with worker_that(answer) as client:
        for name, call in every_call(client, message_of(make_job())).items():
            if status == 200 and name in ("deliver", "release"):
                await call()  # whose answers say nothing
            else:
                with pytest.raises(TriptychError):
                    await call()


async def test_a_stream_with_more_tokens_than_were_asked_for_is_an_error(make_job: Make) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            tokens = NewTokens("r", (TokenLogprob(5, -0.5), TokenLogprob(6, -0.5)))
            await response.write(b"data: " + msgspec.json.encode(tokens) + b"\n\n")

    job = make_job()  # of 6 tokens, 1 of them generated before
    request = msgspec.structs.replace(message_of(job), token_ids=(*job.token_ids, 300))
    received: list[int] = []
    async with worker_that(answer) as client:
        with pytest.raises(InternalError, match="more tokens"):
            async for event in client.generate(request):
                assert isinstance(event, NewTokens)
                received += [token.token_id for token in event.tokens]
    assert len(received) == 4


async def test_an_event_that_comes_byte_by_byte_is_the_same_event(make_job: Make) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for byte in b": a comment\n\ndata: " + msgspec.json.encode(Failed("r", "no", "internal_error", 500)) + b"\n\n":
            await response.write(bytes([byte]))
            await response.drain()
        return response

    async with worker_that(answer) as client:
        assert await collect(client, message_of(make_job())) == [Failed("r", "no", "internal_error", 500)]


async def test_a_delivery_of_a_long_failure_is_cut_to_what_a_worker_takes() -> None:
    taken: list[ECDelivery] = []

    async def answer(request: web.Request) -> web.Response:
        taken.append(msgspec.json.decode(await request.read(), type=ECDelivery))
        return web.Response(status=204)

    async with worker_that(answer) as client:
        await client.deliver(ECDelivery("r", "0" * 64, failure=FailureReason.BAD_MEDIA, message="no picture " * 1000))
    assert (taken[0].failure, taken[0].message[:10], len(taken[0].message)) == (FailureReason.BAD_MEDIA, "no picture", 4096)
