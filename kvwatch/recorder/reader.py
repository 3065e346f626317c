"""Opens a recording, a dump, or a flight recorder's ring: whole, still being written, cut short or damaged.

Owns where frames are and what their bodies mean; does not know the ledger. Whatever a file holds, at most one frame of
it is in memory (of a ring: its image, at most `MAX_RING_BYTES`), and what is wrong with it is a `RecordingError`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from kvwatch.errors import RecordingError
from kvwatch.recorder.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    FrameInfo,
    FrameKind,
    Span,
    is_whole,
    open_body,
    read_info,
)
from kvwatch.recorder.header import RecordingHeader, decode_header
from kvwatch.recorder.ring import MAX_RING_BYTES, is_ring, read_ring
from kvwatch.recorder.schema import EventDecoder
from kvwatch.recorder.writer import FILE_MAGIC, TRAILER_MAGIC, IndexEntry
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

_TRAILER_BYTES = 8 + len(TRAILER_MAGIC)
_ENTRY_BYTES = 80
"""An entry of the index takes less."""
_MAX_HEADER_BYTES = 4 * 2**20
_DATA_KINDS = frozenset({FrameKind.STATE, FrameKind.EVENTS, FrameKind.GAP})


class Gap(msgspec.Struct, frozen=True):
    """Events of which nothing is known."""

    first_seq: int
    end_seq: int
    """One past the last of them."""


Item = EngineSnapshot | Gap | list[Event]
"""What a frame holds."""


class Frame(msgspec.Struct, frozen=True):
    """A frame of a recording."""

    offset: int
    kind: FrameKind
    span: Span


class _Bytes(Protocol):
    """Where frames are read from."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return at most `num_bytes`; fewer at the end."""
        ...


class _FileBytes:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self._file.fileno(), num_bytes, offset)


class _MemoryBytes:
    def __init__(self, image: bytes) -> None:
        self._image = image
        self.size = len(image)

    def read(self, offset: int, num_bytes: int) -> bytes:
        return self._image[offset : offset + num_bytes]


class Recording:
    """One opened recording. Use as a context manager, or close it. One thread at a time.

    Raises:
        RecordingError: the file cannot be read, is none of ours, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecordingError(
                f"{path} cannot be read ({error.strerror}); give a {'.kvrec or .kvring'} file"
            ) from error
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        self._bytes: _Bytes = _FileBytes(self._file)
        magic = self._bytes.read(0, len(FILE_MAGIC))
        self.is_ring = is_ring(magic)
        """Whether it is a flight recorder's ring."""
        self.is_complete = False
        """Whether it was closed in order; a ring never is."""
        self.lost_bytes = 0
        """Bytes at the end that are no whole frames."""
        if self.is_ring:
            head, frames = self._open_ring()
        elif magic == FILE_MAGIC:
            head, frames = self._open_file()
        else:
            raise RecordingError(f"{self.path} is no recording: give a .kvrec or .kvring file that kvwatch wrote")
        self.header: RecordingHeader = decode_header(self._body(head, _MAX_HEADER_BYTES))
        self.frames: list[Frame] = [frame for frame in frames if frame.kind in _DATA_KINDS]
        """States, events and gaps, in order."""
        self._decoder = EventDecoder(self.header.events)

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def span(self) -> Span | None:
        """From the first frame to the last; none when there is none."""
        return self.frames[0].span.joined(self.frames[-1].span) if self.frames else None

    def read(self, frame: Frame) -> Item:
        """Return what a frame holds.

        Raises:
            RecordingError: it is damaged.
        """
        if frame.kind is FrameKind.GAP:
            return Gap(frame.span.first_seq, frame.span.end_seq)
        body = self._body(frame)
        if frame.kind is FrameKind.EVENTS:
            return self._decoder.decode(body)
        try:
            return msgspec.msgpack.decode(body, type=EngineSnapshot)
        except msgspec.DecodeError as error:
            raise RecordingError(f"the state before event {frame.span.first_seq} is damaged ({error})") from error

    def items(self, first: int = 0) -> Iterator[Item]:
        """Return what the frames hold from number `first` on, in order.

        Raises:
            RecordingError: a frame is damaged.
        """
        for frame in self.frames[first:]:
            yield self.read(frame)

    # ------------------------------------------------------------ finding frames

    def _open_ring(self) -> tuple[Frame, list[Frame]]:
        if self._bytes.size > MAX_RING_BYTES:
            raise RecordingError(f"{self.path} has {self._bytes.size} bytes; a ring has at most {MAX_RING_BYTES}")
        # A copy: the process that writes the ring may still live.
        image = self._bytes.read(0, self._bytes.size)
        self._bytes = _MemoryBytes(image)
        head, slots = read_ring(image)
        frames = [Frame(slot.offset, slot.info.kind, slot.info.span) for slot in slots]
        return Frame(head.offset, head.info.kind, head.info.span), frames

    def _open_file(self) -> tuple[Frame, list[Frame]]:
        frames = self._read_index()
        self.is_complete = frames is not None
        if frames is None:
            frames = list(self._scan())
        if not frames or frames[0].kind is not FrameKind.HEADER:
            raise RecordingError(f"{self.path} has no readable header; it was cut off at its very begin or is damaged")
        return frames[0], frames

    def _read_index(self) -> list[Frame] | None:
        """Return the frames that the index names, or None when there is no sound one."""
        size = self._bytes.size
        trailer = self._bytes.read(max(0, size - _TRAILER_BYTES), _TRAILER_BYTES)
        if len(trailer) < _TRAILER_BYTES or not trailer.endswith(TRAILER_MAGIC):
            return None
        offset = int.from_bytes(trailer[:8], "little")
        info = self._info_at(offset)
        if info is None or info.kind is not FrameKind.INDEX or offset + info.size + _TRAILER_BYTES != size:
            return None
        if info.raw_bytes > _ENTRY_BYTES * (size // HEADER_BYTES):  # more entries than frames that fit the file
            return None
        try:
            body = open_body(self._bytes.read(offset, info.size), info)
            entries = msgspec.msgpack.decode(body, type=list[IndexEntry])
            frames = [Frame(entry.offset, FrameKind(entry.kind), entry.span) for entry in entries]
        except (RecordingError, ValueError, msgspec.DecodeError):
            return None
        offsets = [frame.offset for frame in frames]
        is_sound = offsets == sorted(set(offsets)) and all(0 <= each < offset for each in offsets)
        return frames if is_sound else None

    def _scan(self) -> Iterator[Frame]:
        """Find frames one after the other, up to the first that is not whole."""
        offset = len(FILE_MAGIC)
        while (info := self._info_at(offset)) is not None and is_whole(self._bytes.read(offset, info.size), info):
            yield Frame(offset, info.kind, info.span)
            offset += info.size
        self.lost_bytes = self._bytes.size - offset

    def _info_at(self, offset: int) -> FrameInfo | None:
        if not 0 <= offset < self._bytes.size:
            return None
        info = read_info(self._bytes.read(offset, HEADER_BYTES))
        return info if info is not None and offset + info.size <= self._bytes.size else None

    def _body(self, frame: Frame, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        info = self._info_at(frame.offset)
        if info is None or (info.kind, info.span) != (frame.kind, frame.span) or info.raw_bytes > max_bytes:
            raise RecordingError(
                f"the frame at byte {frame.offset} of {self.path} is damaged; what lies before it can be replayed"
            )
        return open_body(self._bytes.read(frame.offset, info.size), info)
