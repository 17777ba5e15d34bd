"""`EventStreams`: carries the engine thread's events to the coroutines that wait for them."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

from triptych.engine.events import EncodeEvent, Failed, GenerateEvent
from triptych.errors import FailureReason, RequestError, WorkerLostError

StreamEvent = GenerateEvent | EncodeEvent


class EventStreams:
    """One queue per request or encode. `dispatch` and `fail_all` are called from the engine thread, everything else from the loop's."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[StreamEvent]]] = {}
        self._lock = Lock()
        self._death: str = ""  # why no further stream can be opened

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, id: str) -> "asyncio.Queue[StreamEvent]":
        """Raises `RequestError` if the id is in use: its events would be mixed up with another's."""
        queue: asyncio.Queue[StreamEvent] = asyncio.Queue()
        with self._lock:
            if id in self._queues:
                raise RequestError(f"the id '{id[:64]}' is in use by a request that has not ended.")
            self._queues[id] = (asyncio.get_running_loop(), queue)
            if self._death:
                queue.put_nowait(_death_of(id, self._death))
        return queue

    def close(self, id: str) -> None:
        with self._lock:
            self._queues.pop(id, None)

    def dispatch(self, events: Sequence[StreamEvent]) -> None:
        """An event whose stream is closed is of no interest any more."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[StreamEvent], StreamEvent]]] = {}
        with self._lock:
            for event in events:
                target = self._queues.get(event.id)
                if target is not None:
                    by_loop.setdefault(target[0], []).append((target[1], event))
        for loop, deliveries in by_loop.items():
            with suppress(RuntimeError):  # a loop that was closed under its streams: nobody listens there any more
                loop.call_soon_threadsafe(_put_all, deliveries)

    def fail_all(self, reason: str) -> None:
        """The engine is gone: end every stream, those of the future as well."""
        with self._lock:
            self._death = reason
            ids = list(self._queues)
        self.dispatch([_death_of(id, reason) for id in ids])


def _put_all(deliveries: "list[tuple[asyncio.Queue[StreamEvent], StreamEvent]]") -> None:
    for queue, event in deliveries:
        queue.put_nowait(event)


def _death_of(id: str, reason: str) -> Failed:
    message = f"the worker's engine is gone: {reason}"
    return Failed(id, message, WorkerLostError.type, WorkerLostError.status, FailureReason.PEER_LOST)
