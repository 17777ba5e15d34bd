"""What a worker's tower is asked, call by call; pictures that are all ready before it is asked; and one that it refuses."""

import threading
from collections.abc import Sequence
from typing import Any

from triptych.worker.media_preparation import PreparationFailed, Prepared
from triptych.worker.worker import Worker


class TowerCalls:
    """`rows`: of each call since, the items' numbers of rows, or none if it failed."""

    def __init__(self, worker: Worker) -> None:
        self.rows: list[list[int]] = []
        self._hold_until = 1
        self._held: list[tuple[str, Prepared | PreparationFailed]] = []
        self._lock = threading.Lock()  # of _held
        self._refused = b""
        self._bad: list[Any] = []  # what was prepared of the file that is refused
        self._thread = worker._thread  # pyright: ignore[reportPrivateUsage]
        runner: Any = self._thread._core._runner  # pyright: ignore[reportPrivateUsage]
        adapter, media = runner._encoder_runner._adapter, worker._media  # pyright: ignore[reportPrivateUsage]
        self._of_worker: Any = (adapter.collate, adapter.encode, media._preprocess, media._on_done)  # pyright: ignore[reportPrivateUsage]
        adapter.collate, adapter.encode = self._collate, self._encode
        media._preprocess, media._on_done = self._preprocess, self._hold  # pyright: ignore[reportPrivateUsage]

    def expect(self, num_items: int, refused: bytes = b"") -> None:
        """Forget what was; the engine hears of the next `num_items` when all are prepared. The tower fails with the file `refused`."""
        self.rows, self._hold_until, self._refused = [], num_items, refused

    def _preprocess(self, data: bytes, *given: Any) -> Any:
        inputs = self._of_worker[2](data, *given)
        if data == self._refused:
            self._bad.append(inputs)
        return inputs

    def _collate(self, items: Sequence[Any]) -> Any:
        if any(item is bad for item in items for bad in self._bad):
            self.rows.append([])
            raise RuntimeError("out of memory.")
        return self._of_worker[0](items)

    def _encode(self, model: Any, modality: str, inputs: Any, rows: Sequence[int]) -> Any:
        self.rows.append(list(rows))
        return self._of_worker[1](model, modality, inputs, rows)

    def _hold(self, key: str, outcome: Prepared | PreparationFailed) -> None:
        with self._lock:
            self._held.append((key, outcome))
            if len(self._held) < self._hold_until:
                return
            ready, self._held, self._hold_until = self._held, [], 1
        gate = threading.Event()
        self._thread.submit(lambda _: _wait(gate))  # so that what follows is heard between two steps
        for each in ready:
            self._of_worker[3](*each)
        gate.set()


def _wait(gate: threading.Event) -> None:
    assert gate.wait(20)
