"""`VirtualTimeLoop`: an event loop whose clock jumps to the next timer instead of waiting for it.

Everything in the router that decides takes its time from the running loop (`loop.time`, `asyncio.sleep`, `asyncio.timeout`) and its
transport from outside; on this loop, with fake workers, hours of a cluster pass in milliseconds and always in the same order.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0. With nothing to do and no timer it waits for real, for a thread that calls back."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._advance))

    def time(self) -> float:
        return self._now

    def _advance(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Where a loop would block for `timeout` seconds, it looks once and lets the time pass."""

    def __init__(self, advance: Any) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._advance(timeout)
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
