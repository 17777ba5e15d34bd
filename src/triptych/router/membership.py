"""`Membership`: how workers come into the pool: they register themselves, or the operator named their addresses.

These addresses are the only ones that the router calls; none is ever taken from a request or a ticket.
"""

import asyncio
import logging
import re
from collections.abc import Iterable

import aiohttp

from triptych.errors import ConfigError, TriptychError
from triptych.router.http_worker_client import HttpWorkerClient
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.worker.protocol import MAX_URL_LEN

logger = logging.getLogger(__name__)

JOIN_INTERVAL_S = 1.0
MAX_WORKERS = 1024
_WORKER_URL = re.compile(r"https?://([a-z0-9][a-z0-9._-]*|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?/?", re.IGNORECASE)


class Membership:
    """A registered worker registers again when it finds itself unwatched; a named one is looked for until it is there, and again after its loss."""

    def __init__(self, pool: WorkerPool, session: aiohttp.ClientSession, weights_digest: str) -> None:
        self._pool = pool
        self._weights_digest = weights_digest  # of the model for which this router renders
        self._session = session
        self._searches: list[asyncio.Task[None]] = []

    async def register(self, url: str) -> PooledWorker:
        """Raises `ConfigError` for one that does not fit, is no plain URL or is one too many, `WorkerLostError` for one that does not
        answer."""
        if not _WORKER_URL.fullmatch(url) or len(url) > MAX_URL_LEN:
            raise ConfigError(f"worker address {url[:100]!r} is no http URL of a host and a port alone; write http://host:port.")
        client = await HttpWorkerClient.connect(url, self._session)
        digest = client.info.fingerprint.weights_digest
        if digest != self._weights_digest:
            raise ConfigError(
                f"the worker at {url} has other weights than this router's model: weights_digest is {self._weights_digest} here "
                f"and {digest} there; start both with the same model."
            )
        known = next((worker for worker in self._pool.workers if worker.id == client.info.worker_id), None)
        if known is None and len(self._pool.workers) >= MAX_WORKERS:
            raise ConfigError(f"this router has {MAX_WORKERS} workers, as many as it takes; start another router for {url}.")
        return known or self._pool.join(client)

    def look_for(self, urls: Iterable[str]) -> None:
        self._searches += [asyncio.create_task(self._search(url), name=f"look for {url}") for url in urls]

    async def _search(self, url: str) -> None:
        last = ""
        while True:
            try:
                worker = await self.register(url)
                await worker.left.wait()
            except TriptychError as error:
                if str(error) != last:
                    logger.warning("%s", error)
                last = str(error)
            await asyncio.sleep(JOIN_INTERVAL_S)

    async def close(self) -> None:
        for search in self._searches:
            search.cancel()
        await asyncio.gather(*self._searches, return_exceptions=True)
