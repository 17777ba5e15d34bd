"""`ReadPool`: the threads that carry out reads, and the promise that every read ends."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from triptych.errors import FailureReason, TransferError


class ReadPool:
    """A few threads which hold no lock of the engine's."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._is_closed = False

    def start(self, result: "Future[None]", work: Callable[[], None]) -> None:
        """Run `work` and put its outcome into `result`, which can be cancelled until a thread takes it up."""
        try:
            self._threads.submit(self._run, result, work)
        except RuntimeError:  # shut down
            self._run(result, work)

    def close(self) -> None:
        """Idempotent. Waits for the reads that run; those queued behind them end with an error."""
        self._is_closed = True
        self._threads.shutdown(wait=True)

    def _run(self, result: "Future[None]", work: Callable[[], None]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            if self._is_closed:
                raise _closed()
            work()
        except Exception as error:  # a thread's edge: whatever went wrong belongs to whoever waits for the read
            result.set_exception(error)
        else:
            result.set_result(None)


def _closed() -> TransferError:
    return TransferError(FailureReason.INTERNAL, "this side has been closed.")
