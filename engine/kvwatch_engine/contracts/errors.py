"""Errors of the engine. Messages say the value, the limit and the remedy.

KVWatchError
└── EngineError
    ├── RequestRejected        a request is refused; nothing was allocated
    │   ├── RequestInvalid     it can never run (too long, a parameter out of range): 400
    │   └── EngineOverloaded   the queue is full or the server drains: 429 or 503, try again later
    ├── ModelError             a model cannot be loaded or is not supported
    ├── AdapterError           a LoRA adapter cannot be loaded or is not supported; nothing was changed
    ├── GuideFailed            a grammar takes too much work at one token; ends its sequence alone
    └── CacheCorruption        an invariant of the block pool is broken
"""

from typing import Literal

from kvwatch.errors import KVWatchError
from kvwatch.telemetry.events.request import RejectionReason


class EngineError(KVWatchError):
    """Base of the engine's errors."""


class RequestRejected(EngineError):
    """A request is refused; nothing was allocated for it."""


class RequestInvalid(RequestRejected):
    """The request can never run as it is. `param` names the field of the API that is wrong."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineOverloaded(RequestRejected):
    """The request could run later. `reason` is `queue_full` or `draining`."""

    def __init__(
        self, message: str, *, reason: Literal["queue_full", "draining"], retry_after_seconds: int = 1
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class ModelError(EngineError):
    """A model cannot be loaded, or is of a kind that is not supported."""


class AdapterError(EngineError):
    """A LoRA adapter cannot be loaded, or is of a kind that is not supported; nothing was changed."""


class GuideFailed(EngineError):
    """A grammar takes more work or time at one token than it may; ends its sequence alone."""


class CacheCorruption(EngineError):
    """An invariant of the block pool is broken; the message is the equation with its numbers."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed since memory could not be had, whatever library says so. Needs no torch."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def rejection_reason(error: Exception) -> RejectionReason:
    """Return the reason under which a refusal is counted."""
    if isinstance(error, EngineOverloaded):
        return error.reason
    return "too_long" if getattr(error, "code", None) == "context_length_exceeded" else "invalid"
