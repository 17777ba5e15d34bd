"""`Placement`: which worker gets the next piece of work: the one with the least to do, counting what the piece itself would cost there.

An item that a worker probably holds costs nothing there, and neither do a prefix that it has probably kept and the items in it. That
knowledge is a hint, taken from what was sent where: when it is wrong, the worker says so (`ec_needed`) and the item is encoded again. Between
equals the one whose last work is longest ago is taken, so the spread is even over time and not only at each instant.

A stage whose workers are all gone, or all full, is waited for: a worker that died is started again within seconds.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from triptych.config import Stage
from triptych.errors import OverloadedError, UnavailableError
from triptych.media.item import MediaItem
from triptych.router.metrics import RouterMetrics
from triptych.router.pool import PooledWorker, WorkerPool
from triptych.router.prefix_hints import PrefixHints
from triptych.router.running_request import RunningRequest

MAX_HINTS = 4096  # keys remembered per worker
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # before full workers are asked again

UNAVAILABLE_TYPES = {Stage.ENCODE: "ec_unavailable", Stage.PREFILL: "worker_unavailable", Stage.DECODE: "worker_unavailable"}

T = TypeVar("T")


class Placement:
    """`wait_s` bounds the wait for a stage that has no worker, or only full ones; with 0 both are errors at once."""

    def __init__(self, pool: WorkerPool, metrics: RouterMetrics | None = None, *, wait_s: float = 15.0) -> None:
        self._pool = pool
        self._metrics = metrics or RouterMetrics()
        self.wait_s = wait_s
        self._held: dict[str, OrderedDict[str, None]] = {}  # worker id -> keys, oldest first
        self._prefixes = PrefixHints()
        self._num_placed = 0

    def pick_encode(self, item: MediaItem, prefill: PooledWorker | None, avoid: Collection[str] = ()) -> PooledWorker:
        """Who has the item already, however much else it has to do: a ticket costs it next to nothing, another encode a whole one. Else the
        prefill worker itself where it has the tower: nothing has to move then."""
        candidates = [worker for worker in self._candidates(Stage.ENCODE) if worker.id not in avoid]
        holders = [worker for worker in candidates if self.probably_holds(worker, item.key)]
        if prefill is not None and prefill in (holders or candidates):
            return prefill
        return self._pick(Stage.ENCODE, avoid, lambda worker: self._rows_missing(worker, (item,)), among=holders)

    def pick_prefill(self, request: RunningRequest, avoid: Collection[str] = ()) -> PooledWorker:
        """One that decodes, too, or any where somebody takes its KV."""
        if self._pool.ready(Stage.PREFILL) and not self._pool.ready(Stage.DECODE):
            raise _no_worker(Stage.DECODE)  # what is missing is not the stage that is asked for
        items = {item.key: item for item in request.job.items}.values()  # of each the last place

        def cost(worker: PooledWorker) -> int:
            num_held = self.num_tokens_held(worker, request)
            return len(request.token_ids) - num_held + self._rows_missing(worker, [item for item in items if item.end > num_held])

        return self._pick(Stage.PREFILL, avoid, cost)

    def pick_decode(self, avoid: Collection[str] = ()) -> PooledWorker:
        return self._pick(Stage.DECODE, avoid, lambda _: 0)

    def has_choice(self, stage: Stage, avoid: Collection[str]) -> bool:
        """Whether the next pick can be a worker that need not be avoided."""
        return any(worker.id not in avoid for worker in self._candidates(stage))

    async def when_there(self, pick: Callable[[], T]) -> T:
        """What `pick` gives, as soon as the stage that it lacks has a worker. Raises its `UnavailableError` when that takes longer
        than `wait_s`, and at once for a stage that nobody has promised."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.wait_s
        waited_for: set[Stage] = set()
        while True:
            try:
                return pick()
            except UnavailableError as error:
                stage = Stage[error.stage.upper()]
                left_s = give_up_at - loop.time()
                if left_s <= 0 or not self._pool.promises(stage):
                    raise
            if stage not in waited_for:
                waited_for.add(stage)
                self._metrics.worker_waits.labels(stage.name.lower()).inc()
            await asyncio.wait({self._pool.next_join()}, timeout=left_s)

    def begin(self, worker: PooledWorker, stage: Stage, amount: int) -> None:
        """Count `amount` as outstanding at the worker, at once when it was picked: the next pick must see it."""
        worker.outstanding[stage] += amount
        self._num_placed += 1
        worker.last_placed[stage] = self._num_placed

    def end(self, worker: PooledWorker, stage: Stage, amount: int) -> None:
        worker.outstanding[stage] -= amount

    def refused(self, stage: Stage) -> None:
        self._metrics.refusals.labels(stage.name.lower()).inc()

    def remember(self, worker: PooledWorker, key: str) -> None:
        """The worker holds the item now."""
        held = self._held.setdefault(worker.id, OrderedDict())
        held[key] = None
        held.move_to_end(key)
        if len(held) > MAX_HINTS:
            held.popitem(last=False)

    def forget(self, worker: PooledWorker, key: str) -> None:
        self._held.get(worker.id, OrderedDict[str, None]()).pop(key, None)

    def forget_worker(self, worker: PooledWorker) -> None:
        self._held.pop(worker.id, None)
        self._prefixes.forget_worker(worker)

    def probably_holds(self, worker: PooledWorker, key: str) -> bool:
        return key in self._held.get(worker.id, ())

    def num_tokens_held(self, worker: PooledWorker, request: RunningRequest) -> int:
        """How much of the prompt the worker has probably kept, and need not compute."""
        if request.job.sampling.prompt_logprobs is not None:
            return 0  # of all tokens
        return self._prefixes.num_tokens_held(worker, _block_hashes(worker, request))

    def remember_prefix(self, worker: PooledWorker, request: RunningRequest) -> None:
        """The worker has computed all tokens but the last."""
        self._prefixes.remember(worker, _block_hashes(worker, request))

    def forget_prefix(self, worker: PooledWorker, request: RunningRequest, position: int) -> None:
        """The worker has not kept the block that holds this token."""
        block_size = worker.info.fingerprint.block_size
        self._prefixes.forget(worker, _block_hashes(worker, request)[position // block_size :])

    def _candidates(self, stage: Stage) -> list[PooledWorker]:
        """Ready workers that can do a request's next stage and lead it on from there."""
        ready = self._pool.ready(stage)
        if stage == Stage.DECODE:
            return [worker for worker in ready if worker.role.takes_kv]
        if stage == Stage.PREFILL and not self._candidates(Stage.DECODE):
            return [worker for worker in ready if worker.can(Stage.DECODE)]
        return ready

    def _rows_missing(self, worker: PooledWorker, items: Sequence[MediaItem]) -> int:
        return sum(item.num_rows for item in items if not self.probably_holds(worker, item.key))

    def _pick(
        self,
        stage: Stage,
        avoid: Collection[str],
        cost: Callable[[PooledWorker], int],
        among: Collection[PooledWorker] = (),
    ) -> PooledWorker:
        now = asyncio.get_running_loop().time()

        def order(worker: PooledWorker) -> tuple[bool, bool, int, int]:
            is_suspect = stage == Stage.ENCODE and worker.suspect_until > now
            load = sum(worker.outstanding.values()) + cost(worker)
            return worker.id in avoid, is_suspect, load, worker.last_placed[stage]

        candidates = among or self._candidates(stage)
        if not candidates:
            raise _no_worker(stage)
        return min(candidates, key=order)


class Backoff:
    """Of one piece of work that workers refuse because they are full: the next one is asked, and when all are full, all again after a while."""

    def __init__(self, placement: Placement, stage: Stage) -> None:
        self._placement = placement
        self._stage = stage
        self._give_up_at: float | None = None
        self.full: set[str] = set()  # worker ids, to be avoided in the next pick

    @property
    def has_paused(self) -> bool:
        return self._give_up_at is not None

    def has_next(self, refuser: PooledWorker, avoid: Collection[str]) -> bool:
        """Whether, after a refusal, there is another worker to be asked."""
        self._placement.refused(self._stage)
        self.full.add(refuser.id)
        return self._placement.has_choice(self._stage, {*avoid, *self.full})

    async def pause(self, error: OverloadedError) -> None:
        """Until all can be asked again. Raises `error`, the last refusal, when workers have been full for too long."""
        now = asyncio.get_running_loop().time()
        if self._give_up_at is None:
            self._give_up_at = now + self._placement.wait_s
        pause_s = min(max(error.retry_after_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        if now + pause_s > self._give_up_at:
            raise error
        self.full.clear()
        await asyncio.sleep(pause_s)


def _block_hashes(worker: PooledWorker, request: RunningRequest) -> Sequence[bytes]:
    return request.block_hashes(worker.info.fingerprint.block_size)


def _no_worker(stage: Stage) -> UnavailableError:
    name = stage.name.lower()
    return UnavailableError(f"no {name} worker is there", type=UNAVAILABLE_TYPES[stage], stage=name, reason="no_worker")
