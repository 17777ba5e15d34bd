"""Every exception that Triptych raises on purpose.

TriptychError                     status, type and sentence of an OpenAI-shaped error
├── ConfigError                   a configuration that cannot work; refused at start, exit code 2
├── StartError                    a port in use, a worker that died while starting; exit code 1
├── RequestError            400   the client's mistake
│   ├── MediaError          400   a broken, unreadable or forbidden picture
│   ├── TooLargeError       413   over a size limit
│   ├── ContextOverflowError 400  prompt + max_tokens do not fit the model
│   └── UnknownModelError   404
├── UnauthorizedError       401   a call between members of a cluster, from somebody without its secret
├── OverloadedError         429   a bounded queue is full; carries retry_after_s
├── UnavailableError        503   no worker of a stage, or nothing left to try; carries stage and reason
├── DeadlineError           504   a request's own deadline passed
├── WorkerLostError         503   a worker's process is gone, or silent; the router tries another before a client sees this
├── TransferError           503   a read of a published item failed; carries a FailureReason
└── InternalError           500   a broken invariant, reported for the one request that met it
"""

from collections.abc import Collection
from difflib import get_close_matches
from enum import StrEnum
from typing import ClassVar


class FailureReason(StrEnum):
    """Why an item (or a KV transfer) could not be had. All but MISMATCH and BAD_MEDIA can be healed by producing it again."""

    MISSING = "missing"  # the producer does not know it
    EVICTED = "evicted"  # it was here, and made room for another
    STALE = "stale"  # its pages were recycled before or while they were read
    PEER_LOST = "peer_lost"  # the producer's process or host is gone
    TIMEOUT = "timeout"  # a deadline passed
    CORRUPT = "corrupt"  # length or checksum differ from the ticket
    MISMATCH = "mismatch"  # dtype, shape or model differ from what the consumer expects
    BAD_MEDIA = "bad_media"  # the bytes cannot be decoded or do not give the rows their header promised
    OVERLOADED = "overloaded"  # the producer's queue is full
    INTERNAL = "internal"  # the producer failed

    @property
    def is_retryable(self) -> bool:
        return self not in (FailureReason.MISMATCH, FailureReason.BAD_MEDIA)


class TriptychError(Exception):
    """Base of the tree; `str(error)` is one sentence for a person."""

    status: ClassVar[int] = 500
    type: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(TriptychError):
    type = "config_error"


class StartError(TriptychError):
    type = "start_error"


class RequestError(TriptychError):
    status = 400
    type = "invalid_request_error"


class MediaError(RequestError):
    pass


class TooLargeError(RequestError):
    status = 413


class ContextOverflowError(RequestError):
    def __init__(self, message: str) -> None:
        super().__init__(message, code="context_length_exceeded")


class UnknownModelError(RequestError):
    status = 404

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class UnauthorizedError(TriptychError):
    status = 401
    type = "authentication_error"


class OverloadedError(TriptychError):
    status = 429
    type = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(TriptychError):
    """`type` is `ec_unavailable`, `kv_unavailable` or `worker_unavailable`."""

    status = 503

    def __init__(self, message: str, *, type: str = "worker_unavailable", stage: str, reason: str) -> None:
        super().__init__(f"{message} (stage: {stage}, reason: {reason})", code=reason)
        self.type = type
        self.stage = stage
        self.reason = reason


class DeadlineError(TriptychError):
    status = 504
    type = "deadline_exceeded"


class WorkerLostError(TriptychError):
    status = 503
    type = "worker_unavailable"


class TransferError(TriptychError):
    status = 503
    type = "transfer_error"

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message, code=reason.value)
        self.reason = reason


class InternalError(TriptychError):
    pass


def suggest(name: str, known: Collection[str], otherwise: str = "") -> str:
    """The rest of a sentence that refuses an unknown name: the nearest known one, else `otherwise`, else all known ones."""
    near = get_close_matches(name, known, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    return otherwise or f"known are {', '.join(known)}."
