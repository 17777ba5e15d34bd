"""`Placement`: which worker gets the next piece of work: the one with the least to do, counting what the piece itself would cost there.

An item that a worker probably holds costs nothing there. That knowledge is a hint, taken from what was sent where: when it
is wrong, the worker says so (`ec_needed`) and the item is encoded again. Between equals the one whose last work is longest ago is
taken, so the spread is even over time and not only at each instant.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from triptych.config import Stage
from triptych.errors import UnavailableError
from triptych.media.item import MediaItem
from triptych.router.pool import PooledWorker, WorkerPool

MAX_HINTS = 4096  # keys remembered per worker

UNAVAILABLE_TYPES = {Stage.ENCODE: "ec_unavailable", Stage.PREFILL: "worker_unavailable", Stage.DECODE: "worker_unavailable"}


class Placement:
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._held: dict[str, OrderedDict[str, None]] = {}  # worker id -> keys, oldest first
        self._num_placed = 0

    def pick_encode(self, item: MediaItem, prefill: PooledWorker, avoid: Collection[str] = ()) -> PooledWorker:
        """Who has the item already, however much else it has to do: a ticket costs it next to nothing, another encode a whole one. Else the
        prefill worker itself where it has the tower: nothing has to move then."""
        holders = [worker for worker in self._pool.ready(Stage.ENCODE) if self.probably_holds(worker, item.key)]
        holders = [worker for worker in holders if worker.id not in avoid]
        if holders:
            return prefill if prefill in holders else self._pick(Stage.ENCODE, holders, avoid)
        if prefill.can(Stage.ENCODE) and prefill.is_ready and prefill.id not in avoid:
            return prefill
        return self._pick(Stage.ENCODE, self._pool.ready(Stage.ENCODE), avoid, (item,))

    def pick_prefill(self, num_tokens: int, items: Iterable[MediaItem], avoid: Collection[str] = ()) -> PooledWorker:
        """One that decodes, too, or any where somebody takes its KV."""
        ready = self._pool.ready(Stage.PREFILL)
        if not any(worker.role.takes_kv for worker in self._pool.workers):
            if ready and not any(worker.can(Stage.DECODE) for worker in ready):
                raise _no_worker(Stage.DECODE)  # what is missing is not the stage that is asked for
            ready = [worker for worker in ready if worker.can(Stage.DECODE)]
        return self._pick(Stage.PREFILL, ready, avoid, tuple(items), num_tokens)

    def pick_decode(self, avoid: Collection[str] = ()) -> PooledWorker:
        return self._pick(Stage.DECODE, [worker for worker in self._pool.workers if worker.role.takes_kv], avoid)

    def is_exhausted(self, avoid: Collection[str]) -> bool:
        """Whether a stage has no ready worker but those to be avoided."""
        return any(
            not [worker for worker in self._pool.ready(stage) if worker.id not in avoid]
            for stage in (Stage.PREFILL, Stage.DECODE)
        )

    def begin(self, worker: PooledWorker, stage: Stage, amount: int) -> None:
        """Count `amount` as outstanding at the worker, at once when it was picked: the next pick must see it."""
        worker.outstanding[stage] += amount
        self._num_placed += 1
        worker.last_placed[stage] = self._num_placed

    def end(self, worker: PooledWorker, stage: Stage, amount: int) -> None:
        worker.outstanding[stage] -= amount

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

    def probably_holds(self, worker: PooledWorker, key: str) -> bool:
        return key in self._held.get(worker.id, ())

    def _pick(
        self, stage: Stage, ready: list[PooledWorker], avoid: Collection[str], items: tuple[MediaItem, ...] = (), cost: int = 0
    ) -> PooledWorker:
        if not ready:
            raise _no_worker(stage)
        choices = [worker for worker in ready if worker.id not in avoid] or ready

        def load(worker: PooledWorker) -> tuple[int, int]:
            missing = sum(item.num_rows for item in items if not self.probably_holds(worker, item.key))
            return sum(worker.outstanding.values()) + cost + missing, worker.last_placed[stage]

        return min(choices, key=load)


def _no_worker(stage: Stage) -> UnavailableError:
    name = stage.name.lower()
    return UnavailableError(f"no {name} worker is there", type=UNAVAILABLE_TYPES[stage], stage=name, reason="no_worker")
