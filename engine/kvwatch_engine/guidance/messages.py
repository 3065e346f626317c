"""What the server and the trial process say to each other: MessagePack with four bytes of length before it."""

from typing import Final

import msgspec

from kvwatch_engine.guidance.grammar import GrammarKind

LENGTH_BYTES: Final = 4


class Untried(msgspec.Struct, frozen=True):
    """A grammar to be compiled."""

    kind: GrammarKind
    text: str
    max_terminal_size: int


class Trial(msgspec.Struct, frozen=True):
    """What came of it."""

    compiled: str = ""
    """The grammar in the library's own form."""
    error: str = ""
    """Why it cannot be compiled; empty if it can."""


def packed(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
