"""Server-sent events: `data: {json}` and a blank line for each chunk, after its name where it has one."""

from collections.abc import Iterable

import msgspec

from kvwatch_engine.server.protocol.reply import NamedEvent

_SEPARATORS = tuple((each.encode(), b"\\u%04x" % ord(each)) for each in "\x85\u2028\u2029")
"""What JSON leaves as it is and many clients, Python's `splitlines` among them, take for the end of a line."""

_encode = msgspec.json.Encoder().encode


def event(chunk: msgspec.Struct) -> bytes:
    """Return a chunk as an event: one line for every client, whatever its texts hold."""
    name = f"event: {chunk.__struct_config__.tag}\n".encode() if isinstance(chunk, NamedEvent) else b""
    return name + b"data: " + _on_one_line(_encode(chunk)) + b"\n\n"


def joined(chunks: Iterable[msgspec.Struct]) -> bytes:
    """Return chunks as events, one after the other."""
    return b"".join(map(event, chunks))


class TextEvent:
    """Writes events that differ in one text only: everything around it is written once."""

    __slots__ = ("_begin", "_end")

    def __init__(self, chunk: msgspec.Struct, key: str) -> None:
        """Take a chunk in which one field of that name, and no other, is the empty text."""
        # Within a text of JSON there is a backslash before every quotation mark, so that this is found in no text.
        before, found, self._end = event(chunk).partition(f'"{key}":""'.encode())
        assert found, f"no {key} is empty"
        self._begin = before + f'"{key}":'.encode()

    def of(self, text: str) -> bytes:
        """Return the event with `text`: byte for byte that of the same chunk with it."""
        content = _encode(text)
        return b"%b%b%b" % (self._begin, content if text.isascii() else _on_one_line(content), self._end)


def _on_one_line(content: bytes) -> bytes:
    for separator, escaped in _SEPARATORS:
        content = content.replace(separator, escaped)
    return content
