"""Errors of the load generator.

KVWatchError
├── TargetUnreachable    nothing there speaks OpenAI's API; exit status 3
└── SavedRunError        a file of an earlier run cannot be read
"""

from kvwatch.errors import KVWatchError


class TargetUnreachable(KVWatchError):
    """The target refuses connections, does not answer in time, or does not answer as an OpenAI-compatible API."""


class SavedRunError(KVWatchError):
    """A saved run is no such file, or was made by another version."""


class RequestFailed(Exception):
    """One request did not get its answer; becomes part of the report, never ends the run."""

    def __init__(self, kind: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        """One of `outcome.ERROR_KINDS`, or `http_` and a status."""
        self.retry_after_seconds = retry_after_seconds
        """When the server says that it is worth trying again; None if it does not say."""
