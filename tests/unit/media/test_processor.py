from concurrent.futures import CancelledError
from threading import Event, get_ident

import pytest

from triptych.errors import MediaError, OverloadedError
from triptych.media.processor import MediaProcessor


def test_work_runs_on_another_thread_and_its_result_comes_back() -> None:
    processor = MediaProcessor(num_threads=2)
    assert processor.submit(int, "101", base=2).result(5) == 5
    assert processor.submit(get_ident).result(5) != get_ident()
    processor.close()


def test_an_error_stays_in_its_future() -> None:
    def fail() -> None:
        raise MediaError("broken")

    processor = MediaProcessor(num_threads=1)
    bad, good = processor.submit(fail), processor.submit(int, "7")
    assert isinstance(bad.exception(5), MediaError)
    assert good.result(5) == 7
    processor.close()
    assert processor.num_pending == 0


def test_a_full_pool_refuses_and_takes_work_again_when_some_is_done() -> None:
    processor, gate = MediaProcessor(num_threads=1, max_pending=2), Event()
    first, second = processor.submit(gate.wait, 10), processor.submit(int, "1")
    with pytest.raises(OverloadedError, match="2 media items wait"):
        processor.submit(int, "2")
    gate.set()
    first.result(5)
    second.result(5)
    processor.close()
    assert processor.num_pending == 0


def test_closing_cancels_what_waits_and_can_be_done_twice() -> None:
    processor, started, gate = MediaProcessor(num_threads=1), Event(), Event()

    def hold() -> str:
        started.set()
        gate.wait(10)
        return "done"

    running, waiting = processor.submit(hold), processor.submit(int, "1")
    assert started.wait(5)
    waiting.add_done_callback(lambda _: gate.set())  # the one that runs goes on once the one that waits is cancelled
    processor.close()
    processor.close()
    assert running.result(0) == "done"
    with pytest.raises(CancelledError):
        waiting.result(0)
    assert processor.num_pending == 0
    with pytest.raises(RuntimeError):
        processor.submit(int, "1")
    assert processor.num_pending == 0
