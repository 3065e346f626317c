"""What the disk tier asks of the operating system, in one place, so that tests can let any of it fail."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

from kvwatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One entry of a folder."""

    path: Path
    num_bytes: int
    is_plain: bool
    """Whether it is a file, not a link, a folder or a device."""
    used_ns: int
    """When it was last written or marked as used; Unix time in ns."""


class FileSystem:
    """The real one. Any thread; every method may raise OSError."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder with its parents; one that exists is fine."""
        folder.mkdir(parents=True, exist_ok=True)

    def walk(self, folder: Path) -> Iterator[FoundFile]:
        """Yield everything beneath a folder but folders, not following links."""
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from self.walk(Path(entry.path))
                    continue
                status = entry.stat(follow_symlinks=False)
                yield FoundFile(Path(entry.path), status.st_size, stat.S_ISREG(status.st_mode), status.st_mtime_ns)

    def read(self, path: Path, size: int) -> bytes:
        """Return at most the first `size` bytes of a file; a link is an error, and so is what is no plain file."""
        with _open_plain(path, os.O_RDONLY, "rb") as file:
            parts: list[bytes] = []
            while size > 0 and (part := file.read(size)):
                parts.append(part)
                size -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, path: Path, parts: list[bytes | memoryview]) -> None:
        """Write a file anew; what stands there is overwritten, but only if it is a plain file and no link."""
        with _open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb") as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    view = view[file.write(view) or 0 :]

    def rename(self, path: Path, target: Path) -> None:
        """Give a file another name at once; what had that name is gone."""
        path.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is fine."""
        path.unlink(missing_ok=True)

    def mark_used(self, path: Path) -> None:
        """Note that a file was used now."""
        os.utime(path)

    def lock(self, path: Path) -> int:
        """Lock a file for this process until it ends, however it ends; return what `unlock` takes.

        Raises:
            BlockingIOError: another process has it.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def unlock(self, descriptor: int) -> None:
        """Give the lock back."""
        os.close(descriptor)


def _open_plain(path: Path, flags: int, mode: Literal["rb", "wb"]) -> FileIO:
    """Open a plain file. A pipe would never end: whoever made one in the place of a block would stop all transfers."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no plain file")
    return FileIO(descriptor, mode)


def folder_error(folder: Path, error: OSError) -> ConfigError:
    """Return what to tell whoever chose a folder that cannot be used."""
    if isinstance(error, BlockingIOError):
        return ConfigError(f"--disk-dir {folder} is in use by another engine; give each engine a folder of its own")
    return ConfigError(
        f"--disk-dir {folder} cannot be used ({error.strerror}); give a folder that this user may write to"
    )
