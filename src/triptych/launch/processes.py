"""`Processes`: the operating system's side of one host's children, as the supervisor sees them: spawn, signal, events.

The router is a process of its own; the workers are forked by the fork server, which is started with the first of them and
again should it die. Both are in sessions of their own, so that a terminal's Ctrl-C reaches the launcher alone, which decides.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from triptych.config import EngineConfig
from triptych.launch.messages import ChildEvent, Command, Exited, Route, Signal, Spawn, receive, send
from triptych.launch.signals import describe_exit
from triptych.router.options import RouterOptions

ROUTER = "router"  # its name among the workers'
_FORK_SERVER_MODULE = "triptych.launch.fork_server"
_HANG_UP_S = 5.0  # how long a process may take to notice that the launcher has hung up
_ROUTER_MODULE = "triptych.launch.router_process"


class Processes:
    """Owns the router's and the fork server's process, and the sockets over which they report.

    `selector` gets one entry per process; its `data` is a function that returns the events which have come.
    """

    def __init__(self, router: RouterOptions, workers: Mapping[str, EngineConfig], selector: selectors.BaseSelector) -> None:
        self._router = router
        self._workers = workers
        self._selector = selector
        self._running: dict[str, _Controlled] = {}  # by module
        self._forked: set[str] = set()  # names of the workers that live in the fork server's eyes

    def spawn(self, name: str) -> None:
        if name == ROUTER:
            self._command(_ROUTER_MODULE, Route(self._router))
            return
        self._forked.add(name)
        router_url = f"http://{url_host(self._router.host)}:{self._router.port}"
        self._command(_FORK_SERVER_MODULE, Spawn(name, self._workers[name], "127.0.0.1", router_url))

    def signal(self, name: str, signum: signal.Signals) -> None:
        """Nothing happens if it has gone already."""
        module = _ROUTER_MODULE if name == ROUTER else _FORK_SERVER_MODULE
        if module not in self._running:
            return
        if name == ROUTER:
            self._running[module].popen.send_signal(signum)
        else:
            self._running[module].send(Signal(name, int(signum)))

    def kill_all(self) -> None:
        """At once and for certain: the workers die with the fork server (parent_death.py)."""
        for process in self._running.values():
            process.popen.kill()

    def close(self) -> None:
        """Hang up on the fork server, which has no workers left, and wait for what still runs."""
        for module in list(self._running):
            self._drop(module)

    def _command(self, module: str, command: Command) -> None:
        if module not in self._running:
            process = _Controlled(module)
            self._running[module] = process
            self._selector.register(process.control, selectors.EVENT_READ, partial(self._events, module))
        self._running[module].send(command)

    def _events(self, module: str) -> list[ChildEvent]:
        event = self._running[module].receive()
        if event is None:
            return self._all_gone(module)
        if isinstance(event, Exited):
            self._forked.discard(event.name)
        return [event]

    def _all_gone(self, module: str) -> list[ChildEvent]:
        reason = describe_exit(self._drop(module))
        if module == _ROUTER_MODULE:
            return [Exited(ROUTER, reason)]
        names, self._forked = sorted(self._forked), set()
        return [Exited(name, f"the fork server died: {reason}") for name in names]

    def _drop(self, module: str) -> int:
        process = self._running.pop(module)
        self._selector.unregister(process.control)
        return process.hang_up()


class _Controlled:
    """A Python process that runs `module` and talks over a socket pair."""

    def __init__(self, module: str) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.popen = subprocess.Popen(
                # -P: the user's folder is no place to import from
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def send(self, command: Command) -> None:
        with suppress(BrokenPipeError):  # it has just died; the end of its socket says so
            send(self.control, command)

    def receive(self) -> ChildEvent | None:
        try:
            return receive(self.control, ChildEvent)  # type: ignore[arg-type]
        except ConnectionResetError:  # it died with commands unread
            return None

    def hang_up(self) -> int:
        """Wait until everyone who holds the other end has gone, the workers included; the process's return code."""
        with self.control:
            self.control.shutdown(socket.SHUT_WR)
            self.control.settimeout(_HANG_UP_S)
            try:
                while self.receive() is not None:
                    pass
            except TimeoutError:
                self.popen.kill()
        return self.popen.wait()


def url_host(host: str) -> str:
    """The host part of a URL at which a server that listens on `host` can be reached from this machine."""
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"[{local}]" if ":" in local and not local.startswith("[") else local
