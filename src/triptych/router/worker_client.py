"""`WorkerClient`: how the router speaks to one worker; and what becomes of a worker's errors on the way.

Three implementations: over HTTP (`http_worker_client.py`), in the same process (`worker.Worker` itself, which brings torch and is
never named here), and the arithmetic fake (`fake_worker_client.py`).
"""

from abc import abstractmethod
from collections.abc import AsyncGenerator
from typing import Protocol

from triptych.engine.events import EncodeEvent, Failed, GenerateEvent
from triptych.errors import (
    DeadlineError,
    FailureReason,
    InternalError,
    MediaError,
    OverloadedError,
    RequestError,
    TooLargeError,
    TriptychError,
    UnavailableError,
)
from triptych.worker.protocol import ECDelivery, EncodeRequest, GenerateRequest, KVDelivery, WorkerInfo


class WorkerClient(Protocol):
    """One worker. Every call raises `WorkerLostError` when the process cannot be reached or dies meanwhile, and
    the worker's own typed error when it refuses."""

    info: WorkerInfo
    url: str = ""  # none within the same process

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        """The request's events; the last one is terminal. Closing the generator early aborts the request there."""

    @abstractmethod
    async def encode(self, request: EncodeRequest, media: bytes) -> EncodeEvent:
        """Cancelling the call aborts the encode there."""

    @abstractmethod
    async def deliver(self, delivery: ECDelivery) -> None: ...

    @abstractmethod
    async def deliver_kv(self, delivery: KVDelivery) -> None: ...

    @abstractmethod
    async def release(self, id: str) -> None:
        """The ticket of a request (its KV) or an encode (its item) is not needed any more."""

    @abstractmethod
    async def watch(self) -> None:
        """Return when the worker is lost."""

    @abstractmethod
    async def close(self) -> None: ...


def error_from_wire(
    status: int, type: str, message: str, *, stage: str, reason: str = "", retry_after_s: float = 1.0
) -> TriptychError:
    """The typed error again that a worker turned into status, type and sentence. A status which we don't use is an `InternalError`."""
    sentence = message.partition(" (stage: ")[0]  # UnavailableError puts its own behind it
    if reason == FailureReason.BAD_MEDIA:
        return MediaError(sentence)
    match status:
        case 400 | 404:
            return RequestError(message)
        case 413:
            return TooLargeError(message)
        case 429:
            return OverloadedError(message, retry_after_s=retry_after_s)
        case 503:
            return UnavailableError(sentence, type=type or "worker_unavailable", stage=stage, reason=reason or "unknown")
        case 504:
            return DeadlineError(message)
        case _:
            return InternalError(message)


def error_from_event(event: Failed, stage: str) -> TriptychError:
    """The typed error that a request's `Failed` stands for."""
    return error_from_wire(event.status, event.type, event.message, stage=stage, reason=event.reason or "")
