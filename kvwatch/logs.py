"""Structured logs: one configuration for kvwatch, the engine and the libraries below them.

Lines are JSON or made for a console. Whatever is bound with `bind_request` (the ids of the request and of its trace) is
on every line that the same task or thread logs. Lines of the standard library's logging, which uvicorn uses, take the
same way out.

What people said to the model stays out of the logs: fields that could hold it are replaced unless `log_prompts` asks
for them.
"""

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor, WrappedLogger

from kvwatch.control import SettingValue
from kvwatch.errors import ConfigError

LogFormat = Literal["console", "json"]

LEVELS = ("debug", "info", "warning", "error")

PROMPT_FIELDS = frozenset({"prompt", "messages", "text", "content", "completion", "token_ids", "prompt_token_ids"})
"""Fields that may hold what users wrote or read."""

REDACTED = "[not logged; see --log-prompts]"


def configure_logs(
    log_format: LogFormat = "console", level: str = "info", *, log_prompts: bool = False, stream: TextIO | None = None
) -> None:
    """Send all logs of the process to `stream` (default: stderr). May be called again to change the configuration.

    Raises:
        ConfigError: the level or the format is unknown.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; choose one of {', '.join(LEVELS)}")
    if log_format not in {"console", "json"}:
        raise ConfigError(f"log format {log_format!r} is unknown; choose console or json")
    out = stream or sys.stderr
    shared = _shared_processors(log_prompts=log_prompts)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)
    )
    handler = LogOutput(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_tail(log_format), renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Anything less than a warning from HTTP servers and clients is about every single request.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel("WARNING")


class LogOutput(logging.StreamHandler[TextIO]):
    """Writes lines to a stream. A line that cannot be written stops nobody, and is counted."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.num_lost = 0
        """Lines that could not be written."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Count a line that could not be written; the library would print a traceback where nothing can be printed."""
        if isinstance(sys.exception(), OSError | ValueError):  # ValueError: the stream is closed
            self.num_lost += 1
        else:
            super().handleError(record)


def num_lost_lines() -> int:
    """Return how many lines of the process's log could not be written so far. Any thread."""
    return sum(handler.num_lost for handler in logging.getLogger().handlers if isinstance(handler, LogOutput))


class LogLevel:
    """The level of all logs as a setting that can change while the process runs. Any thread."""

    def get(self) -> SettingValue:
        """Return the least severe level that is shown."""
        return logging.getLevelName(logging.getLogger().level).lower()

    def set(self, value: SettingValue) -> None:
        """Show lines from this level on, one of `LEVELS`."""
        logging.getLogger().setLevel(str(value).upper())


@contextmanager
def bind_request(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Put a request's id, and that of its trace if there is one, on every line logged inside.

    That is, by this thread or task and by tasks that it starts.
    """
    ids = {"request_id": request_id} | ({"trace_id": trace_id} if trace_id else {})
    with structlog.contextvars.bound_contextvars(**ids):
        yield


def _shared_processors(*, log_prompts: bool) -> list[Processor]:
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    return [*processors, *([] if log_prompts else [_redact]), _escape]


def _tail(log_format: LogFormat) -> list[Processor]:
    # The console renderer prints tracebacks itself, JSON needs them as text.
    return [structlog.processors.format_exc_info] if log_format == "json" else []


def _escape(_: WrappedLogger, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Make control characters visible: what a client sends must not move the cursor of whoever reads the log."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return event


def _redact(_: WrappedLogger, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name in PROMPT_FIELDS & event.keys():
        event[name] = REDACTED
    return event
