"""`MediaPreparation`: keeps the bytes of items while somebody waits for them, and has them prepared when the engine asks."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from triptych.errors import FailureReason, InternalError, RequestError, TriptychError
from triptych.media.processor import MediaProcessor
from triptych.worker.protocol import EncodeRequest

logger = logging.getLogger(__name__)

Preprocess = Callable[[bytes, str, tuple[int, ...], int], object]  # data, modality, grid, number of rows -> tower inputs


@dataclass(frozen=True, slots=True)
class Prepared:
    inputs: object
    seconds: float


@dataclass(frozen=True, slots=True)
class PreparationFailed:
    message: str
    reason: FailureReason


@dataclass(slots=True)
class HeldMedia:
    request: EncodeRequest
    data: bytes
    holders: set[str] = field(default_factory=set[str])  # encode ids


class MediaPreparation:
    """`on_done(key, outcome)` is called from a thread of the pool."""

    def __init__(
        self, processor: MediaProcessor, preprocess: Preprocess, on_done: Callable[[str, Prepared | PreparationFailed], None]
    ) -> None:
        self._processor = processor
        self._preprocess = preprocess
        self._on_done = on_done
        self._held: dict[str, HeldMedia] = {}
        self._lock = Lock()

    def hold(self, request: EncodeRequest, data: bytes) -> None:
        with self._lock:
            held = self._held.setdefault(request.key, HeldMedia(request, data))
            held.holders.add(request.encode_id)

    def let_go(self, request: EncodeRequest) -> None:
        with self._lock:
            held = self._held.get(request.key)
            if held is not None:
                held.holders.discard(request.encode_id)
                if not held.holders:
                    del self._held[request.key]

    def start(self, key: str) -> None:
        """Called from the engine thread. Everybody may have left meanwhile: then their aborts have reached the engine, or will."""
        with self._lock:
            held = self._held.get(key)
        if held is None:
            return
        try:
            future = self._processor.submit(self._prepare, held)
        except TriptychError as error:
            self._on_done(key, PreparationFailed(error.message, FailureReason.INTERNAL))
            return
        future.add_done_callback(lambda done: self._report(key, done))

    def close(self) -> None:
        self._processor.close()

    def _prepare(self, held: HeldMedia) -> Prepared | None:
        """None if everybody has left while it waited for a thread."""
        with self._lock:
            if not held.holders:
                return None
        started = time.perf_counter()
        request = held.request
        inputs = self._preprocess(held.data, request.modality, request.grid, request.num_rows)
        return Prepared(inputs, time.perf_counter() - started)

    def _report(self, key: str, done: "Future[Prepared | None]") -> None:
        if done.cancelled():
            self._on_done(key, PreparationFailed("the worker stops.", FailureReason.INTERNAL))
            return
        error = done.exception()
        if error is None:
            outcome = done.result()
            if outcome is not None:
                self._on_done(key, outcome)
        elif isinstance(error, RequestError):
            self._on_done(key, PreparationFailed(error.message, FailureReason.BAD_MEDIA))
        else:
            kind = "" if isinstance(error, InternalError) else f"{type(error).__name__}: "
            logger.error("item %s cannot be prepared", key[:12], exc_info=error)
            self._on_done(key, PreparationFailed(f"the item cannot be prepared: {kind}{error}", FailureReason.INTERNAL))
