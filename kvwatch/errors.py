"""Errors that kvwatch raises to its users; every message says the value, the limit and the remedy.

KVWatchError
├── ConfigError (ValueError)     a flag, environment variable or configuration file is wrong
├── SchemaError (TypeError)      an event or metric declaration is inconsistent
├── ExporterError                an exporter could not start
├── ControlError                 the engine refused or could not answer
│   ├── ChangeRefused            it cannot be as asked; nothing was changed
│   ├── ChangeConflict           somebody else has changed it meanwhile; nothing was changed
│   └── ChangeFailed             it was tried and did not work; nothing was changed
└── RecordingError               a recording cannot be read, or does not hold what was asked for
"""


class KVWatchError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(KVWatchError, ValueError):
    """A setting is unknown, of the wrong type or out of its range."""


class SchemaError(KVWatchError, TypeError):
    """An event or metric is declared inconsistently; raised at import or by `make check`."""


class ExporterError(KVWatchError):
    """An exporter could not be started (for instance, its port is taken)."""


class ControlError(KVWatchError):
    """The engine refused a control request, or has stopped and cannot answer it."""


class ChangeRefused(ControlError):
    """The engine cannot be changed as asked, and has changed nothing.

    `is_passing` says that what stands against it ends within moments by itself: the same may be asked again.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class ChangeConflict(ControlError):
    """The engine's settings are not those that whoever asks has read; nothing was changed."""


class ChangeFailed(ControlError):
    """A change of the engine was tried and did not work (for instance, memory was short); all is as it was."""


class RecordingError(KVWatchError):
    """A recording is damaged, of another version, or does not hold what was asked for."""
