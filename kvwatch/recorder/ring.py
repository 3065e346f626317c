"""The flight recorder's file: a ring of frames in the kernel's page cache, which stays when the process is killed.

Owns its layout, its recovery, and the names of rings. Does not know what frames mean.

    0      "KVWRING1", then area offset, area bytes, bytes of the header frame (8 bytes each), CRC-32 of these
    4096   header frame
    area   frames, each at a multiple of `ALIGNMENT`; at the end it goes on at the begin of the area

A frame is written over the oldest ones. Nothing says where the newest is: frames carry numbers and checksums, so the
reader looks for all that are whole and takes the longest unbroken sequence of numbers that ends with the highest. A
frame that was being written when the process died, and one that is half overwritten, do not have their checksum.

What is in the ring outlives the process, not the machine: the kernel writes it to disk when it likes.

Frames are put there by `pwrite`, not through a mapping of our own: whoever cut the file short, as a rotation of logs
does, would have the next access to the mapping end the process (SIGBUS), and serving with it.
"""

import contextlib
import fcntl
import os
import re
import struct
import time
import zlib
from pathlib import Path

import msgspec

from kvwatch.errors import RecordingError
from kvwatch.recorder.frames import HEADER_BYTES, MAGIC, FrameInfo, FrameKind, FramePacker, Span, is_whole, read_info
from kvwatch.recorder.header import RecordingHeader, encode_header
from kvwatch.recorder.writer import CLOCK_SLACK_NS, safe_name

RING_MAGIC = b"KVWRING1"
RING_SUFFIX = ".kvring"
RING_LEVEL = 1
"""Compression in the ring: quick, since it is done on the observatory's thread."""

MAX_RING_BYTES = 2**30
ALIGNMENT = 16
KEPT_RINGS = 4
"""Rings of earlier runs that stay in the folder."""

_PAGE = 4096
_SUPERBLOCK = struct.Struct("<8sQQQ")
_CHECKSUM = struct.Struct("<I")


class Slot(msgspec.Struct, frozen=True):
    """One frame in a ring's image."""

    offset: int
    info: FrameInfo


class FlightRing:
    """Writes one ring. One thread at a time.

    Args:
        path: A file that does not exist yet; readable by its owner only.
        num_bytes: Size of the area for frames. All of it is taken from the disk at once: a disk that fills up later
            does not end the recording.
        header: What the ring says of itself.

    Raises:
        OSError: there is no room, or the file cannot be made.
    """

    def __init__(self, path: Path, num_bytes: int, header: RecordingHeader) -> None:
        self.path = path
        self.area_bytes = num_bytes // _PAGE * _PAGE
        self._packer = FramePacker(RING_LEVEL)
        head = self._packer.pack(FrameKind.HEADER, encode_header(header), Span())
        self._area_offset = _PAGE + -(-len(head) // _PAGE) * _PAGE
        self._position = 0
        self.end_seq: int | None = None
        """Number of the event that comes next; none before the first frame."""
        self._size = size = self._area_offset + self.area_bytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says that the ring is in use
            os.posix_fallocate(fd, 0, size)
            block = _SUPERBLOCK.pack(RING_MAGIC, self._area_offset, self.area_bytes, len(head))
            block += _CHECKSUM.pack(zlib.crc32(block))
            self._begin = block + bytes(_PAGE - len(block)) + head
            _write_at(fd, self._begin, 0)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._fd = fd

    def write(self, kind: FrameKind, raw: bytes, span: Span) -> int:
        """Write a frame over the oldest ones; return its size, or 0 when it is too large for a ring of this size.

        What is larger than a third of the ring is too large: little would be left beside it.

        Raises:
            OSError: the disk refused; only after somebody else changed the file, or when the disk is broken.
        """
        number = self._packer.next_number
        try:
            frame = self._packer.pack(kind, raw, span)
        except RecordingError:
            return 0
        if len(frame) > self.area_bytes // 3:
            self._packer.next_number = number
            return 0
        if self._position + len(frame) > self.area_bytes:
            self._position = 0
        _write_at(self._fd, frame, self._area_offset + self._position)
        self._position += -(-len(frame) // ALIGNMENT) * ALIGNMENT
        self.end_seq = span.end_seq
        return len(frame)

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more, so that nobody will find it."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def is_spoiled(self) -> bool:
        """Whether somebody cut the file short, or wrote over its begin: nobody could read it.

        Raises:
            OSError: it cannot be looked at.
        """
        is_cut = os.fstat(self._fd).st_size < self._size
        return is_cut or os.pread(self._fd, len(self._begin), 0) != self._begin

    def image(self) -> bytes:
        """Return a copy of the whole file.

        Raises:
            OSError: it cannot be read.
        """
        return os.pread(self._fd, self._size, 0)

    def close(self) -> None:
        """Leave the file as it is. Safe twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _write_at(fd: int, content: bytes, offset: int) -> None:
    rest = memoryview(content)
    while rest:
        num_written = os.pwrite(fd, rest, offset)
        rest, offset = rest[num_written:], offset + num_written


def is_ring(head: bytes) -> bool:
    """Whether a file that begins so is a ring."""
    return head.startswith(RING_MAGIC)


def read_ring(image: bytes) -> tuple[Slot, list[Slot]]:
    """Return the header frame and the retained frames of a ring, oldest first.

    Raises:
        RecordingError: it is no ring, or its header is damaged.
    """
    if len(image) < _PAGE:
        raise RecordingError("the flight recorder's file is cut short; nothing of it can be read")
    magic, area_offset, area_bytes, header_bytes = _SUPERBLOCK.unpack_from(image)
    (checksum,) = _CHECKSUM.unpack_from(image, _SUPERBLOCK.size)
    if magic != RING_MAGIC or checksum != zlib.crc32(image[: _SUPERBLOCK.size]):
        raise RecordingError("the flight recorder's file was not completely made, or its begin is damaged")
    head = _whole_frame_at(image, _PAGE, _PAGE + header_bytes)
    if head is None or head.kind is not FrameKind.HEADER:
        raise RecordingError("the flight recorder's header is damaged; its events cannot be understood without it")
    slots = _find_frames(image, area_offset, area_offset + area_bytes)
    slots.sort(key=lambda slot: slot.info.number)
    first = len(slots)
    while first and (first == len(slots) or slots[first - 1].info.number == slots[first].info.number - 1):
        first -= 1
    return Slot(_PAGE, head), slots[first:]


def _find_frames(image: bytes, start: int, end: int) -> list[Slot]:
    found: list[Slot] = []
    position = start
    while (position := image.find(MAGIC, position, end)) >= 0:
        info = _whole_frame_at(image, position, end) if (position - start) % ALIGNMENT == 0 else None
        if info is None:
            position += 1
        else:
            found.append(Slot(position, info))
            position += info.size
    return found


def _whole_frame_at(image: bytes, start: int, end: int) -> FrameInfo | None:
    info = read_info(image[start : start + HEADER_BYTES])
    if info is None or start + info.size > min(end, len(image)):
        return None
    return info if is_whole(image[start : start + info.size], info) else None


def ring_path(folder: Path, stem: str) -> Path:
    """Return a name for a new ring; names sort by the time at which they were given."""
    now_ns = time.time_ns()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 10**9))
    return folder / f"{safe_name(stem)}-{stamp}.{now_ns % 10**9 // 1000:06}Z-{os.getpid()}{RING_SUFFIX}"


def remove_old_rings(folder: Path, stem: str, kept: int = KEPT_RINGS) -> None:
    """Remove rings of ended processes with this stem, but for the newest `kept`. Never raises.

    A name with a time that is still to come was given before the clock was put back: that ring is older than the rest.
    """
    pattern = re.compile(re.escape(safe_name(stem)) + r"-(\d{8}T\d{6})\.\d{6}Z-\d+" + re.escape(RING_SUFFIX))
    now = time.strftime("%Y%m%dT%H%M%S", time.gmtime((time.time_ns() + CLOCK_SLACK_NS) // 10**9))
    with contextlib.suppress(OSError):
        found = [
            (named[1] <= now, path)
            for path in folder.iterdir()
            if (named := pattern.fullmatch(path.name)) and not path.is_symlink()
        ]
        for _, path in sorted(found, reverse=True)[kept:]:
            _remove_if_unused(path)


def _remove_if_unused(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
        path.unlink()
