"""`EngineThread`: the one thread that owns scheduler and runner. It takes commands from a queue and steps while there is work."""

import logging
import queue
import threading
from collections.abc import Callable

from triptych.engine.core import EngineCore
from triptych.engine.events import EngineEvent

logger = logging.getLogger(__name__)

Command = Callable[[EngineCore], None]


def _wake(_: EngineCore) -> None:
    """A command that only ends the wait for commands."""


class EngineThread:
    """`on_events` is called in the engine thread with each step's events, `on_death` once if the engine breaks."""

    def __init__(
        self, core: EngineCore, on_events: Callable[[list[EngineEvent]], None], on_death: Callable[[BaseException], None]
    ) -> None:
        self._core = core
        self._on_events = on_events
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_closing = False
        self.error: BaseException | None = None  # that broke the engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Until the engine has ended: it was closed, or it broke."""
        self._thread.join()

    def submit(self, command: Command) -> None:
        """Have `command` run between two steps. Thread-safe, returns at once."""
        self._commands.put(command)

    def wake(self) -> None:
        """A transfer has moved on: step again."""
        self._commands.put(_wake)

    def close(self) -> None:
        self._is_closing = True
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            has_moved = False
            while not self._is_closing:
                self._take_commands(wait=not has_moved)
                events, has_moved = self._core.step()
                if events:
                    self._on_events(events)
        except Exception as error:  # the thread's edge: a broken scheduler cannot be trusted with another step
            logger.exception("the engine broke")
            self.error = error
            self._on_death(error)

    def _take_commands(self, wait: bool) -> None:
        if wait:
            try:
                self._commands.get(timeout=self._core.seconds_to_deadline())(self._core)
            except queue.Empty:
                return
        while True:
            try:
                self._commands.get_nowait()(self._core)
            except queue.Empty:
                return
