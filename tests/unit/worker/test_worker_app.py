"""A worker's HTTP front over loopback: every route, wrong calls, clients that leave, and the engine's death."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import pytest
from starlette.routing import Route
from worker_rig import (
    assert_nothing_is_held,
    config_of,
    encode_request,
    generate_request,
    key_of,
    picture,
    until,
)

import triptych.worker.app as app_module
from triptych.config import EngineConfig
from triptych.engine.core import EngineCore
from triptych.engine.events import ECNeeded, Encoded, EncodeEvent, Failed, Finished, GenerateEvent, HandedOver, NewTokens
from triptych.errors import FailureReason, InternalError, StartError
from triptych.http_server import StoppingServer, bind
from triptych.worker.app import WorkerApp, run_worker
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
    EncodeRequest,
    GenerateRequest,
    ReleaseRequest,
    StartReport,
    WorkerInfo,
)
from triptych.worker.registration import Registration
from triptych.worker.worker import Worker

SECRET = "secret-of-this-cluster"
NUM_OTHER_WATCHERS = 1000


@dataclass
class Served:
    worker: Worker
    session: aiohttp.ClientSession  # knows the worker's address
    registration: Registration

    async def post(self, path: str, message: object) -> tuple[int, bytes]:
        body = message if isinstance(message, bytes) else msgspec.json.encode(message)
        async with self.session.post(path, data=body) as response:
            return response.status, await response.read()

    async def encode(self, request: EncodeRequest, media: bytes) -> tuple[int, bytes]:
        headers = {ENCODE_HEADER: msgspec.json.encode(request).decode()}
        async with self.session.post(ENCODE_PATH, data=media, headers=headers) as response:
            return response.status, await response.read()

    async def generate(self, request: GenerateRequest) -> list[GenerateEvent]:
        status, body = await self.post(GENERATE_PATH, request)
        assert status == 200
        return events_of(body)


def events_of(body: bytes) -> list[GenerateEvent]:
    lines = [line for line in body.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    return [msgspec.json.decode(line[6:], type=GenerateEvent) for line in lines]


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = msgspec.json.decode(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


class ThreadServer(StoppingServer):
    """Says when it listens, and where."""

    def __init__(self, app: WorkerApp) -> None:
        super().__init__(app.to_asgi(), app.stop)
        self.listens = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


@asynccontextmanager
async def served(config: EngineConfig) -> AsyncGenerator[Served]:
    """In a thread of its own with its own loop, so that a client here is as far away as a router."""
    worker, registration = Worker(config), Registration("http://127.0.0.1:1", "http://127.0.0.1:2")
    registration.watchers = NUM_OTHER_WATCHERS  # so that it does not look for a router
    server = ThreadServer(WorkerApp(worker, registration))
    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    assert await asyncio.to_thread(server.listens.wait, 20)
    try:
        async with aiohttp.ClientSession(server.url) as session:
            yield Served(worker, session, registration)
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join, 20)
    assert not worker.is_alive, "the end of the server is the end of the worker"


def num_watchers(front: Served) -> int:
    return front.registration.watchers - NUM_OTHER_WATCHERS


async def kill_engine(worker: Worker) -> None:
    def broken(_: EngineCore) -> None:
        raise ZeroDivisionError("a bug")

    worker._thread.submit(broken)  # pyright: ignore[reportPrivateUsage]
    await asyncio.to_thread(worker._thread._thread.join, 20)  # pyright: ignore[reportPrivateUsage]


# --- every route


async def test_a_worker_alone_serves_a_picture_and_a_request_about_it():
    async with served(config_of("EPD")) as front:
        generating = asyncio.create_task(front.generate(generate_request(seed=0)))
        status, body = await front.encode(encode_request(will_stay=True), picture())
        assert status == 200
        assert isinstance(msgspec.json.decode(body, type=EncodeEvent), Encoded)
        events = await generating
        assert sum(len(event.tokens) for event in events if isinstance(event, NewTokens)) == 4
        assert isinstance(events[-1], Finished)
        assert len([event for event in events if not isinstance(event, NewTokens | ECNeeded)]) == 1, "one terminal event"
        await assert_nothing_is_held(front.worker)


async def test_items_announced_over_http_reach_the_prefill_worker_and_releases_free_both():
    async with served(config_of("E")) as e, served(config_of("P")) as p:
        generating = asyncio.create_task(p.generate(generate_request(seed=0, hands_over=True)))
        _, body = await e.encode(encode_request(), picture())
        encoded = msgspec.json.decode(body, type=EncodeEvent)
        assert isinstance(encoded, Encoded)
        assert await p.post(EC_PATH, ECDelivery("r", key_of(0), encoded.ticket)) == (204, b"")
        assert isinstance((await generating)[-1], HandedOver)
        for front, id in ((e, "e"), (p, "r")):
            assert front.worker.gauges()["leases"] == 1
            for _ in range(2):
                assert await front.post(RELEASE_PATH, ReleaseRequest(id)) == (204, b"")
            await assert_nothing_is_held(front.worker)


async def test_info_health_and_metrics():
    async with served(config_of("P")) as front:
        async with front.session.get(INFO_PATH) as response:
            info = msgspec.json.decode(await response.read(), type=WorkerInfo)
        assert info == front.worker.info
        assert (info.role, info.kv_cache_tokens) == ("P", 64 * 16)
        async with front.session.get("/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        async with front.session.get("/metrics") as response:
            assert response.content_type == "text/plain"
            text = await response.text()
        assert 'triptych_worker_kv_blocks{role="P"} 64.0' in text.splitlines()
        assert 'triptych_worker_requests_running{role="P"} 0.0' in text.splitlines()
        names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
        expected = {f"triptych_worker_{name}" for name in front.worker.gauges()}
        assert names == expected | {f"triptych_worker_{name}_total" for name in front.worker.counters()}


# --- wrong calls


async def test_a_picture_sent_to_a_worker_without_a_tower_is_a_400_that_names_the_role():
    async with served(config_of("P")) as front:
        status, body = await front.encode(encode_request(), picture())
        assert status == 400
        assert "role is P" in error_of(body)["message"]
        assert error_of(body)["type"] == "invalid_request_error"


async def test_a_request_that_the_role_cannot_serve_is_a_400_that_names_the_role():
    async with served(config_of("E")) as front:
        status, body = await front.post(GENERATE_PATH, msgspec.to_builtins(generate_request()))
        assert status == 400
        assert "role is E" in error_of(body)["message"]
        status, body = await front.post(EC_PATH, {"request_id": "r", "key": key_of(0), "ticket": ticket_fields()})
        assert status == 400
        assert "role is E" in error_of(body)["message"]


def ticket_fields() -> dict[str, Any]:
    names = ("producer", "arena", "checksum")
    data = dict.fromkeys(names, "") | {
        "pages": [],
        "generations": [],
        "page_nbytes": 1,
        "nbytes": 0,
        "lease_s": 1.0,
        "planes": {},
    }
    return {"key": key_of(0), "num_rows": 1, "row_width": 1, "dtype": "float32", "data": data}


@pytest.mark.parametrize("path", (GENERATE_PATH, EC_PATH, ABORT_PATH, RELEASE_PATH))
async def test_a_body_that_is_not_the_message_is_a_400_with_what_is_wrong(path: str):
    async with served(config_of("P")) as front:
        for body, hint in ((b"{]", "malformed"), (b"", "truncated"), (b"[]", "Expected `object`"), (b"\xff", "")):
            status, answer = await front.post(path, body)
            assert status == 400
            assert hint in error_of(answer)["message"]
        known = {GENERATE_PATH: generate_request(), EC_PATH: ECDelivery("r", key_of(0))}.get(path, AbortRequest("r"))
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(known))
        status, answer = await front.post(path, fields | {"colour": "red"})
        assert status == 400
        assert "unknown field `colour`" in error_of(answer)["message"]


async def test_an_encode_without_its_header_is_a_400():
    async with served(config_of("E")) as front:
        for headers in ({}, {ENCODE_HEADER: "{"}, {ENCODE_HEADER: '{"encode_id": "e"}'}):
            async with front.session.post(ENCODE_PATH, data=picture(), headers=headers) as response:
                assert response.status == 400
                assert "EncodeRequest" in error_of(await response.read())["message"]


async def test_an_id_or_key_that_is_none_is_a_400_that_names_the_field():
    async with served(config_of("E")) as front:
        for request, field in (
            (EncodeRequest("кот-猫", key_of(0), "image", 16, (1, 8, 8)), "$.encode_id"),
            (EncodeRequest("e" * 257, key_of(0), "image", 16, (1, 8, 8)), "$.encode_id"),
            (EncodeRequest("e", "../../etc/passwd", "image", 16, (1, 8, 8)), "$.key"),
        ):
            status, body = await front.encode(request, picture())
            assert status == 400
            assert field in error_of(body)["message"]
        status, body = await front.post(ABORT_PATH, AbortRequest("x" * 10**6))
        assert status == 400
        assert "$.id" in error_of(body)["message"]
        await assert_nothing_is_held(front.worker)


# --- members only


async def test_every_call_but_health_and_metrics_needs_the_clusters_secret():
    async with served(replace(config_of("EPD"), cluster_secret=SECRET)) as front:
        routes = WorkerApp(front.worker, None).to_asgi().routes
        answered: dict[str, int] = {}
        for route in routes:
            assert isinstance(route, Route)
            (method,) = (route.methods or set()) - {"HEAD"}
            async with front.session.request(method, route.path, data=b"x" if method == "POST" else None) as response:
                answered[route.path] = response.status
                if response.status == 401:
                    assert response.headers["www-authenticate"] == "Bearer"
                    error = error_of(await response.read())
                    assert (error["type"], "TRIPTYCH_CLUSTER_SECRET" in error["message"]) == ("authentication_error", True)
        assert answered.pop("/health") == 200
        assert answered.pop("/metrics") == 200
        assert len(answered) == 8
        assert set(answered.values()) == {401}
        await assert_nothing_is_held(front.worker)


async def test_a_member_is_served():
    async with served(replace(config_of("EPD"), cluster_secret=SECRET)) as front:
        front.session.headers["authorization"] = f"Bearer {SECRET}"
        assert isinstance((await front.generate(generate_request()))[-1], Finished)


@pytest.mark.parametrize(("host", "secret", "num_warnings"), [("0.0.0.0", "", 1), ("0.0.0.0", SECRET, 0), ("127.0.0.1", "", 0)])
def test_a_worker_that_other_hosts_can_reach_without_a_secret_says_so_as_it_starts(
    host: str, secret: str, num_warnings: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def no_worker(*_: object) -> None:
        raise StartError("that is all.")

    monkeypatch.setattr(app_module, "Worker", no_worker)
    with pytest.raises(StartError, match="that is all"):
        config = replace(config_of("E"), cluster_secret=secret)
        app_module.run_worker(config, host=host, port=0, router_url=None, report=lambda _: None)
    assert ["TRIPTYCH_CLUSTER_SECRET" in record.getMessage() for record in caplog.records] == [True] * num_warnings


async def test_nothing_is_read_of_a_body_that_comes_without_the_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app_module, "MAX_CONTROL_NBYTES", 10)
    async with served(replace(config_of("EPD"), cluster_secret=SECRET)) as front:
        status, _ = await front.post(GENERATE_PATH, bytes(1000))
        assert status == 401, "and no 413"


async def test_a_body_over_the_limit_is_a_413(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app_module, "MAX_CONTROL_NBYTES", 2000)
    async with served(config_of("EPD")) as front:
        status, body = await front.encode(encode_request(), bytes(64 * 1024 + 1))
        assert status == 413
        assert "65536 bytes" in error_of(body)["message"]
        status, body = await front.post(GENERATE_PATH, generate_request(num_text=2000))
        assert status == 413
        status, body = await front.encode(encode_request(), bytes(64 * 1024))
        assert status == 200, "too large is one byte more; these are just no picture"
        assert msgspec.json.decode(body)["reason"] == FailureReason.BAD_MEDIA


async def test_an_id_in_use_is_a_failed_event_and_the_first_goes_on():
    async with served(config_of("P")) as front:
        first = asyncio.create_task(front.generate(generate_request(seed=0, hands_over=True)))
        await until(front.worker, "item_waits", 1)
        (failed,) = await front.generate(generate_request(hands_over=True))
        assert isinstance(failed, Failed)
        assert failed.status == 400
        assert "in use" in failed.message
        assert not first.done()
        await front.post(EC_PATH, ECDelivery("r", key_of(0), failure=FailureReason.BAD_MEDIA))
        assert isinstance((await first)[-1], Failed)
        await assert_nothing_is_held(front.worker)


async def test_a_wrong_method_and_an_unknown_route_are_refused():
    async with served(config_of("D")) as front:
        async with front.session.get(GENERATE_PATH) as response:
            assert response.status == 405
        async with front.session.get("/nothing") as response:
            assert response.status == 404


# --- clients that leave


async def test_a_client_that_leaves_while_it_waits_for_an_item_leaves_nothing():
    async with served(config_of("P")) as front:
        request = msgspec.json.encode(generate_request(seed=0, hands_over=True))
        response = await front.session.post(GENERATE_PATH, data=request)
        await until(front.worker, "item_waits", 1)
        response.close()
        await until(front.worker, "streams", 0)
        await assert_nothing_is_held(front.worker)


async def test_a_client_that_leaves_in_the_middle_of_its_tokens_leaves_nothing():
    async with served(config_of("EPD")) as front:
        response = await front.session.post(GENERATE_PATH, data=msgspec.json.encode(generate_request(n=900)))
        assert (await response.content.readline()).startswith(b"data: ")
        response.close()
        await until(front.worker, "streams", 0)
        await assert_nothing_is_held(front.worker)


async def test_a_client_that_leaves_while_its_picture_is_prepared_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    async with served(config_of("E")) as front:
        is_reached, may_go_on = threading.Event(), threading.Event()

        def slow(*_: object) -> object:
            is_reached.set()
            may_go_on.wait(20)
            raise ZeroDivisionError("nobody asks for it any more")

        monkeypatch.setattr(front.worker._media, "_preprocess", slow)  # pyright: ignore[reportPrivateUsage]
        encoding = asyncio.create_task(front.encode(encode_request(), picture()))
        assert await asyncio.to_thread(is_reached.wait, 20)
        encoding.cancel()
        await asyncio.gather(encoding, return_exceptions=True)
        await until(front.worker, "encodes_queued", 0)
        may_go_on.set()
        await assert_nothing_is_held(front.worker)


async def test_a_client_that_leaves_in_the_middle_of_its_upload_is_not_an_error_of_ours(caplog: pytest.LogCaptureFixture):
    async with served(config_of("E")) as front:
        _, writer = await asyncio.open_connection("127.0.0.1", int(str(front.session._base_url).rpartition(":")[2].strip("/")))  # pyright: ignore[reportPrivateUsage]
        header = msgspec.json.encode(encode_request()).decode()
        writer.write(
            f"POST {ENCODE_PATH} HTTP/1.1\r\nhost: x\r\n{ENCODE_HEADER}: {header}\r\ncontent-length: 999\r\n\r\nhalf".encode()
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await front.encode(encode_request("next"), picture()))[0] == 200
        await front.post(RELEASE_PATH, ReleaseRequest("next"))
        await assert_nothing_is_held(front.worker)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_an_abort_by_message_leaves_nothing_in_the_engine():
    async with served(config_of("P")) as front:
        request = msgspec.json.encode(generate_request(seed=0, hands_over=True))
        response = await front.session.post(GENERATE_PATH, data=request)
        await until(front.worker, "item_waits", 1)
        for _ in range(2):
            assert await front.post(ABORT_PATH, AbortRequest("r")) == (204, b"")
        await until(front.worker, "requests_waiting", 0)
        response.close()
        await until(front.worker, "streams", 0)
        await assert_nothing_is_held(front.worker)


# --- the engine's death


async def test_when_the_engine_dies_streams_end_with_an_error_the_watch_ends_and_health_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app_module, "WATCH_INTERVAL_S", 0.01)
    async with served(config_of("P")) as front:
        watch = await front.session.get(WATCH_PATH)
        assert await watch.content.readline() == b"data: {}\n"
        generating = asyncio.create_task(front.generate(generate_request(seed=0, hands_over=True)))
        await until(front.worker, "item_waits", 1)
        await kill_engine(front.worker)
        failed = (await generating)[-1]
        assert isinstance(failed, Failed)
        assert (failed.status, "a bug" in failed.message) == (503, True)
        rest = await asyncio.wait_for(watch.read(), 10)
        assert set(rest.split(b"\n")) <= {b"", b"data: {}"}
        for path in ("/health", INFO_PATH):  # a router that asks who it is would send it work
            async with front.session.get(path) as response:
                assert response.status == 503
        (late,) = await front.generate(generate_request("late", hands_over=True))
        assert isinstance(late, Failed)
        assert late.status == 503


async def test_watchers_are_counted_while_they_watch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app_module, "WATCH_INTERVAL_S", 0.01)
    async with served(config_of("D")) as front:
        watch = await front.session.get(WATCH_PATH)
        await watch.content.readline()
        assert num_watchers(front) == 1
        watch.close()
        async with asyncio.timeout(10):
            while num_watchers(front):
                async with front.session.get("/health"):
                    pass


async def test_a_process_whose_engine_breaks_ends_with_a_sentence_so_that_it_is_started_again(monkeypatch: pytest.MonkeyPatch):
    made: list[Worker] = []

    def make(*arguments: Any) -> Worker:
        made.append(Worker(*arguments))
        return made[0]

    def break_engine(report: StartReport) -> None:
        if report.url:
            made[0]._thread.submit(lambda _: 1 / 0)  # pyright: ignore[reportPrivateUsage, reportArgumentType]

    monkeypatch.setattr("triptych.worker.app.Worker", make)
    with pytest.raises(InternalError, match="the engine broke: ZeroDivisionError"):
        await asyncio.to_thread(run_worker, config_of("EPD"), host="127.0.0.1", port=0, router_url=None, report=break_engine)
