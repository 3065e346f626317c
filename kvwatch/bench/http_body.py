"""Bodies of HTTP/1.1 as they arrive: what of the bytes belongs to the body, and where it ends."""

from typing import Protocol

from kvwatch.bench.errors import RequestFailed

_MAX_LINE_BYTES = 4096
"""A longer line between two chunks is no HTTP."""
_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class Body(Protocol):
    """Finds a body in what arrives."""

    is_over: bool
    """Whether its end has come."""
    ends_with_connection: bool
    """Whether nothing but the end of the connection tells its end."""

    def feed(self, data: bytes) -> bytes:
        """Return what of the next bytes belongs to the body.

        Raises:
            RequestFailed: they are no HTTP.
        """
        ...


class SizedBody:
    """A body whose length was announced."""

    ends_with_connection = False

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self.is_over = num_bytes == 0

    def feed(self, data: bytes) -> bytes:
        """See `Body.feed`."""
        found = data[: self._left]
        if len(found) < len(data):
            raise RequestFailed("protocol", "more came than the length that was announced")
        self._left -= len(found)
        self.is_over = not self._left
        return found


class EndlessBody:
    """A body that ends with its connection."""

    ends_with_connection = True
    is_over = False

    def feed(self, data: bytes) -> bytes:
        """See `Body.feed`."""
        return data


class ChunkedBody:
    """A body in chunks, each after its length."""

    ends_with_connection = False

    def __init__(self) -> None:
        self.is_over = False
        self._rest = b""  # of what stands between the contents of two chunks
        self._left = 0  # bytes that the chunk still has
        self._is_in_chunk = False  # its contents, or the end of the line after them
        self._is_in_trailers = False

    def feed(self, data: bytes) -> bytes:
        """See `Body.feed`."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        found, place = [], 0
        while place < len(data) and not self.is_over:
            if self._left:
                piece = data[place : place + self._left]
                found.append(piece)
                self._left -= len(piece)
                place += len(piece)
                continue
            end = data.find(b"\r\n", place)
            if end < 0:
                self._rest = data[place:]
                break
            self._line(data[place:end])
            place = end + 2
        if len(self._rest) > _MAX_LINE_BYTES or (
            self._is_in_chunk and not self._left and self._rest not in (b"", b"\r")
        ):
            raise RequestFailed("protocol", "a chunk of the answer does not end where it should")
        if place < len(data) and self.is_over:
            raise RequestFailed("protocol", "something came after the end of the answer")
        return found[0] if len(found) == 1 else b"".join(found)

    def _line(self, line: bytes) -> None:
        """Read a line that is not part of any chunk."""
        if self._is_in_trailers:
            self.is_over = not line
        elif self._is_in_chunk:
            if line:
                raise RequestFailed("protocol", "a chunk of the answer does not end where it should")
            self._is_in_chunk = False
        else:
            digits = line.partition(b";")[0].strip(b" \t")
            if not digits or not _DIGITS.issuperset(digits):
                raise RequestFailed("protocol", f"{line[:40]!r} is no length of a chunk")
            self._left = int(digits, 16)
            self._is_in_chunk = self._left > 0
            self._is_in_trailers = not self._is_in_chunk
