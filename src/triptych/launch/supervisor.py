"""Watches the children of one host: the router and the workers.

A child's life:

    STARTING ──▶ READY ──▶ (dies) ──▶ BACKOFF ──▶ STARTING ...
        │          │                    └──▶ GIVEN_UP   after too many deaths within the window
        └──────────┴─▶ STOPPING ──▶ STOPPED

The cluster's life: STARTING until every child is ready, then SERVING, then STOPPING, then STOPPED. While it starts, a death is a failure of the
whole: nothing is left running. Once it serves, a dead child is started again, and the others go on. It stops when asked to, or when
a child that cannot be done without was given up.

Decides only: processes, clock and log come from outside.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from triptych.worker.protocol import StartReport


class ChildState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    GIVEN_UP = "given up"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Phase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    STOPPED = "stopped"


_LEGAL: dict[ChildState, frozenset[ChildState]] = {
    ChildState.STARTING: frozenset({ChildState.READY, ChildState.BACKOFF, ChildState.GIVEN_UP, ChildState.STOPPING}),
    ChildState.READY: frozenset({ChildState.BACKOFF, ChildState.GIVEN_UP, ChildState.STOPPING}),
    ChildState.BACKOFF: frozenset({ChildState.STARTING, ChildState.STOPPED}),
    ChildState.GIVEN_UP: frozenset({ChildState.STOPPED}),
    ChildState.STOPPING: frozenset({ChildState.STOPPED}),
    ChildState.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    first_backoff_s: float = 0.5  # doubles with each death within the window
    max_backoff_s: float = 8.0
    max_deaths: int = 5  # within the window; one more and the child is given up
    window_s: float = 120.0
    start_timeout_s: float = 600.0  # without a sign of progress from a starting child
    stop_grace_s: float = 5.0  # from SIGTERM to SIGKILL

    def backoff_s(self, num_deaths: int) -> float:
        return min(self.first_backoff_s * 2 ** (num_deaths - 1), self.max_backoff_s)


class ChildProcesses(Protocol):
    """What the supervisor needs of the operating system; `processes.py` has it."""

    def spawn(self, name: str) -> None: ...

    def signal(self, name: str, signum: signal.Signals) -> None: ...

    def kill_all(self) -> None: ...


@dataclass(slots=True)
class Child:
    """`deadline_s` is the end of a start, a stop or a back-off, by the supervisor's clock."""

    name: str
    state: ChildState = ChildState.STARTING
    deadline_s: float = 0.0
    loaded: float = 0.0  # share of the weights read
    url: str = ""  # where it serves, from its last start
    error: str = ""  # its own last word
    deaths_s: deque[float] = field(default_factory=lambda: deque[float]())

    @property
    def is_alive(self) -> bool:
        return self.state in (ChildState.STARTING, ChildState.READY, ChildState.STOPPING)

    def become(self, state: ChildState, deadline_s: float = float("inf")) -> None:
        assert state in _LEGAL[self.state], f"{self.name}: {self.state} -> {state}"
        self.state, self.deadline_s = state, deadline_s


class Supervisor:
    """`is_enough(names)` says whether the children of these names can still serve; `first_to_stop` is stopped before the others."""

    def __init__(
        self,
        names: Iterable[str],
        first_to_stop: str,
        processes: ChildProcesses,
        clock: Callable[[], float],
        log: Callable[[str], None],
        is_enough: Callable[[set[str]], bool],
        policy: RestartPolicy = RestartPolicy(),
    ) -> None:
        self.children = {name: Child(name) for name in names}
        self.phase = Phase.STARTING
        self.failure = ""  # why the cluster ended unasked, in one sentence
        self._first_to_stop = first_to_stop
        self._processes = processes
        self._clock = clock
        self._log = log
        self._is_enough = is_enough
        self._policy = policy

    def start(self) -> None:
        for child in self.children.values():
            self._spawn(child)

    def on_report(self, name: str, report: StartReport) -> None:
        child = self.children[name]
        if report.error:
            child.error = report.error
        if child.state is not ChildState.STARTING:
            return
        child.loaded = max(child.loaded, report.loaded)
        child.deadline_s = self._clock() + self._policy.start_timeout_s
        if report.url:
            child.loaded, child.url = 1.0, report.url
            child.become(ChildState.READY)
            if self.phase is Phase.SERVING:
                self._log(f"{name} is back at {report.url}")
            elif all(each.state is ChildState.READY for each in self.children.values()):
                self.phase = Phase.SERVING

    def on_exit(self, name: str, reason: str) -> None:
        child = self.children[name]
        cause, child.error = child.error or reason, ""
        if self.phase is Phase.STARTING:
            self._fail(f"{name} died while starting: {cause}")
        elif self.phase is Phase.SERVING:
            self._restart_later(child, cause)
        else:
            if child.is_alive:
                self._stopped(child)
            self._go_on_stopping()

    def tick(self) -> None:
        """Act on the deadlines that have passed."""
        now = self._clock()
        for child in self.children.values():
            if child.deadline_s > now:
                continue
            if child.state is ChildState.BACKOFF:
                child.become(ChildState.STARTING)
                self._spawn(child)
            elif child.state is ChildState.STARTING:
                child.error = f"no progress for {self._policy.start_timeout_s:g} s"
                child.deadline_s = float("inf")
                self._processes.signal(child.name, signal.SIGKILL)
            elif child.state is ChildState.STOPPING:
                self._log(f"{child.name} did not stop within {self._policy.stop_grace_s:g} s; killing it")
                child.deadline_s = float("inf")
                self._processes.signal(child.name, signal.SIGKILL)

    @property
    def next_deadline_s(self) -> float:
        return min(child.deadline_s for child in self.children.values())

    def stop(self) -> None:
        """In order if the cluster serves: first the router, so that no request sees its workers go. Asked again, or while it starts: at once."""
        if self.phase is not Phase.SERVING:
            self.kill()
            return
        self.phase = Phase.STOPPING
        for child in self.children.values():
            if not child.is_alive:
                child.become(ChildState.STOPPED)
        self._go_on_stopping()

    def kill(self) -> None:
        self.phase = Phase.STOPPED
        self._processes.kill_all()

    def _spawn(self, child: Child) -> None:
        child.loaded = 0.0
        child.deadline_s = self._clock() + self._policy.start_timeout_s
        self._processes.spawn(child.name)

    def _restart_later(self, child: Child, cause: str) -> None:
        now = self._clock()
        child.deaths_s.append(now)
        while child.deaths_s[0] < now - self._policy.window_s:
            child.deaths_s.popleft()
        num_deaths = len(child.deaths_s)
        if num_deaths <= self._policy.max_deaths:
            wait_s = self._policy.backoff_s(num_deaths)
            child.become(ChildState.BACKOFF, now + wait_s)
            self._log(f"{child.name} died ({cause}); starting it again in {wait_s:g} s")
            return
        child.become(ChildState.GIVEN_UP)
        self._log(f"{child.name} died ({cause}), {num_deaths} times in {self._policy.window_s:g} s; giving it up")
        if not self._is_enough({name for name, each in self.children.items() if each.state is not ChildState.GIVEN_UP}):
            self._fail(f"{child.name} cannot be kept alive ({cause}), and nothing can be served without it")

    def _fail(self, sentence: str) -> None:
        self.failure = sentence
        self.kill()

    def _stopped(self, child: Child) -> None:
        if child.state is not ChildState.STOPPING:
            child.become(ChildState.STOPPING)
        child.become(ChildState.STOPPED)

    def _go_on_stopping(self) -> None:
        """Ask the first to stop; when it has, the others; when they have, the cluster has stopped."""
        first = self.children[self._first_to_stop]
        waiting = [first] if first.is_alive else [child for child in self.children.values() if child.is_alive]
        if not waiting:
            self.phase = Phase.STOPPED
        for child in waiting:
            if child.state is not ChildState.STOPPING:
                child.become(ChildState.STOPPING, self._clock() + self._policy.stop_grace_s)
                self._processes.signal(child.name, signal.SIGTERM)
