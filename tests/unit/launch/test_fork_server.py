"""The fork server with a worker's stand-in: a real process that forks real children, without torch."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from triptych.config import EngineConfig, ModelConfig
from triptych.launch.messages import ChildEvent, Exited, Reported, Signal, Spawn, receive, send
from triptych.worker.protocol import StartReport

# What a worker does is in its model's name; its URL is its pid, so that the test can find it.
STAND_IN = """
import os, signal, socket, sys
from triptych.errors import StartError
from triptych.launch.fork_server import ForkServer
from triptych.worker.protocol import StartReport

def run_worker(config, *, host, port, router_url, report):
    report(StartReport(loaded=0.5))
    if config.model.name == "refuse":
        raise StartError("there is no such device.")
    if config.model.name == "crash":
        raise ValueError("unforeseen")
    if config.model.name == "serve":
        report(StartReport(url=str(os.getpid())))
        signal.sigwait([signal.SIGTERM])

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
ForkServer(socket.socket(fileno=int(sys.argv[1])), run_worker).serve()
"""


class Launcher:
    """The other end of a fork server."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(20.0)
        with theirs:
            arguments = [sys.executable, "-c", STAND_IN, str(theirs.fileno())]
            self.process = subprocess.Popen(arguments, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)

    def spawn(self, name: str, does: str) -> None:
        model = ModelConfig(
            path=Path("/model"), name=does, family="f", weights_digest="d", dtype="float32", max_model_len=8,
            vocab_size=8, hidden_size=8, num_layers=1, num_kv_heads=1, head_dim=8,
        )  # fmt: skip
        send(self.control, Spawn(name, EngineConfig(model), "127.0.0.1", "http://127.0.0.1:1"))

    def next(self) -> ChildEvent | None:
        return receive(self.control, ChildEvent)  # type: ignore[arg-type]

    def serving_worker(self, name: str) -> psutil.Process:
        self.spawn(name, "serve")
        assert self.next() == Reported(name, StartReport(loaded=0.5))
        event = self.next()
        assert isinstance(event, Reported)
        return psutil.Process(int(event.report.url))

    def close(self) -> None:
        self.control.close()
        self.process.communicate(timeout=20.0)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    each = Launcher()
    yield each
    each.close()


def is_gone(process: psutil.Process) -> bool:
    """Within 10 s. An orphan may stay a zombie where nobody waits for it."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_a_workers_reports_and_its_end_reach_the_launcher_in_order(launcher: Launcher) -> None:
    launcher.spawn("encode-0", "return")
    events = [launcher.next(), launcher.next()]
    assert events == [Reported("encode-0", StartReport(loaded=0.5)), Exited("encode-0", "exit code 0")]


def test_an_error_of_ours_is_told_as_its_sentence_without_a_traceback(launcher: Launcher) -> None:
    launcher.spawn("encode-0", "refuse")
    events = [launcher.next() for _ in range(3)]
    assert events[1:] == [
        Reported("encode-0", StartReport(error="there is no such device.")),
        Exited("encode-0", "exit code 1"),
    ]
    launcher.control.close()
    assert launcher.process.communicate(timeout=20.0)[1] == b""


def test_an_unforeseen_error_is_told_and_shown(launcher: Launcher) -> None:
    launcher.spawn("encode-0", "crash")
    events = [launcher.next() for _ in range(3)]
    assert events[1] == Reported("encode-0", StartReport(error="ValueError: unforeseen"))
    launcher.control.close()
    assert b"Traceback" in launcher.process.communicate(timeout=20.0)[1]


def test_a_signal_reaches_the_worker_it_names_and_no_other(launcher: Launcher) -> None:
    first, second = launcher.serving_worker("decode-0"), launcher.serving_worker("decode-1")
    send(launcher.control, Signal("decode-0", signal.SIGKILL))
    assert launcher.next() == Exited("decode-0", "SIGKILL")
    assert is_gone(first)
    assert second.is_running()


def test_a_signal_to_a_worker_that_has_gone_is_harmless(launcher: Launcher) -> None:
    launcher.spawn("encode-0", "return")
    assert [launcher.next(), launcher.next()][1] == Exited("encode-0", "exit code 0")
    send(launcher.control, Signal("encode-0", signal.SIGTERM))
    assert launcher.serving_worker("encode-0").is_running()


def test_workers_die_with_a_killed_fork_server(launcher: Launcher) -> None:
    workers = [launcher.serving_worker(f"decode-{number}") for number in range(2)]
    os.kill(launcher.process.pid, signal.SIGKILL)
    assert all(is_gone(worker) for worker in workers)


def test_workers_die_when_the_launcher_hangs_up(launcher: Launcher) -> None:
    worker = launcher.serving_worker("decode-0")
    launcher.control.close()
    assert launcher.process.wait(timeout=20.0) == 0
    assert is_gone(worker)
