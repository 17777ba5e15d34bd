"""`WorkerPool`: the workers that the router knows, and whether they live.

    joins -> ready -> lost       watched while it is ready; a worker that comes back under the same address joins anew
      +--> refused               it does not fit those that are here; the log names the field

Whoever uses a worker does so inside `worker.attached()`: when the worker is lost, everybody inside is told at once.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from triptych.config import ClusterLayout, Role, Stage
from triptych.errors import ConfigError, WorkerLostError
from triptych.router.worker_client import WorkerClient
from triptych.worker.protocol import WorkerInfo

logger = logging.getLogger(__name__)


class PooledWorker:
    """A worker and what the router has under way there. `outstanding` is in tokens of prefill and decode, or rows of encode."""

    def __init__(self, client: WorkerClient) -> None:
        self.client = client
        self.info: WorkerInfo = client.info
        self.id = client.info.worker_id
        self.role = Role.parse(client.info.role)
        self.outstanding: dict[Stage, int] = dict.fromkeys(Stage, 0)
        self.last_placed: dict[Stage, int] = dict.fromkeys(Stage, 0)  # counts placements of the whole router
        self.why_lost = ""
        self.left = asyncio.Event()  # set when it is lost
        self.suspect_until = 0.0  # by the loop's clock: an encode here took too long, others come first
        self._scopes: dict[asyncio.Timeout, None] = {}  # in the order of entry, in which they are told

    @property
    def is_ready(self) -> bool:
        return not self.left.is_set()

    def can(self, stage: Stage) -> bool:
        return stage in self.role

    @asynccontextmanager
    async def attached(self) -> AsyncGenerator[None]:
        """Raises `WorkerLostError` in whoever is inside when the worker is lost, and in whoever comes later."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                if not self.is_ready:
                    raise WorkerLostError(self._lost_message)
                self._scopes[scope] = None
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise WorkerLostError(self._lost_message) from None
        finally:
            self._scopes.pop(scope, None)

    @property
    def _lost_message(self) -> str:
        return f"worker {self.id} is lost: {self.why_lost or 'it has left'}"

    def lose(self, why: str) -> None:
        """Tell everybody inside."""
        self.why_lost = why
        self.left.set()
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            scope.reschedule(now)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What every worker that a request may meet can hold. Where all are gone for the moment, what they could hold."""

    max_model_len: int
    kv_cache_tokens: int
    encoder_cache_rows: int


NO_LIMIT = 2**62
UNLIMITED = PoolLimits(NO_LIMIT, NO_LIMIT, NO_LIMIT)


class WorkerPool:
    """`on_lost` hears of each worker that is lost, after those who use it. `layout` None: no stage is promised but P and D."""

    def __init__(
        self, layout: ClusterLayout | None = None, on_lost: Callable[[PooledWorker], None] = lambda worker: None
    ) -> None:
        self._layout = layout
        self._on_lost = on_lost
        self._workers: dict[str, PooledWorker] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._seen_stages: set[Stage] = set()
        self._last_limits = UNLIMITED
        self._next_join: asyncio.Future[None] | None = None
        # What the workers compute in, all alike; kept when the last has left, for a request that waits for the next.
        self.dtype = ""

    @property
    def workers(self) -> tuple[PooledWorker, ...]:
        """Those that are ready, in the order in which they joined."""
        return tuple(worker for worker in self._workers.values() if worker.is_ready)

    def ready(self, stage: Stage) -> list[PooledWorker]:
        return [worker for worker in self.workers if worker.can(stage)]

    @property
    def takes_media(self) -> bool:
        """By the layout; without one, encode workers may still come."""
        return self._layout is None or self._layout.takes_media

    def limits(self) -> PoolLimits:
        """A request must fit wherever it is placed, so the smallest worker counts."""
        with_kv = [worker.info for worker in self.workers if worker.can(Stage.PREFILL) or worker.can(Stage.DECODE)]
        with_rows = [worker.info for worker in self.workers if worker.can(Stage.ENCODE) or worker.can(Stage.PREFILL)]
        return PoolLimits(
            max_model_len=min((info.max_model_len for info in with_kv), default=self._last_limits.max_model_len),
            kv_cache_tokens=min((info.kv_cache_tokens for info in with_kv), default=self._last_limits.kv_cache_tokens),
            encoder_cache_rows=min((info.encoder_cache_rows for info in with_rows), default=self._last_limits.encoder_cache_rows),
        )

    def promises(self, stage: Stage) -> bool:
        """Whether a worker for the stage may be expected: by the layout; without one for P and D, and for E if one has been there."""
        if stage != Stage.ENCODE:
            return True
        return self._layout.takes_media if self._layout is not None else stage in self._seen_stages

    def next_join(self) -> asyncio.Future[None]:
        """Done when another worker has joined. It is everybody's: wait for it by `asyncio.wait`, which does not cancel it."""
        if self._next_join is None or self._next_join.done():
            self._next_join = asyncio.get_running_loop().create_future()
        return self._next_join

    def missing_stages(self) -> tuple[Stage, ...]:
        """Stages of the layout that no worker serves now."""
        needed = [stage for stage in Stage if stage != Stage.ENCODE or (self._layout is not None and self._layout.takes_media)]
        return tuple(stage for stage in needed if not self.ready(stage))

    def join(self, client: WorkerClient) -> PooledWorker:
        """Take a worker in and watch it. The same id again means that the process was replaced: the old one is lost.

        Raises `ConfigError` for a worker that does not fit those which are here, or that the layout has no use for.
        """
        worker = PooledWorker(client)
        if worker.id in self._workers:
            self.lose(self._workers[worker.id], "another process has taken its place")
        for other in self.workers:
            difference = worker.info.fingerprint.difference(other.info.fingerprint)
            if difference is not None:
                message = f"worker {worker.id} does not fit worker {other.id}: {difference}."
                logger.error("refused: %s", message)
                raise ConfigError(message)
        self._workers[worker.id] = worker
        self.dtype = worker.info.fingerprint.dtype
        self._watches[worker.id] = asyncio.create_task(self._watch(worker), name=f"watch {worker.id}")
        self._seen_stages |= worker.role.stages
        self.next_join().set_result(None)
        logger.info("worker %s joined with role %s", worker.id, worker.role)
        return worker

    async def _watch(self, worker: PooledWorker) -> None:
        await worker.client.watch()
        self.lose(worker, "its watch stream ended")

    def lose(self, worker: PooledWorker, why: str) -> None:
        """Once only: the first to notice counts."""
        if not worker.is_ready:
            return
        logger.warning("worker %s is lost: %s", worker.id, why)
        self._last_limits = self.limits()
        worker.lose(why)
        if self._workers.get(worker.id) is worker:
            del self._workers[worker.id]
        watch = self._watches.pop(worker.id)
        if watch is not asyncio.current_task():
            watch.cancel()
        self._on_lost(worker)

    async def close(self) -> None:
        watches = tuple(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
