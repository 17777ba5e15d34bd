"""A worker tells the router that it is there, as long as nobody watches it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

import triptych.worker.registration as registration_module
from triptych.worker.protocol import RegisterRequest
from triptych.worker.registration import Registration


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "INTERVAL_S", 0.001)
    monkeypatch.setattr(registration_module, "LONGEST_INTERVAL_S", 0.002)


class Router:
    """Answers registrations with `status`, and counts them."""

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[bytes] = []
        self.authorizations: list[str | None] = []
        self.location = ""
        self.repeat = 1
        self.has_heard = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.authorizations.append(request.headers.get("authorization"))
        self.has_heard.set()
        return web.Response(status=self.status, text="another model" * self.repeat, headers={"location": self.location})

    async def hear(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.bodies) < count:
                self.has_heard.clear()
                await self.has_heard.wait()


@asynccontextmanager
async def listening(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0) -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_post("/workers", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def kept(registration: Registration) -> AsyncGenerator[asyncio.Task[None]]:
    task = asyncio.create_task(registration.keep())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_says_its_own_address_again_and_again_while_nobody_watches():
    router = Router()
    async with listening(router.answer) as url, kept(Registration(url + "/", "http://127.0.0.1:7")):
        await router.hear(3)
    assert msgspec.json.decode(router.bodies[0], type=RegisterRequest) == RegisterRequest("http://127.0.0.1:7")


async def test_it_is_silent_while_somebody_watches_and_speaks_again_when_they_are_gone():
    router = Router()
    async with listening(router.answer) as url:
        registration = Registration(url, "http://127.0.0.1:7")
        registration.watchers = 1
        async with kept(registration):
            for _ in range(20):
                await asyncio.sleep(0)
            assert router.bodies == []
            registration.watchers = 0
            await router.hear(1)


async def test_a_router_that_is_not_there_yet_is_found_when_it_comes():
    router = Router()
    async with listening(router.answer) as url:
        port = int(url.rpartition(":")[2])
    async with kept(Registration(f"http://127.0.0.1:{port}", "http://127.0.0.1:7")) as task, listening(router.answer, port):
        await router.hear(1)
        assert not task.done()


async def test_a_refusal_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture):
    router = Router()
    router.status = 409
    with caplog.at_level(logging.ERROR, registration_module.__name__):
        async with listening(router.answer) as url, kept(Registration(url, "http://127.0.0.1:7")):
            await router.hear(4)
    assert [record.getMessage() for record in caplog.records] == ["the router refuses this worker: status 409: another model"]


async def test_it_shows_the_clusters_secret_and_in_an_open_cluster_nothing():
    router = Router()
    async with listening(router.answer) as url:
        async with kept(Registration(url, "http://127.0.0.1:7", "0123456789abcdef")):
            await router.hear(1)
        num_with_secret = len(router.bodies)
        async with kept(Registration(url, "http://127.0.0.1:7")):
            await router.hear(num_with_secret + 1)
    assert set(router.authorizations[:num_with_secret]) == {"Bearer 0123456789abcdef"}
    assert set(router.authorizations[num_with_secret:]) == {None}


async def test_a_redirect_is_a_refusal_and_its_target_never_hears_the_secret(caplog: pytest.LogCaptureFixture):
    router, thief = Router(), Router()
    router.status = 307
    async with listening(thief.answer) as router.location, listening(router.answer) as url:
        router.location += "/workers"
        async with kept(Registration(url, "http://127.0.0.1:7", "0123456789abcdef")):
            await router.hear(3)
    assert thief.bodies == []
    assert [record.getMessage()[:50] for record in caplog.records] == ["the router refuses this worker: status 307: anothe"]


async def test_of_an_endless_refusal_the_beginning_is_read(caplog: pytest.LogCaptureFixture):
    router = Router()
    router.status, router.repeat = 400, 10**5
    async with listening(router.answer) as url, kept(Registration(url, "http://127.0.0.1:7")):
        await router.hear(2)
    assert 0 < len(caplog.records[0].getMessage()) < 1100
