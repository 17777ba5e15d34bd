import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from triptych.config import MediaConfig
from triptych.errors import MediaError, RequestError, TooLargeError
from triptych.media.fetch import MAX_REDIRECTS, fetch

DATA = bytes(range(256))
LOCAL = MediaConfig(allowed_domains=("127.0.0.1",))

Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server whose every path is answered by the handler; gives its URL."""
    servers: list[TestServer] = []

    async def start(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> str:
        app = web.Application()
        app.router.add_get("/{path:.*}", handler)
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        servers.append(server)
        return str(server.make_url("/"))

    yield start
    for server in servers:
        await server.close()


async def give_data(request: web.Request) -> web.StreamResponse:
    return web.Response(body=DATA)


# --- data URLs ---


@pytest.mark.parametrize(
    "head", ["image/png;base64", "IMAGE/PNG;BASE64", ";base64", "image/jpeg;charset=x;base64", "image/png; base64"]
)
async def test_base64_data_urls_are_decoded(head: str, session: aiohttp.ClientSession) -> None:
    encoded = base64.b64encode(DATA).decode()
    assert await fetch(f"data:{head},{encoded}", MediaConfig(), session) == DATA
    assert await fetch(f"DATA:{head},{quote(encoded, safe='')}", MediaConfig(), session) == DATA


async def test_percent_encoded_data_urls_are_decoded(session: aiohttp.ClientSession) -> None:
    assert await fetch(f"data:image/png,{quote(DATA, safe='')}", MediaConfig(), session) == DATA
    assert await fetch("data:,a%20b+c", MediaConfig(), session) == b"a b+c"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:text/html;base64,AAAA", "type is 'text/html'"),
        ("data:image/png;base64,AAA", "base64 is broken: .*padding"),
        ("data:image/png;base64,AA A", "base64 is broken"),
        ("data:image/png;base64,_-AA", "base64 is broken"),
        ("data:image/png;base64,é===", "base64 is broken"),
        ("data:image/png;base46,AAAA", "parameters are broken"),
        ("data:image/png;base64;x=1,AAAA", "parameters are broken"),
    ],
)
async def test_broken_data_urls_are_refused_with_what_is_wrong(url: str, says: str, session: aiohttp.ClientSession) -> None:
    with pytest.raises(MediaError, match=says):
        await fetch(url, MediaConfig(), session)


@pytest.mark.parametrize("content", [base64.b64encode(DATA).decode(), quote(base64.b64encode(DATA), safe="")])
async def test_the_size_of_a_data_url_is_bounded_to_the_byte(content: str, session: aiohttp.ClientSession) -> None:
    url = f"data:image/png;base64,{content}"
    assert await fetch(url, MediaConfig(max_media_nbytes=256), session) == DATA
    with pytest.raises(TooLargeError, match="has 256 bytes; at most 255"):
        await fetch(url, MediaConfig(max_media_nbytes=255), session)


# --- other schemes and hosts ---


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://a/b", "FILE:/x", "gopher://a", "javascript:1", "/etc/passwd", "", "x"]
)
async def test_other_schemes_are_refused(url: str, session: aiohttp.ClientSession) -> None:
    with pytest.raises(MediaError, match="send a data URL"):
        await fetch(url, MediaConfig(allowed_domains=("*",)), session)


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.org/a.png",
        "http://example.com.evil.org/a.png",
        "http://evilexample.com/",
        "http://example.com@evil.org/",
        "http://sub.example.com/",
    ],
)
async def test_a_host_that_is_not_listed_is_refused_naming_the_option(url: str, session: aiohttp.ClientSession) -> None:
    with pytest.raises(RequestError, match="--allow-media-domain") as refused:
        await fetch(url, MediaConfig(allowed_domains=("example.com",)), session)
    assert refused.value.status == 400


@pytest.mark.parametrize("url", ["http://[::1", "http://a:port/", "http://", "http:///a.png"])
async def test_a_broken_url_is_a_request_error(url: str, session: aiohttp.ClientSession) -> None:
    with pytest.raises(MediaError):
        await fetch(url, MediaConfig(allowed_domains=("*",)), session)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "192.168.1.1", "0.0.0.0"]
)
async def test_a_pattern_does_not_open_private_addresses(host: str, session: aiohttp.ClientSession) -> None:
    with pytest.raises(MediaError, match="private address"):
        await fetch(f"http://{host}/a.png", MediaConfig(allowed_domains=("*",)), session)


async def test_a_pattern_covers_subdomains_only(session: aiohttp.ClientSession) -> None:
    with pytest.raises(MediaError, match=r"are not fetched from 'example\.com'"):
        await fetch("http://example.com/", MediaConfig(allowed_domains=("*.example.com",)), session)


# --- http ---


async def test_a_listed_host_is_fetched_from_even_if_private(serve: Serve, session: aiohttp.ClientSession) -> None:
    assert await fetch(await serve(give_data), LOCAL, session) == DATA


async def test_an_address_that_a_pattern_allows_is_asked_under_the_hosts_name(
    serve: Serve, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up is ours; the connection must go to what it gave, without a second one."""
    hosts: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        hosts.append(request.headers["Host"])
        return web.Response(body=DATA)

    url = (await serve(handler)).replace("127.0.0.1", "cdn.example.test")
    loop = asyncio.get_running_loop()

    async def look_up(host: str, *args: object, **kwargs: object) -> list[object]:
        assert host == "cdn.example.test"
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(loop, "getaddrinfo", look_up)
    monkeypatch.setattr("triptych.media.fetch._is_public", {"127.0.0.1": True}.__getitem__)
    assert await fetch(url, MediaConfig(allowed_domains=("*.example.test",)), session) == DATA
    assert hosts == [url.removeprefix("http://").rstrip("/")]


async def test_redirects_are_followed_and_each_is_checked(serve: Serve, session: aiohttp.ClientSession) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        places = {"/a": "/b", "/b": "/data", "/out": "http://evil.org/x", "/file": "file:///etc/passwd", "/loop": "/loop"}
        if request.path in places:
            return web.Response(status=302, headers={"location": places[request.path]})
        return web.Response(body=DATA)

    base = (await serve(handler)).rstrip("/")
    assert await fetch(f"{base}/a", LOCAL, session) == DATA
    with pytest.raises(MediaError, match=r"not fetched from 'evil\.org'"):
        await fetch(f"{base}/out", LOCAL, session)
    with pytest.raises(MediaError, match="'file:' is where a redirect leads to"):
        await fetch(f"{base}/file", LOCAL, session)
    with pytest.raises(MediaError, match=f"more than {MAX_REDIRECTS} redirects"):
        await fetch(f"{base}/loop", LOCAL, session)


@pytest.mark.parametrize("is_announced", [True, False])
async def test_the_size_of_a_download_is_bounded(is_announced: bool, serve: Serve, session: aiohttp.ClientSession) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if is_announced:
            response.content_length = len(DATA)
        await response.prepare(request)
        await response.write(DATA)
        return response

    url = await serve(handler)
    assert await fetch(url, MediaConfig(allowed_domains=("127.0.0.1",), max_media_nbytes=256), session) == DATA
    with pytest.raises(TooLargeError, match="at most 255"):
        await fetch(url, MediaConfig(allowed_domains=("127.0.0.1",), max_media_nbytes=255), session)


async def test_a_server_that_never_answers_is_given_up(serve: Serve, session: aiohttp.ClientSession) -> None:
    gate = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.Response(body=DATA)

    url = await serve(handler)
    with pytest.raises(MediaError, match=r"took longer than 0\.05 s"):
        await fetch(url, MediaConfig(allowed_domains=("127.0.0.1",), fetch_timeout_s=0.05), session)
    gate.set()


async def test_a_failed_answer_is_named(serve: Serve, session: aiohttp.ClientSession) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    with pytest.raises(MediaError, match="answered 404"):
        await fetch(await serve(handler), LOCAL, session)


async def test_a_port_that_nobody_listens_on_is_a_media_error(session: aiohttp.ClientSession) -> None:
    with pytest.raises(MediaError, match="could not be fetched"):
        await fetch("http://127.0.0.1:1/a.png", LOCAL, session)
