"""Errors that kvwatch raises to its users; every message says the value, the limit and the remedy.

KVWatchError
├── ConfigError (ValueError)     a flag, environment variable or configuration file is wrong
├── SchemaError (TypeError)      an event or metric declaration is inconsistent
├── ExporterError                an exporter could not start
├── ControlError                 the engine refused or could not answer
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


class RecordingError(KVWatchError):
    """A recording is damaged, of another version, or does not hold what was asked for."""
