"""`PendingReads`: copies from peers that are under way, for both connectors.

A read is started, may be waited for within a bound, and is collected once, when it has ended. One whose time is up is cancelled if it has
not begun; if it has, its pages stay in use until it ends, since nobody else may write to them before.
"""

import logging
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from triptych.errors import FailureReason, TransferError

logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT", bound=Hashable)
LoadT = TypeVar("LoadT")

CLOSE_TIMEOUT_S = 5.0


class PendingReads(Generic[KeyT, LoadT]):
    def __init__(self, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called, from a copy thread, whenever a read ends."""
        self._on_progress = on_progress
        self._reads: dict[KeyT, tuple[LoadT, Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def start(self, key: KeyT, load: LoadT, read: "Callable[[], Future[None]]") -> None:
        """Start to `read` what `load` is about. A key that is being read already is not read twice."""
        if key in self._reads:
            return
        try:
            future = read()
            future.add_done_callback(self._report_progress)
        except Exception as error:  # the edge to a connector: a read that cannot start has failed like one that breaks off
            future = Future()
            future.set_exception(error)
        self._reads[key] = (load, future)

    def wait(self, keys: Collection[KeyT], timeout_s: float) -> None:
        """Until the reads of `keys` have ended, or `timeout_s` seconds; those that did not even begin are then cancelled."""
        futures = [self._reads[key][1] for key in keys if key in self._reads]
        if futures:
            for future in wait(futures, timeout_s).not_done:
                future.cancel()

    def collect(
        self, accept: Callable[[LoadT], FailureReason | None], finished: set[KeyT], failed: dict[KeyT, FailureReason]
    ) -> None:
        """Report the reads that have ended, each once. `accept` has a last look at one that arrived. Never raises."""
        ended = [(key, load, future) for key, (load, future) in self._reads.items() if future.done()]
        for key, load, future in ended:
            del self._reads[key]
            failure = _outcome(key, load, future, accept)
            if failure is None:
                finished.add(key)
            else:
                failed[key] = failure

    def close(self) -> None:
        """Cancel what has not begun, wait (within a bound) for what has."""
        futures = [future for _, future in self._reads.values()]
        for future in futures:
            future.cancel()
        wait(futures, CLOSE_TIMEOUT_S)
        self._reads.clear()

    def _report_progress(self, _: "Future[None]") -> None:
        self._on_progress()


def _outcome(
    key: Hashable, load: LoadT, future: "Future[None]", accept: Callable[[LoadT], FailureReason | None]
) -> FailureReason | None:
    if future.cancelled():
        return FailureReason.TIMEOUT
    try:
        future.result()
        return accept(load)
    except Exception as error:  # the edge to a data plane and its threads: what broke is this read
        return reason_of(error, f"read of {key}")


def reason_of(error: BaseException, what: str) -> FailureReason:
    """A data plane's exception as the reason that is reported; one that it did not promise is logged whole."""
    if isinstance(error, TransferError):
        logger.info("%s failed: %s", what, error)
        return error.reason
    logger.error("%s failed", what, exc_info=error)
    return FailureReason.INTERNAL
