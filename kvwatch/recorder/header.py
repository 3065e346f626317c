"""What a recording says of itself: format, schema, engine, configuration, clocks. Does not know files."""

import os
from collections.abc import Mapping

import msgspec

from kvwatch import __version__
from kvwatch.errors import RecordingError
from kvwatch.recorder.schema import RecordedEvent, current_schema, fingerprint
from kvwatch.telemetry.clock import Clock

FORMAT = 1
"""Raised when an older reader could no longer understand a file. Added events, fields and keys do not raise it."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a recording's first frame, a msgpack map; keys that a reader does not know are left out by it."""

    format: int = FORMAT
    version: str = __version__
    """Version of kvwatch that wrote it."""
    epoch: str
    """Names one run of one engine: sequence numbers and monotonic times of different epochs have nothing in common."""
    identity: dict[str, str]
    """The engine's labels."""
    config: dict[str, str]
    """Its settings as text; secrets are hidden."""
    pid: int
    wall_minus_monotonic_ns: int
    """What turns the events' times into Unix times, in ns."""
    created_ns: int
    """Unix time in ns at which the file was begun."""
    reason: str = ""
    """Why a flight recorder was written out; empty in other recordings."""
    has_token_ids: bool = False
    """Whether token ids were asked for."""
    fingerprint: str
    """Short name of `events`."""
    events: list[RecordedEvent]
    """Every event of the writer, with its fields in the order in which values are stored."""


class HeaderSource:
    """Makes the headers of one process's recordings. Any thread."""

    def __init__(
        self,
        clock: Clock,
        *,
        epoch: str,
        identity: Mapping[str, str],
        config: Mapping[str, str],
        has_token_ids: bool = False,
    ) -> None:
        self._clock = clock
        self._epoch = epoch
        self._identity = dict(identity)
        self._config = dict(config)
        self._has_token_ids = has_token_ids
        self._events = current_schema()
        self._fingerprint = fingerprint(self._events)

    def make(self, reason: str = "") -> RecordingHeader:
        """Return a header with the clocks as they are now."""
        wall_ns = self._clock.wall_ns()
        return RecordingHeader(
            epoch=self._epoch,
            identity=self._identity,
            config=self._config,
            pid=os.getpid(),
            wall_minus_monotonic_ns=wall_ns - self._clock.monotonic_ns(),
            created_ns=wall_ns,
            reason=reason,
            has_token_ids=self._has_token_ids,
            fingerprint=self._fingerprint,
            events=self._events,
        )


def encode_header(header: RecordingHeader) -> bytes:
    """Return the body of a header frame."""
    return msgspec.msgpack.encode(header)


class _Format(msgspec.Struct):
    format: int


def decode_header(body: bytes) -> RecordingHeader:
    """Read the body of a header frame.

    Raises:
        RecordingError: it is none, or of a later format.
    """
    try:
        found = msgspec.msgpack.decode(body, type=_Format).format
        if found > FORMAT:
            raise RecordingError(
                f"the recording has format {found}; this version of kvwatch reads up to {FORMAT}: use a newer one"
            )
        header = msgspec.msgpack.decode(body, type=RecordingHeader)
    except msgspec.DecodeError as error:
        raise RecordingError(
            f"the recording's header cannot be read ({error}); it is damaged or no recording"
        ) from error
    if fingerprint(header.events) != header.fingerprint:
        raise RecordingError("the recording's header does not fit its own fingerprint; the file is damaged")
    return header
