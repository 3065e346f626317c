"""Trace context as the W3C writes it: which trace a request belongs to, and which span of it is the caller's.

Owns the reading and writing of `traceparent`. Knows no spans and no exporter. What cannot be read is no context:
callers are not trusted, and a request never fails for its trace.
"""

import re
import secrets
from typing import NamedTuple

_FIELDS = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_INVALID_VERSION = "ff"
_NO_TRACE = "0" * 32
_NO_PARENT = "0" * 16
_SAMPLED = 1
_MAX_CHARS = 512


class TraceContext(NamedTuple):
    """The trace of a request."""

    trace_id: str
    """32 lower-case hexadecimal digits."""
    parent_id: str
    """Span of the caller, 16 lower-case hexadecimal digits; empty when the trace begins here."""
    is_sampled: bool
    """Whether the caller records the trace; False when it begins here."""

    def to_trace_parent(self) -> str:
        """Return it as a `traceparent`; a trace that begins here has the parent id 0, which no caller may send."""
        return f"00-{self.trace_id}-{self.parent_id or _NO_PARENT}-{int(self.is_sampled):02x}"


def read_trace_parent(text: str, *, may_begin: bool = False) -> TraceContext | None:
    """Read a `traceparent`.

    Args:
        text: What a caller sent, or what `to_trace_parent` wrote.
        may_begin: Whether the parent id 0 is accepted, which only this project writes.

    Returns:
        The context, or None when the text is not valid.
    """
    found = _FIELDS.fullmatch(text.strip(" \t")) if len(text) <= _MAX_CHARS else None
    if found is None:
        return None
    version, trace_id, parent_id, flags, rest = found.groups()
    if version == _INVALID_VERSION or trace_id == _NO_TRACE or (version == "00" and rest is not None):
        return None
    if parent_id == _NO_PARENT:
        return TraceContext(trace_id, "", is_sampled=False) if may_begin else None
    return TraceContext(trace_id, parent_id, is_sampled=bool(int(flags, 16) & _SAMPLED))


def is_trace_id(text: str) -> bool:
    """Whether a text is a trace id as this module writes them."""
    return _TRACE_ID.fullmatch(text) is not None


def begin_trace() -> TraceContext:
    """Return the context of a trace that begins here."""
    return TraceContext(secrets.token_hex(16), "", is_sampled=False)
