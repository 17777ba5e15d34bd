import threading
from concurrent.futures import Future

import pytest

from triptych.errors import FailureReason, TransferError
from triptych.transfer.read_pool import ReadPool

TIMEOUT_S = 10.0


def test_work_that_raises_anything_ends_its_read_with_it_and_the_next_one_runs() -> None:
    pool = ReadPool(1, "test")
    failed, fine = Future[None](), Future[None]()

    def work() -> None:
        raise IndexError("not a TransferError")

    pool.start(failed, work)
    pool.start(fine, lambda: None)
    with pytest.raises(IndexError):
        failed.result(TIMEOUT_S)
    assert fine.result(TIMEOUT_S) is None
    pool.close()


def test_a_read_can_be_cancelled_while_it_is_queued_and_not_once_it_runs() -> None:
    pool = ReadPool(1, "test")
    is_running, may_end = threading.Event(), threading.Event()
    ran: list[int] = []

    def work() -> None:
        is_running.set()
        may_end.wait(TIMEOUT_S)

    running, queued = Future[None](), Future[None]()
    pool.start(running, work)
    assert is_running.wait(TIMEOUT_S)
    pool.start(queued, lambda: ran.append(1))
    assert not running.cancel()
    assert queued.cancel()
    may_end.set()
    pool.close()
    assert running.result(0) is None
    assert ran == []


def test_closing_finishes_the_read_that_runs_and_fails_those_behind_it() -> None:
    pool = ReadPool(1, "test")
    is_running, may_end = threading.Event(), threading.Event()
    ran: list[int] = []

    def work() -> None:
        is_running.set()
        may_end.wait(TIMEOUT_S)

    running, queued, late = Future[None](), Future[None](), Future[None]()
    pool.start(running, work)
    assert is_running.wait(TIMEOUT_S)
    pool.start(queued, lambda: ran.append(1))
    closer = threading.Thread(target=pool.close)
    closer.start()
    while not late.done():  # reads are accepted until the close has begun, and refused from then on
        late = Future[None]()
        pool.start(late, lambda: ran.append(2))
    may_end.set()
    closer.join(TIMEOUT_S)
    pool.close()
    assert running.result(0) is None
    for read in (queued, late):
        with pytest.raises(TransferError) as caught:
            read.result(0)
        assert caught.value.reason is FailureReason.INTERNAL
    assert ran == []
