"""`LeaseTable`: until when published pages must not be recycled.

A lease is granted when a ticket is made, may be renewed (it never gets shorter), and ends in one of two ways: it is released, because
everybody who could read the pages is done, or it expires, since nobody may be left to release it.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

_QUEUE_SLACK = 64


class LeaseTable:
    """Leases by id, in seconds of `clock`, which is monotonic. No I/O and no thread: its owner asks for what has expired."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadlines: dict[str, float] = {}
        # (deadline, id), one entry per grant; entries that differ from _deadlines are left over from a renewal or release
        self._queue: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, id: str, lease_s: float) -> None:
        """Lease `id` for at least `lease_s` from now on; granting again renews, and never shortens."""
        deadline = self._clock() + lease_s
        if deadline <= self._deadlines.get(id, float("-inf")):
            return
        self._deadlines[id] = deadline
        heappush(self._queue, (deadline, id))
        self._bound_queue()

    def release(self, id: str) -> None:
        """End the lease of `id` now. An id without one is ignored: it may have expired a moment ago."""
        if self._deadlines.pop(id, None) is not None:
            self._bound_queue()

    def is_held(self, id: str) -> bool:
        """False from the deadline on, also when `expired` was not asked yet."""
        return id in self._deadlines and self._clock() < self._deadlines[id]

    def expired(self) -> list[str]:
        """The ids whose leases have ended by time, earliest first; they are forgotten."""
        now = self._clock()
        ended: list[str] = []
        while self._queue and self._queue[0][0] <= now:
            deadline, id = heappop(self._queue)
            if self._deadlines.get(id) == deadline:
                del self._deadlines[id]
                ended.append(id)
        self._bound_queue()
        return ended

    def next_deadline(self) -> float | None:
        """When `expired` will next have something to say, in the clock's time; None without leases."""
        while self._queue and self._deadlines.get(self._queue[0][1]) != self._queue[0][0]:
            heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def check_invariants(self) -> None:
        """Every lease has its entry in the queue, and the queue is a heap of bounded size."""
        entries = set(self._queue)
        for id, deadline in self._deadlines.items():
            assert (deadline, id) in entries, f"lease {id} would never expire"
        for index in range(1, len(self._queue)):
            assert self._queue[(index - 1) // 2] <= self._queue[index], "the queue is not a heap"
        assert len(self._queue) <= self._max_queue_len(), "left-over entries pile up"

    def _max_queue_len(self) -> int:
        return 2 * len(self._deadlines) + _QUEUE_SLACK

    def _bound_queue(self) -> None:
        """Rebuild the queue when most of it is left over; each rebuild is paid for by as many grants or releases."""
        if len(self._queue) > self._max_queue_len():
            self._queue = [(deadline, id) for id, deadline in self._deadlines.items()]
            heapify(self._queue)
