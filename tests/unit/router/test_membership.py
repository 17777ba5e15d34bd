"""Whom the router calls: workers at plain addresses, so many at most, that know the cluster's secret."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from triptych.engine.arithmetic_runner import Fabric
from triptych.errors import ConfigError, TriptychError
from triptych.router.fake_worker_client import CONFIG, FakeWorkerClient
from triptych.router.http_worker_client import HttpWorkerClient, make_session
from triptych.router.membership import Membership
from triptych.router.pool import WorkerPool

SECRET = "secret-of-this-cluster"


@asynccontextmanager
async def membership() -> AsyncGenerator[tuple[Membership, WorkerPool]]:
    pool = WorkerPool()
    async with make_session() as session:
        made = Membership(pool, session, CONFIG.model.weights_digest)
        try:
            yield made, pool
        finally:
            await made.close()
            await pool.close()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that the router turns to; a fake worker of another name is at each."""
    urls: list[str] = []

    async def connect(url: str, *_: object, **__: object) -> FakeWorkerClient:
        urls.append(url)
        return FakeWorkerClient(f"PD{len(urls)}", "PD", Fabric())

    monkeypatch.setattr(HttpWorkerClient, "connect", connect)
    return urls


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000", "http://127.0.0.1:8000/", "https://worker-1.example.org:443", "http://worker_1:9", "http://[::1]:8001",
        "HTTP://Worker", "http://10.0.0.7:65535",
    ],
)  # fmt: skip
async def test_a_plain_address_of_host_and_port_is_turned_to(url: str, called: list[str]) -> None:
    async with membership() as (members, pool):
        await members.register(url)
        assert (called, len(pool.workers)) == ([url], 1)


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:8000", "//127.0.0.1:8000", "file:///etc/passwd", "ftp://127.0.0.1:21", "gopher://127.0.0.1:70", "http://",
        "http:///x", "http://:8000", "http://user:password@127.0.0.1:8000", "http://user@127.0.0.1", "http://127.0.0.1:8000/latest/meta-data",
        "http://127.0.0.1:8000//", "http://127.0.0.1:8000?q", "http://127.0.0.1:8000/?q=1", "http://127.0.0.1:8000#f",
        "http://127.0.0.1:8000\n", " http://127.0.0.1:8000", "http://127.0.0.1:8000 ", "http://127.0.0.1\t:8000", "http://127.0.0.1:80\r\nx: y",
        "http://127.0.0.1:0", "http://127.0.0.1:-1", "http://127.0.0.1:123456", "http://127.0.0.1:x", "http://host\\@evil", "http://ho%73t:1",
        "http://кот:1", "http://[::1", "http://[x]:1", "http://[fe80::1%25eth0]:1", "http://" + "x" * 300,
    ],
)  # fmt: skip
async def test_any_other_address_is_refused_and_nobody_is_called(url: str, called: list[str]) -> None:
    async with membership() as (members, _):
        with pytest.raises(ConfigError, match="write http://host:port"):
            await members.register(url)
    assert called == []


async def test_a_port_that_there_is_not_is_an_error_of_ours() -> None:
    async with membership() as (members, _):
        for url in ("http://127.0.0.1:65536", "http://127.0.0.1:99999"):
            with pytest.raises(TriptychError):
                await members.register(url)


async def test_one_worker_too_many_is_refused_and_a_known_one_may_come_again(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.router.membership.MAX_WORKERS", 2)
    async with membership() as (members, pool):
        workers = [await members.register(f"http://127.0.0.1:{port}") for port in (1, 2)]
        with pytest.raises(ConfigError, match=r"2 workers.*127\.0\.0\.1:3"):
            await members.register("http://127.0.0.1:3")
        called.pop()
        called.pop()
        assert await members.register("http://127.0.0.1:2") is workers[1]
        assert len(pool.workers) == 2


# --- the secret, both ways


@pytest.mark.parametrize("shown", [None, "Bearer other-secret-of-a-cluster"])
async def test_a_worker_registers_only_with_the_clusters_secret(
    shown: str | None, serve: Callable[..., Any], served: Callable[..., Any], demo_model: Any
) -> None:
    behind = FakeWorkerClient("PD9", "PD", Fabric())
    fingerprint = replace(behind.info.fingerprint, weights_digest=demo_model.weights_digest)
    behind.info = msgspec.structs.replace(behind.info, fingerprint=fingerprint)
    async with serve("PD1", present=[], cluster_secret=SECRET) as router, served(behind) as (server, _):
        server.secret = SECRET  # it asks the router for the same
        router.session.headers.update({"authorization": shown} if shown else {})
        status, answer = await router.post({"url": server.url}, path="/workers")
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert router.serving.pool.workers == ()
        for path in ("/v1/models", "/health", "/metrics", "/workers"):  # a client's
            assert (await router.get(path))[0] in (200, 503)
        router.session.headers["authorization"] = f"Bearer {SECRET}"
        assert await router.post({"url": server.url}, path="/workers") == (200, {"id": "PD9", "role": "PD"})
        del router.session.headers["authorization"]
        status, answer = await router.post({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)


async def test_a_worker_that_does_not_know_our_secret_is_refused_with_what_to_do(
    serve: Callable[..., Any], served: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with serve("PD1", present=[]) as router, served(FakeWorkerClient("PD9", "PD", Fabric())) as (server, _):
        server.secret = SECRET
        status, answer = await router.post({"url": server.url}, path="/workers")
        assert status == 400
        assert "start both with the same TRIPTYCH_CLUSTER_SECRET" in answer["error"]["message"]
        router.serving.membership.look_for([server.url])
        async with asyncio.timeout(5):
            while not caplog.records:  # noqa: ASYNC110 (it happens behind a socket)
                await asyncio.sleep(0.005)
        assert "start both with the same TRIPTYCH_CLUSTER_SECRET" in caplog.records[0].getMessage()
        assert router.serving.pool.workers == ()
