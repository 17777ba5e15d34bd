"""Signals: `SignalPipe` makes them something a selector can wait for, `describe_exit` puts those that ended a process into words."""

import signal
import socket
from collections.abc import Iterable
from types import FrameType


class SignalPipe:
    """Catches the given signals from construction on. Main thread only; `close` puts the former handlers back."""

    def __init__(self, signums: Iterable[signal.Signals]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._former = {signum: signal.signal(signum, _wake) for signum in signums}

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> list[signal.Signals]:
        """Those that came since the last call, in order."""
        try:
            return [signal.Signals(number) for number in self._reader.recv(4096)]
        except BlockingIOError:
            return []

    def close(self) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._reader.close()
        self._writer.close()


def describe_exit(returncode: int) -> str:
    """A return code in words; a negative one is a signal's, as in `subprocess`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _wake(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has the number already; a handler must exist, or the signal would end the process."""
