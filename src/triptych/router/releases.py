"""`Releases`: tells workers, in the background, that a ticket is not needed any more.

Nobody waits for it: if it gets lost, the lease ends by itself. It frees the producer's pages earlier, which under load is what keeps
its cache from filling up with items that everybody has read.
"""

import asyncio
import logging

from triptych.errors import TriptychError
from triptych.router.pool import PooledWorker

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
DRAIN_S = 1.0


class Releases:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker: PooledWorker, id: str) -> None:
        """`id` is a request's or an encode's."""
        if not worker.is_ready:
            return
        task = asyncio.create_task(_release(worker, id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Until all have arrived; a worker that does not answer holds nobody up for long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_S)


async def _release(worker: PooledWorker, id: str) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await worker.client.release(id)
    except (TriptychError, TimeoutError) as error:
        logger.info("the release of %s did not reach worker %s: %s", id, worker.id, error)


class TicketLease:
    """An encode's ticket in the hands of all requests that waited for it; released when the last of them lets go."""

    def __init__(self, releases: Releases, worker: PooledWorker, encode_id: str) -> None:
        self._releases = releases
        self._worker = worker
        self._encode_id = encode_id
        self._num_holders = 0
        self._is_void = False

    @property
    def is_good(self) -> bool:
        """A worker that is gone keeps nothing."""
        return self._worker.is_ready

    def void(self) -> None:
        """The encode was answered without a ticket: there is nothing to release."""
        self._is_void = True

    def hold(self) -> None:
        self._num_holders += 1

    def let_go(self) -> None:
        self._num_holders -= 1
        if self._num_holders == 0 and not self._is_void:
            self._releases.send(self._worker, self._encode_id)
