"""The folder of the disk tier: one file for each block, named by its hash.

    <folder>/kvwatch.lock             held while an engine uses the folder
    <folder>/incoming/<hash>.part     being written
    <folder>/blocks/<ab>/<hash>.kvb   whole: it was renamed to this name

One file a block, not segments: a block is large (tens of kilobytes and more), is evicted alone, and a rename makes it
appear whole or not at all, so that a killed process leaves nothing that needs repair. Nothing is flushed to the
device: after a power failure a file may be short or hold zeros, and its checksum says so.

Nothing in the folder is trusted. A file that is not ours is left alone; one of ours that is of no use is removed.
"""

import contextlib
import errno
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import structlog

from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.tiers.block_file import (
    HEADER_BYTES,
    StoreIdentity,
    is_intact,
    is_unfinished,
    make_header,
    read_header,
)
from kvwatch_engine.memory.tiers.file_system import FileSystem, FoundFile, folder_error
from kvwatch_engine.memory.tiers.stores import Bytes, TransferError

_NAME: Final = re.compile(r"[0-9a-f]{64}\.kvb")
_PART_NAME: Final = re.compile(r"[0-9a-f]{64}\.part")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

logger = structlog.get_logger(__name__)


class BlockFolder:
    """Blocks in files; a `BlockStore` whose keys are block hashes.

    `open` and `close` belong to the engine thread, before and after a worker uses the rest.
    """

    def __init__(self, folder: Path, identity: StoreIdentity, block_bytes: int, files: FileSystem) -> None:
        self._folder = folder
        self._identity = identity.encode()
        self._block_bytes = block_bytes
        self._files = files
        self._lock: int | None = None
        self.occupied: set[BlockHash] = set()
        """Blocks whose name a file has that is not ours: they cannot be written."""
        self.ignored: Counter[str] = Counter()
        """Files that were of no use when the folder was opened, by why."""

    @property
    def file_bytes(self) -> int:
        """Bytes of one file."""
        return HEADER_BYTES + self._block_bytes

    def open(self) -> list[BlockHash]:
        """Make the folder if need be, lock it, and return the blocks in it, least recently used first.

        Raises:
            ConfigError: it cannot be used, or another engine uses it.
        """
        try:
            for name in ("incoming", "blocks"):
                self._files.make_folder(self._folder / name)
            self._lock = self._files.lock(self._lock_path)
            for found in self._files.walk(self._folder / "incoming"):
                self._clean_up(found)
            blocks = [block for found in self._files.walk(self._folder / "blocks") if (block := self._look_at(found))]
        except OSError as error:
            self.close()
            raise folder_error(self._folder, error) from error
        if self.ignored:
            logger.warning("files in the disk tier were ignored", **self.ignored)
        return [content for _, content in sorted(blocks)]

    def close(self) -> None:
        """Let another engine use the folder; safe to call twice."""
        if self._lock is not None:
            self._files.unlock(self._lock)
            self._lock = None

    def read(self, keys: Sequence[BlockHash], out: Bytes) -> None:
        """Copy blocks to `out`, each only after its checksum was found right; a defective file is removed."""
        for place, content in enumerate(keys):
            path = self._path(content)
            try:
                whole = self._files.read(path, self.file_bytes + 1)
            except FileNotFoundError as error:
                raise TransferError("missing", place, error) from error
            except OSError as error:
                raise TransferError("disk_read", place, error) from error
            if not self._holds(content, whole):
                self._remove_quietly(path)
                raise TransferError("corrupt", place)
            out[place] = np.frombuffer(whole, np.uint8, self._block_bytes, HEADER_BYTES)
            self._mark_used(path)

    def write(self, keys: Sequence[BlockHash], data: Bytes) -> None:
        """Write blocks, each under a temporary name first."""
        for place, content in enumerate(keys):
            try:
                self._write(content, data[place])
            except OSError as error:
                self._remove_quietly(self._part(content))
                reason = "disk_full" if error.errno in _FULL else "disk_write"
                raise TransferError(reason, place, error) from error

    def remove(self, content: BlockHash) -> None:
        """Remove a block's file. One that cannot be removed is found again when the folder is next opened."""
        self._remove_quietly(self._path(content))

    # ------------------------------------------------------------------ parts

    def _write(self, content: BlockHash, data: Bytes) -> None:
        if self._lock is None:
            raise OSError(errno.ENOLCK, "the folder is not ours")
        part, path = self._part(content), self._path(content)
        view = np.ascontiguousarray(data).data
        parts: list[bytes | memoryview] = [make_header(content, self._identity, view), view]
        try:
            self._files.write(part, parts)
        except FileNotFoundError:
            # A cleaner took the empty subfolder. Without our lock it is the whole folder, or a disk, that has gone.
            if not self._lock_path.exists():
                raise
            self._files.make_folder(part.parent)
            self._files.write(part, parts)
        try:
            self._files.rename(part, path)
        except FileNotFoundError:  # the first block of its subfolder
            self._files.make_folder(path.parent)
            self._files.rename(part, path)

    def _holds(self, content: BlockHash, whole: bytes) -> bool:
        if len(whole) != self.file_bytes:
            return False
        header = read_header(whole)
        return (
            header is not None
            and header.content == content
            and header.identity == self._identity
            and header.num_bytes == self._block_bytes
            and is_intact(whole[:HEADER_BYTES], memoryview(whole)[HEADER_BYTES:])
        )

    def _look_at(self, found: FoundFile) -> tuple[int, BlockHash] | None:
        """Return when a block was last used and its hash; none, counting why, if the file is of no use."""
        head = self._head_of(found)
        header = read_header(head) if head is not None else None
        if header is None or self._path(header.content) != found.path:
            self._pass_over(found, is_torn=head is not None and is_unfinished(head))
            return None
        if found.num_bytes != HEADER_BYTES + header.num_bytes:
            why = "torn"
        elif header.identity != self._identity or header.num_bytes != self._block_bytes:
            why = "stale"
        else:
            return found.used_ns, header.content
        self.ignored[why] += 1
        self._remove_quietly(found.path)
        return None

    def _head_of(self, found: FoundFile) -> bytes | None:
        """Return the first bytes of a file that has a name as ours have; none if it is none or cannot be read."""
        if not found.is_plain or not _NAME.fullmatch(found.path.name):
            return None
        try:
            return self._files.read(found.path, HEADER_BYTES)
        except OSError:
            return None

    def _pass_over(self, found: FoundFile, *, is_torn: bool) -> None:
        """Count a file without a header of ours, and remove it if a power failure may have made ours into that."""
        self.ignored["torn" if is_torn else "foreign"] += 1
        if is_torn:
            self._remove_quietly(found.path)
        elif _NAME.fullmatch(found.path.name):
            self.occupied.add(_hash_of(found.path))

    def _clean_up(self, found: FoundFile) -> None:
        """Remove what a killed process had not finished."""
        if found.is_plain and _PART_NAME.fullmatch(found.path.name):
            self.ignored["torn"] += 1
            self._remove_quietly(found.path)
        else:
            self.ignored["foreign"] += 1

    def _path(self, content: BlockHash) -> Path:
        name = content.hex()
        return self._folder / "blocks" / name[:2] / f"{name}.kvb"

    @property
    def _lock_path(self) -> Path:
        return self._folder / "kvwatch.lock"

    def _part(self, content: BlockHash) -> Path:
        return self._folder / "incoming" / f"{content.hex()}.part"

    def _mark_used(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # its place in the eviction order after the next start is all that is lost
            self._files.mark_used(path)

    def _remove_quietly(self, path: Path) -> None:
        try:
            self._files.remove(path)
        except OSError as error:
            logger.warning("a file of the disk tier could not be removed", error=type(error).__name__)


def _hash_of(path: Path) -> BlockHash:
    return BlockHash(bytes.fromhex(path.stem))
