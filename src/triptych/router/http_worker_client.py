"""`HttpWorkerClient`: a worker in another process, over the protocol of `worker/protocol.py`.

A worker is believed as little as a client: no redirect is followed, and what it sends is bounded.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from triptych.config import CLUSTER_SECRET_VARIABLE
from triptych.engine.events import TERMINAL_EVENTS, EncodeEvent, GenerateEvent, NewTokens
from triptych.errors import ConfigError, InternalError, TriptychError, UnauthorizedError, WorkerLostError
from triptych.http_server import authorization
from triptych.router.worker_client import WorkerClient, error_from_wire
from triptych.worker.protocol import (
    EC_PATH,
    ENCODE_HEADER,
    ENCODE_PATH,
    GENERATE_PATH,
    INFO_PATH,
    KV_PATH,
    MAX_TEXT_LEN,
    RELEASE_PATH,
    WATCH_PATH,
    ECDelivery,
    EncodeRequest,
    GenerateRequest,
    KVDelivery,
    ReleaseRequest,
    WorkerInfo,
)

CONNECT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 0.2
# The watch stream says something every second. A death ends it at once; silence means that a process is stopped, or its host out of reach, which
# is rare, while a busy host may hold back several beats: a false loss moves all requests of the worker to others that are as busy.
SILENCE_S = 10.0
MAX_EVENT_NBYTES = 16 * 1024**2  # a ticket for a million tokens' KV is a tenth of it
MAX_SHORT_NBYTES = 64 * 1024  # of any other answer

logger = logging.getLogger(__name__)


def make_session(cluster_secret: str = "") -> aiohttp.ClientSession:
    """One for all workers of a router. Waits are bounded by whoever waits; here only connecting is."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    # Shorter than a server's (http_server.py: 75 s), or a request could go out on a connection that is being closed, and look like a lost worker.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    headers = {"content-type": "application/json"} | authorization(cluster_secret)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector, auto_decompress=False, trust_env=False)


class HttpWorkerClient(WorkerClient):
    """`session` is shared and not closed here. Use `connect` to make one."""

    def __init__(self, url: str, info: WorkerInfo, session: aiohttp.ClientSession, *, silence_s: float = SILENCE_S) -> None:
        self.url = url.rstrip("/")
        self.info = info
        self._session = session
        self._silence_s = silence_s

    @classmethod
    async def connect(cls, url: str, session: aiohttp.ClientSession, *, silence_s: float = SILENCE_S) -> "HttpWorkerClient":
        """Ask a worker who it is. Raises `WorkerLostError` when nothing answers there within `silence_s`, `ConfigError` when
        it does not know this cluster's secret."""
        url = url.rstrip("/")
        try:
            async with asyncio.timeout(silence_s), _answer(session, "GET", url + INFO_PATH, url) as response:
                return cls(url, _decode(await _read(response, MAX_SHORT_NBYTES), WorkerInfo), session, silence_s=silence_s)
        except TimeoutError:
            raise WorkerLostError(f"worker at {url} did not say who it is within {silence_s:g} s.") from None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        body = msgspec.json.encode(request)
        num_tokens_left = request.sampling_params.max_tokens - (len(request.token_ids) - request.num_prompt_tokens)
        async with self._call("POST", GENERATE_PATH, data=body) as response:
            async for payload in _sse_payloads(response.content):
                event: GenerateEvent = _decode(payload, GenerateEvent)
                if isinstance(event, NewTokens):
                    num_tokens_left -= len(event.tokens)
                    if num_tokens_left < 0:
                        raise InternalError(f"worker {self.info.worker_id} sent more tokens than {request.request_id} asks for.")
                if isinstance(event, TERMINAL_EVENTS):
                    await _read_to_end(response)
                    yield event
                    return
                yield event
        raise WorkerLostError(f"worker {self.info.worker_id} ended the stream of {request.request_id} without a last event.")

    async def encode(self, request: EncodeRequest, media: bytes) -> EncodeEvent:
        headers = {ENCODE_HEADER: msgspec.json.encode(request).decode(), "content-type": "application/octet-stream"}
        async with self._call("POST", ENCODE_PATH, data=media, headers=headers) as response:
            return _decode(await _read(response, MAX_EVENT_NBYTES), EncodeEvent)

    async def deliver(self, delivery: ECDelivery) -> None:
        await self._tell(EC_PATH, msgspec.structs.replace(delivery, message=delivery.message[:MAX_TEXT_LEN]))

    async def deliver_kv(self, delivery: KVDelivery) -> None:
        await self._tell(KV_PATH, delivery)

    async def release(self, id: str) -> None:
        await self._tell(RELEASE_PATH, ReleaseRequest(id))

    async def watch(self) -> None:
        try:
            async with self._call("GET", WATCH_PATH) as response:
                while True:
                    async with asyncio.timeout(self._silence_s):
                        if not await response.content.readany():
                            return
        except (TimeoutError, TriptychError) as error:
            logger.info("the watch of worker %s ended: %s", self.info.worker_id, str(error) or "it was silent")

    async def close(self) -> None:
        pass

    async def _tell(self, path: str, message: msgspec.Struct) -> None:
        async with self._call("POST", path, data=msgspec.json.encode(message)) as response:
            await _read(response, MAX_SHORT_NBYTES)

    def _call(self, method: str, path: str, **arguments: Any):
        return _answer(
            self._session, method, self.url + path, f"{self.info.worker_id} at {self.url}", role=self.info.role, **arguments
        )


@asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, who: str, *, role: str = "", **arguments: Any
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """A 2xx answer, or the error that the status and body stand for. aiohttp's exceptions end here."""
    try:
        async with session.request(method, url, allow_redirects=False, **arguments) as response:
            if response.status == UnauthorizedError.status:
                raise ConfigError(
                    f"worker {who} has another cluster secret than this router: start both with the same {CLUSTER_SECRET_VARIABLE}."
                )
            if response.status >= 300:
                body = await _read(response, MAX_SHORT_NBYTES)
                raise _refusal(response.status, body, response.headers.get("retry-after", ""), role)
            yield response
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            raise  # a deadline of whoever waits
        raise WorkerLostError(f"worker {who} is lost: {error or type(error).__name__}.") from error


def _refusal(status: int, body: bytes, retry_after: str, role: str) -> Exception:
    try:
        error = msgspec.json.decode(body)["error"]
        message, kind, code = str(error["message"]), str(error.get("type") or ""), str(error.get("code") or "")
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return InternalError(f"a worker answered with status {status} and no readable error.")
    wait_s = float(retry_after) if retry_after.isdigit() else 1.0
    return error_from_wire(status, kind, message, stage=role, reason=code, retry_after_s=wait_s)


def _decode(payload: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InternalError(f"a worker sent what the protocol does not know: {error}.") from error


async def _read(response: aiohttp.ClientResponse, max_nbytes: int) -> bytes:
    """The whole answer. Raises `InternalError` once it is over the limit."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        _check_length(body, max_nbytes)
    return bytes(body)


def _check_length(received: bytearray, max_nbytes: int) -> None:
    if len(received) > max_nbytes:
        raise InternalError(f"a worker sent more than {max_nbytes} bytes where the protocol has less.")


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Nothing follows a terminal event: a connection that was read to its end can serve again."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            while await response.content.readany():
                pass
    except (aiohttp.ClientError, TimeoutError):
        pass  # the answer is complete; only the connection is not worth keeping


async def _sse_payloads(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """What follows each `data:`. Lines are cut here, since the reader's own limit is shorter than a long ticket."""
    line = bytearray()
    while chunk := await content.readany():
        for place, part in enumerate(chunk.split(b"\n")):
            if place:  # a line has ended
                if line.startswith(b"data:"):
                    yield bytes(line[5:])
                line.clear()
            line += part
            _check_length(line, MAX_EVENT_NBYTES)
