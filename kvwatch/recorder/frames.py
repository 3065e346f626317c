"""Frames: what recordings and flight rings consist of. A header of fixed size, then a body, compressed if that pays.

Owns the layout, the checksum and the limits; does not know what a body means. All integers are little-endian:

    offset  size  what
         0     4  "KVWF"
         4     1  kind (`FrameKind`)
         5     1  codec of the body (`Codec`)
         6     2  0
         8     8  number: 0, 1, 2, ... within one file or ring
        16     4  bytes of the body as it is stored
        20     4  bytes of the body when decompressed
        24    48  span: first seq, end seq, first step, last step, first time, last time (signed, times in ns)
        72     4  CRC-32 of everything before and of the stored body
        76        the body
"""

import struct
import zlib
from enum import IntEnum

import msgspec
import zstandard

from kvwatch.errors import RecordingError

MAGIC = b"KVWF"
MAX_BODY_BYTES = 128 * 2**20
"""Largest body, stored or decompressed: the state of three million blocks. Bounds what a hostile file can cost."""

_HEADER = struct.Struct("<4sBBHQII6q")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_WORTH_COMPRESSING = 256


class FrameKind(IntEnum):
    """What a body is."""

    HEADER = 1
    """What the recording says of itself; the first frame."""
    STATE = 2
    """The engine's state (`EngineSnapshot`) before event `first_seq`."""
    EVENTS = 3
    """Events from `first_seq` to before `end_seq`."""
    GAP = 4
    """Nothing is known of the events from `first_seq` to before `end_seq`; no body."""
    INDEX = 5
    """Where the other frames are; the last frame of a file that was closed in order."""


class Codec(IntEnum):
    """How a body is stored."""

    PLAIN = 0
    ZSTD = 1


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Which events a frame is about."""

    first_seq: int = 0
    end_seq: int = 0
    """One past the last event."""
    first_step: int = 0
    last_step: int = 0
    first_ns: int = 0
    """Monotonic time of the first event in ns."""
    last_ns: int = 0

    @property
    def num_events(self) -> int:
        """Number of events."""
        return self.end_seq - self.first_seq

    def joined(self, later: "Span") -> "Span":
        """Return the span of this and the frame that follows it."""
        return Span(
            self.first_seq, later.end_seq, self.first_step, later.last_step, self.first_ns, later.last_ns
        )  # fmt: skip


class FrameInfo(msgspec.Struct, frozen=True):
    """What a frame's header says."""

    kind: FrameKind
    codec: Codec
    number: int
    body_bytes: int
    raw_bytes: int
    span: Span

    @property
    def size(self) -> int:
        """Bytes of header and stored body."""
        return HEADER_BYTES + self.body_bytes


class FramePacker:
    """Makes numbered frames. One thread at a time."""

    def __init__(self, level: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level)
        self.next_number = 0

    def pack(self, kind: FrameKind, raw: bytes, span: Span) -> bytes:
        """Return the next frame.

        Raises:
            RecordingError: the body is larger than the format allows.
        """
        if len(raw) > MAX_BODY_BYTES:
            raise RecordingError(
                f"a frame of {len(raw)} bytes is more than the {MAX_BODY_BYTES} that a recording may hold; "
                "the pool is too large to be recorded"
            )
        codec, body = Codec.PLAIN, raw
        if len(raw) >= _WORTH_COMPRESSING:
            packed = self._compressor.compress(raw)
            if len(packed) < len(raw):
                codec, body = Codec.ZSTD, packed
        head = _HEADER.pack(
            MAGIC, kind, codec, 0, self.next_number, len(body), len(raw), *msgspec.structs.astuple(span)
        )
        self.next_number += 1
        checksum = zlib.crc32(body, zlib.crc32(head))
        return b"".join((head, _CHECKSUM.pack(checksum), body))


def read_info(head: bytes) -> FrameInfo | None:
    """Return what `HEADER_BYTES` bytes say, or None when they are no frame's header. Does not check the checksum."""
    if len(head) < HEADER_BYTES or head[:4] != MAGIC:
        return None
    _, kind, codec, _, number, body_bytes, raw_bytes, *span = _HEADER.unpack_from(head)
    if kind not in _KINDS or codec not in _CODECS or max(body_bytes, raw_bytes) > MAX_BODY_BYTES:
        return None
    return FrameInfo(FrameKind(kind), Codec(codec), number, body_bytes, raw_bytes, Span(*span))


def is_whole(frame: bytes, info: FrameInfo) -> bool:
    """Whether a frame's bytes are those that were written."""
    if len(frame) != info.size:
        return False
    checksum: int = _CHECKSUM.unpack_from(frame, _HEADER.size)[0]
    return checksum == zlib.crc32(memoryview(frame)[HEADER_BYTES:], zlib.crc32(memoryview(frame)[: _HEADER.size]))


def open_body(frame: bytes, info: FrameInfo) -> bytes:
    """Return the decompressed body. Takes at most `MAX_BODY_BYTES` of memory.

    Raises:
        RecordingError: the frame is damaged.
    """
    where = f"frame {info.number} (events {info.span.first_seq} to {info.span.end_seq})"
    if not is_whole(frame, info):
        raise RecordingError(f"{where} is damaged: its checksum does not fit; what lies before it can be replayed")
    body = frame[HEADER_BYTES:]
    if info.codec is Codec.ZSTD:
        try:
            # The size is checked first: the decompressor allocates whatever the body claims.
            if zstandard.frame_content_size(body) != info.raw_bytes:
                raise RecordingError(f"{where} is damaged: its body does not have the size that its header says")
            body = zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise RecordingError(f"{where} is damaged: it cannot be decompressed ({error})") from error
    if len(body) != info.raw_bytes:
        raise RecordingError(f"{where} is damaged: its body does not have the size that its header says")
    return body


_KINDS = frozenset(FrameKind)
_CODECS = frozenset(Codec)
