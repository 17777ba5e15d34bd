"""Tells the router that this worker is there: at start, and again whenever no router watches it (the router was started anew)."""

import asyncio
import logging

import aiohttp
import msgspec

from triptych.http_server import authorization
from triptych.worker.protocol import RegisterRequest

logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
LONGEST_INTERVAL_S = 2.0
MAX_REFUSAL_NBYTES = 1000


class Registration:
    """`watchers` counts the open watch streams, which only a router opens."""

    def __init__(self, router_url: str, own_url: str, cluster_secret: str = "") -> None:
        self._url = f"{router_url.rstrip('/')}/workers"
        self._headers = {"content-type": "application/json"} | authorization(cluster_secret)
        self._body = msgspec.json.encode(RegisterRequest(own_url))
        self._last_refusal = ""
        self.watchers = 0

    async def keep(self) -> None:
        """Runs until it is cancelled. A refusal (another model, say) is logged once, and tried again: the router may be replaced."""
        interval_s = INTERVAL_S
        timeout = aiohttp.ClientTimeout(total=10.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                if self.watchers == 0:
                    is_known = await self._register(session)
                    interval_s = LONGEST_INTERVAL_S if is_known else min(interval_s * 1.5, LONGEST_INTERVAL_S)
                else:
                    interval_s = INTERVAL_S
                await asyncio.sleep(interval_s)

    async def _register(self, session: aiohttp.ClientSession) -> bool:
        try:
            # A redirect is a refusal: it would carry the secret to whom the router's address does not name.
            async with session.post(self._url, data=self._body, headers=self._headers, allow_redirects=False) as response:
                if response.status < 300:
                    self._last_refusal = ""
                    return True
                text = (await response.content.read(MAX_REFUSAL_NBYTES)).decode(errors="replace")
                refusal = f"status {response.status}: {text}"
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False  # the router starts beside us, or is gone: try again
        if refusal != self._last_refusal:
            logger.error("the router refuses this worker: %s", refusal)
            self._last_refusal = refusal
        return False
