"""`serve`: runs one host's cluster until it is asked to stop: signals and reports in, the supervisor's decisions out."""

import selectors
import signal
import time
from http.client import HTTPConnection, HTTPException

from rich.console import Console

from triptych.errors import StartError
from triptych.launch.messages import ChildEvent, Reported
from triptych.launch.options import ServeOptions
from triptych.launch.processes import ROUTER, Processes, url_host
from triptych.launch.progress import StartProgress
from triptych.launch.signals import SignalPipe
from triptych.launch.supervisor import ChildState, Phase, Supervisor
from triptych.worker.protocol import StartReport

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HEALTH_POLL_S = 0.05
_HEALTH_TIMEOUT_S = 1.0


def serve(options: ServeOptions) -> None:
    """Blocks until stopped by a signal. Raises `StartError` if the cluster cannot start or cannot be kept alive; nothing is left running."""
    with selectors.DefaultSelector() as selector:
        launcher = _Launcher(options, selector)
        try:
            launcher.run()
        finally:
            launcher.close()
    if launcher.supervisor.failure:
        raise StartError(launcher.supervisor.failure)


class _Launcher:
    """The loop, and what a person sees of it."""

    def __init__(self, options: ServeOptions, selector: selectors.BaseSelector) -> None:
        self._options = options
        self._selector = selector
        self._console = Console(stderr=True)
        self._signals = SignalPipe(_STOP_SIGNALS)
        self._processes = Processes(options.router, options.workers, selector)
        self.supervisor = Supervisor(
            names=[ROUTER, *options.workers],
            first_to_stop=ROUTER,
            processes=self._processes,
            clock=time.monotonic,
            log=self._log,
            is_enough=lambda names: ROUTER in names and options.can_serve(names),
        )
        selector.register(self._signals, selectors.EVENT_READ, self._read_signals)

    def run(self) -> None:
        self.supervisor.start()
        with StartProgress(self._console) as progress:
            while self.supervisor.phase is Phase.STARTING:
                self._turn()
                for name in self._options.workers:
                    progress.show(self.supervisor.children[name])
        if self.supervisor.phase is Phase.SERVING:
            self._announce()
        while self.supervisor.phase is not Phase.STOPPED:
            self._turn()

    def close(self) -> None:
        """Whatever happened: no child is left."""
        if self.supervisor.phase is not Phase.STOPPED:
            self.supervisor.kill()
        self._processes.close()
        self._signals.close()

    def _turn(self) -> None:
        """Wait for the next thing to happen, and act on it."""
        timeout_s = self.supervisor.next_deadline_s - time.monotonic()
        if self._awaits_health():
            timeout_s = min(timeout_s, _HEALTH_POLL_S)
        for key, _ in self._selector.select(None if timeout_s == float("inf") else max(0.0, timeout_s)):
            for event in key.data():
                self._handle(event)
        self.supervisor.tick()
        if self._awaits_health() and is_healthy(self._options.router.host, self._options.router.port):
            self.supervisor.on_report(ROUTER, StartReport(url=self._url))

    def _handle(self, event: ChildEvent) -> None:
        if isinstance(event, Reported):
            self.supervisor.on_report(event.name, event.report)
        else:
            self.supervisor.on_exit(event.name, event.reason)

    def _read_signals(self) -> list[ChildEvent]:
        for signum in self._signals.read():
            if self.supervisor.phase is Phase.SERVING:
                self._log(f"stopping ({signum.name}); once more to stop at once")
            self.supervisor.stop()
        return []

    def _awaits_health(self) -> bool:
        """The router is asked whether it is ready when no worker is on its way any more."""
        states = {name: child.state for name, child in self.supervisor.children.items()}
        return states.pop(ROUTER) is ChildState.STARTING and ChildState.STARTING not in states.values()

    @property
    def _url(self) -> str:
        return f"http://{url_host(self._options.router.host)}:{self._options.router.port}"

    def _announce(self) -> None:
        print(f"{self._options.router.model.name} is served on {self._url} ({self._options.layout})", flush=True)

    def _log(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def is_healthy(host: str, port: int) -> bool:
    """Whether the router answers, and has a live worker for every stage."""
    connection = HTTPConnection(url_host(host).strip("[]"), port, timeout=_HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
