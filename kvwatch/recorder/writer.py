r"""One recording file, and the folder that holds several within a limit.

Owns names, layout of a file, the index at its end and the removal of old files. Does not know what frames mean.

    "KVWREC1\n", header frame, frames ..., index frame, trailer: offset of the index frame (8 bytes), "KVWEND1\n"

A file that ends without index and trailer is read up to its last whole frame.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog

from kvwatch.recorder.frames import FrameKind, FramePacker, Span
from kvwatch.recorder.header import RecordingHeader, encode_header

FILE_MAGIC = b"KVWREC1\n"
TRAILER_MAGIC = b"KVWEND1\n"
SUFFIX = ".kvrec"
UNFINISHED_SUFFIX = ".part"
"""Added to the name of a file that nobody could read yet."""
FILE_LEVEL = 3
"""Compression of files; they are written by a thread of their own."""

CLOCK_SLACK_NS = 60 * 10**9
"""How far clocks of machines that share a folder may differ."""

_OFFSET_BYTES = 8

logger = structlog.get_logger(__name__)


class IndexEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one frame is and what it is about."""

    offset: int
    kind: int
    span: Span


class RecordingWriter:
    """Writes one new file. One thread at a time. Every method may raise `OSError`; then call `abandon`.

    The file is readable by its owner only: it names requests and tenants. It gets its name when its header is there,
    or only when it is finished, so that a process that is killed leaves no file that says nothing.

    Args:
        path: Of the file; there may be none of that name.
        header: What it says of itself.
        is_shown_when_finished: Whether it gets its name in `finish` instead of at once.
    """

    def __init__(self, path: Path, header: RecordingHeader, *, is_shown_when_finished: bool = False) -> None:
        self.path = path
        self._written_as = path.with_name(path.name + UNFINISHED_SUFFIX)
        self.size = 0
        """Bytes of whole frames written so far."""
        self._index: list[IndexEntry] = []
        self._packer = FramePacker(FILE_LEVEL)
        if path.exists():
            raise FileExistsError(errno.EEXIST, "there is a file of that name", str(path))
        self._fd = os.open(self._written_as, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says that somebody writes it
            self._write(FILE_MAGIC)
            self.append(FrameKind.HEADER, encode_header(header), Span())
            if not is_shown_when_finished:
                self._show()
        except OSError:
            self.abandon()
            self._written_as.unlink(missing_ok=True)
            raise

    def append(self, kind: FrameKind, raw: bytes, span: Span) -> None:
        """Write one frame."""
        if os.fstat(self._fd).st_nlink == 0:  # what is written to a removed file is lost without a word
            raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self.path))
        entry = IndexEntry(self.size, kind, span)
        self._write(self._packer.pack(kind, raw, span))
        self._index.append(entry)

    def finish(self) -> None:
        """Write index and trailer, and close."""
        offset = self.size
        self._write(self._packer.pack(FrameKind.INDEX, msgspec.msgpack.encode(self._index), Span()))
        self._write(offset.to_bytes(_OFFSET_BYTES, "little") + TRAILER_MAGIC)
        self._show()
        self._close()

    def abandon(self) -> None:
        """Close after an error; what was written last and not wholly is cut off. Never raises, safe twice.

        A file that has no name yet is removed.
        """
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
            with contextlib.suppress(OSError):
                self._close()
        if self._written_as != self.path:
            with contextlib.suppress(OSError):
                self._written_as.unlink(missing_ok=True)

    def _show(self) -> None:
        """Give the file its name. Safe twice."""
        if self._written_as != self.path:
            os.rename(self._written_as, self.path)
            self._written_as = self.path

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self.size += len(data)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


class RecordingFolder:
    """Files of one engine in one folder: their names, and how many may stay. One thread at a time.

    Args:
        folder: Made when the first file is.
        stem: Begin of every name; names one engine, since only files with this stem are ever removed.
        total_bytes: Most bytes that all files together may take.
    """

    def __init__(self, folder: Path, stem: str, total_bytes: int) -> None:
        self.folder = folder
        self._stem = safe_name(stem)
        self._total_bytes = total_bytes
        self._num_named = 0

    def new_path(self, note: str = "") -> Path:
        """Return a name that no file has yet; names sort by the time at which they were given."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._num_named += 1
        parts = [self._stem, stamp, str(os.getpid()), f"{self._num_named:06}", *([safe_name(note)] if note else [])]
        return self.folder / ("-".join(parts) + SUFFIX)

    def make_room(self, needed_bytes: int) -> None:
        """Remove the oldest files until `needed_bytes` more are within the limit. A file that is written to stays.

        What has a time that is still to come was written before the clock was put back: it is older than the rest.
        """
        now_ns = time.time_ns() + CLOCK_SLACK_NS
        found = sorted(self._files(), key=lambda it: (it[1].st_mtime_ns <= now_ns, it[1].st_mtime_ns, it[0].name))
        # What a killed process did not finish says nothing; what another one writes is locked and stays.
        files = [(path, stat) for path, stat in found if not (path.name.endswith(UNFINISHED_SUFFIX) and _remove(path))]
        total = sum(stat.st_size for _, stat in files) + needed_bytes
        for path, stat in files:
            if total <= self._total_bytes:
                return
            if _remove(path):
                total -= stat.st_size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        if not self.folder.is_dir():
            return
        suffix = f"{re.escape(SUFFIX)}({re.escape(UNFINISHED_SUFFIX)})?"
        pattern = re.compile(re.escape(self._stem) + r"-\d{8}T\d{6}Z-\d+-\d{6}.*" + suffix)
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if pattern.fullmatch(path.name) and not path.is_symlink():
                    yield path, path.stat()


def safe_name(text: str) -> str:
    """Return `text` with everything replaced that has a meaning in paths; never empty, at most 64 characters."""
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text)[:64].lstrip(".") or "_"


def _remove(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("an old recording cannot be removed", file=path.name, error=error.strerror)
        return False
    return True
