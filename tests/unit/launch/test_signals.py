import os
import select
import signal

import pytest

from triptych.launch.signals import SignalPipe, describe_exit


@pytest.mark.parametrize(
    ("returncode", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-250, "signal 250")]
)
def test_a_return_code_in_words(returncode: int, words: str) -> None:
    assert describe_exit(returncode) == words


def test_a_signal_becomes_readable_and_the_former_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    pipe = SignalPipe([signal.SIGUSR1])
    try:
        assert pipe.read() == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert select.select([pipe], [], [], 5.0)[0] == [pipe]
        assert pipe.read() == [signal.SIGUSR1]
    finally:
        pipe.close()
    assert signal.getsignal(signal.SIGUSR1) is before
