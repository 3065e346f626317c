"""Server-sent events, as far as OpenAI's API uses them: the `data` of each event."""

import re

from kvwatch.bench.errors import RequestFailed

MAX_EVENT_BYTES = 4 * 2**20
"""A longer line or event is a defect of the server: the load generator does not fill its memory with it."""

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the very end may be half of a CR LF


class EventReader:
    """Splits a stream of bytes, cut anywhere, into the data of its events. Comments and other fields are skipped."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._begin: list[bytes] = []  # of a line that has not ended; joined once, however many pieces it takes
        self._begin_size = 0
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that `piece` completes.

        Raises:
            RequestFailed: a line or an event is too long.
        """
        if not (self._begin_size or self._data) and (whole := self._whole_events(piece)) is not None:
            return whole
        events: list[bytes] = []
        for line in self._lines(piece):
            if not line:
                events += self._flush()
            elif line.startswith(b"data:"):
                data = line[5:]
                self._data.append(data.removeprefix(b" "))
                self._size += len(data)
        if max(self._begin_size, self._size) > self._max_event_bytes:
            raise RequestFailed("too_long", f"an event of the stream is longer than {self._max_event_bytes} bytes")
        return events

    def end(self) -> list[bytes]:
        """Return the last event if the stream ended without the blank line after it."""
        return self.feed(b"\n\n") if self._begin_size or self._data else []

    def _whole_events(self, piece: bytes) -> list[bytes] | None:
        """Return the data of a piece that is whole events of one line each, as almost all are; else none."""
        if not (piece.startswith(b"data:") and piece.endswith(b"\n\n")) or b"\r" in piece:
            return None
        events = piece[5:-2].split(b"\n\ndata:")
        if piece.count(b"\n") != 2 * len(events) or len(piece) > self._max_event_bytes:
            return None
        return [data.removeprefix(b" ") for data in events]

    def _lines(self, piece: bytes) -> list[bytes]:
        """Return the lines that `piece` completes."""
        self._begin.append(piece)
        self._begin_size += len(piece)
        has_end = b"\n" in piece or b"\r" in piece or (len(self._begin) > 1 and self._begin[-2].endswith(b"\r"))
        if not has_end:
            return []
        *lines, rest = _LINE_END.split(b"".join(self._begin))
        self._begin, self._begin_size = [rest], len(rest)
        return lines

    def _flush(self) -> list[bytes]:
        data, self._data, self._size = self._data, [], 0
        return [b"\n".join(data)] if data else []
