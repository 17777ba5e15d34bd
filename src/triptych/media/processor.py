"""`MediaProcessor`: decodes and prepares the next pictures beside the engine thread, while the tower runs."""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import ParamSpec, TypeVar

from triptych.errors import OverloadedError

P = ParamSpec("P")
T = TypeVar("T")

TRIM_EVERY = 1000  # items


class MediaProcessor:
    """A bounded pool of threads. PIL and NumPy let go of the interpreter's lock in decoding and resizing, so they run at once.

    `max_pending` bounds what is held in memory: files that wait, or are being prepared.
    """

    def __init__(self, num_threads: int, max_pending: int = 1024) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="media")
        self._max_pending = max_pending
        self._num_pending = 0
        self._num_done = 0
        self._lock = Lock()
        # glibc's: pictures of many sizes leave holes in its heap, which grows by a few per cent over ten thousands of them; this gives the
        # holes back to the kernel, in milliseconds. Other C libraries do without.
        self._malloc_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, prepare: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Run `prepare` on a thread. The future holds its result or exception. Raises `OverloadedError` when full."""
        with self._lock:
            if self._num_pending >= self._max_pending:
                raise OverloadedError(f"{self._num_pending} media items wait to be prepared already; try again later.")
            self._num_pending += 1
        try:
            future = self._pool.submit(prepare, *args, **kwargs)
        except RuntimeError:  # closed
            self._forget()
            raise
        future.add_done_callback(lambda _: self._forget())
        return future

    def close(self) -> None:
        """Cancel what waits, finish what runs, end the threads. May be called twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _forget(self) -> None:
        with self._lock:
            self._num_pending -= 1
            self._num_done += 1
            is_due = self._num_done % TRIM_EVERY == 0
        if is_due:
            self._malloc_trim(0)
