"""What the server and the trial process say to each other: MessagePack with four bytes of length before it."""

import time
from dataclasses import dataclass
from socket import socket
from struct import Struct
from typing import Final

import msgspec

from kvwatch_engine.guidance.grammar import GrammarKind

_LENGTH_BYTES: Final = 4
_ALLOWANCE: Final = Struct("<dd")
ALLOWANCE_BYTES: Final = _ALLOWANCE.size
"""Length of a packed `Allowance`."""


class Untried(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar to be compiled, and what that may take."""

    kind: GrammarKind
    text: str
    max_terminal_size: int
    spare_bytes: int
    """Memory beside that of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The time that compiling a grammar may take; it brings the socket along through which the grammar comes."""

    seconds: float
    cpu_seconds: float
    """Time of a processor, however long that takes."""

    def pack(self) -> bytes:
        """Return it in `ALLOWANCE_BYTES`."""
        return _ALLOWANCE.pack(self.seconds, self.cpu_seconds)

    @classmethod
    def unpack(cls, packed: bytes) -> "Allowance":
        """Return what was packed."""
        return cls(*_ALLOWANCE.unpack(packed))


class Trial(msgspec.Struct, frozen=True):
    """What came of it."""

    compiled: str = ""
    """The grammar in the library's own form."""
    error: str = ""
    """Why it cannot be compiled; empty if it can."""
    ended_by: int | None = None
    """Signal that ended the process which compiled it; 0 if it ended by itself without an answer."""


class Silence(Exception):
    """The other side has ended before it said anything."""


def send_message(connection: socket, message: msgspec.Struct) -> None:
    """Send a message.

    Raises:
        OSError: nobody takes it, or not in the time that the socket has for it.
    """
    body = msgspec.msgpack.encode(message)
    connection.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def receive_message(connection: socket, deadline: float | None = None) -> bytes:
    """Return the body of the next message.

    Args:
        connection: where it comes from.
        deadline: monotonic time in seconds; none waits for ever.

    Raises:
        TimeoutError: it did not come in time.
        Silence: it will not come.
    """
    length = int.from_bytes(_receive(connection, _LENGTH_BYTES, deadline), "little")
    return _receive(connection, length, deadline)


def _receive(connection: socket, num_bytes: int, deadline: float | None) -> bytes:
    pieces: list[bytes] = []
    while num_bytes > 0:
        if deadline is not None:
            # 0 would mean to wait for nothing at all.
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        piece = connection.recv(num_bytes)
        if not piece:
            raise Silence
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
