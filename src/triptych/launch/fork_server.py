"""The fork server's process: imports torch and the model code once, then forks workers which start with both in place.

    launcher ──Spawn, Signal──▶ fork server ──fork──▶ worker
             ◀──Reported, Exited──┘  ◀─────────Reported┘

It has one thread and no CUDA context, so a fork copies nothing that is in use. Run by `processes.py` as
`python -m triptych.launch.fork_server FD PARENT_PID`.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial

from triptych.errors import TriptychError
from triptych.launch.messages import Exited, ForkServerCommand, Reported, Signal, Spawn, receive, send
from triptych.launch.parent_death import die_with_parent, set_process_name
from triptych.launch.signals import SignalPipe, describe_exit
from triptych.worker.protocol import StartReport

RunWorker = Callable[..., None]


class ForkServer:
    """Owns the workers' pids from fork to wait."""

    def __init__(self, control: socket.socket, run_worker: RunWorker) -> None:
        self._control = control
        self._run_worker = run_worker
        self._names: dict[int, str] = {}  # of the workers that live, by pid
        self._signals = SignalPipe([signal.SIGCHLD])

    def serve(self) -> None:
        """Until the launcher hangs up; the workers die with this process then."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._signals in ready:
                    self._signals.read()
                    self._reap()
                if self._control in ready:
                    command = receive(self._control, ForkServerCommand)  # type: ignore[arg-type]
                    if command is None:
                        return
                    self._obey(command)

    def _obey(self, command: ForkServerCommand) -> None:
        if isinstance(command, Signal):
            for pid, name in self._names.items():
                if name == command.name:
                    os.kill(pid, command.signum)
            return
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._signals.close()
            _be_worker(command, self._control, self._run_worker, parent_pid)
        self._names[pid] = command.name

    def _reap(self) -> None:
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            send(self._control, Exited(self._names.pop(pid), describe_exit(os.waitstatus_to_exitcode(status))))


def _be_worker(spawn: Spawn, control: socket.socket, run_worker: RunWorker, parent_pid: int) -> None:
    """The child's whole life; never returns, as the stack above it is the fork server's."""
    code = 1
    report = partial(_report, control, spawn.name)
    try:
        die_with_parent(parent_pid)
        set_process_name(spawn.name)
        run_worker(spawn.config, host=spawn.host, port=0, router_url=spawn.router_url, report=report)
        code = 0
    except TriptychError as error:
        report(StartReport(error=str(error)))
    except Exception as error:  # the process's edge: what nobody foresaw is shown whole, and told to the launcher
        traceback.print_exc()
        report(StartReport(error=f"{type(error).__name__}: {error}"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _report(control: socket.socket, name: str, report: StartReport) -> None:
    try:
        send(control, Reported(name, report))
    except BrokenPipeError:  # the launcher has gone, and this process is about to be killed
        os._exit(1)


def main() -> None:
    control_fd, parent_pid = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent_pid)
    set_process_name("fork-server")
    # Late on purpose: the import takes seconds, during which the launcher may die.
    run_worker: RunWorker = importlib.import_module("triptych.worker.app").run_worker
    gc.collect()
    gc.freeze()  # the workers' collectors leave the imported objects alone, so their pages stay shared
    ForkServer(socket.socket(fileno=control_fd), run_worker).serve()


if __name__ == "__main__":
    main()
