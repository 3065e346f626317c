"""The tiers behind the device that an engine has, nearest first: the pool of each, and what its bytes lie in."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from kvwatch.telemetry.events.block import Tier
from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.memory.tiers.folder import BlockFolder
from kvwatch_engine.memory.tiers.stores import MemoryStore
from kvwatch_engine.memory.tiers.tier_pool import NOBODY, TierPool

FAILURES_BEFORE_PAUSE: Final = 3
"""Failed writes in a row after which the disk is left alone for a while."""

PAUSE_SECONDS: Final = 30.0

logger = structlog.get_logger(__name__)


class HostLevel:
    """The host's memory. Keys of its store are block ids."""

    tier: Final[Tier] = "host"

    def __init__(self, pool: TierPool, store: MemoryStore) -> None:
        self.pool = pool
        self.store = store

    def keys(self, blocks: Sequence[BlockId], _hashes: Sequence[BlockHash]) -> Sequence[BlockId]:
        """Return what the store calls these blocks."""
        return blocks

    def accepts(self, _content: BlockHash) -> bool:
        """Whether a block may be brought here that is not here yet."""
        return True

    def take(self, count: int) -> list[BlockId]:
        """Return blocks that an offload may write to, at most `count`; the least recently used ones make room."""
        return self.pool.allocate(min(count, self.pool.num_free), NOBODY, "offload") or []

    def prepare(self) -> Callable[[], None] | None:
        """Return what the worker must do before it writes to what was taken."""
        return None

    def note_write(self, reason: str) -> None:
        """Take note of how a write went; `reason` is empty if it went well."""

    def lose(self, block: BlockId, reason: str) -> None:
        """Memory is never lost."""


class DiskLevel:
    """The folder. Keys of its store are block hashes; block ids only count what fits."""

    tier: Final[Tier] = "disk"

    def __init__(self, pool: TierPool, store: BlockFolder) -> None:
        self.pool = pool
        self.store = store
        self._to_remove: list[BlockHash] = []
        self._num_failures = 0
        self._paused_until = 0.0
        pool.on_evict = lambda _blocks, hashes: self._to_remove.extend(hashes)

    def keys(self, _blocks: Sequence[BlockId], hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return what the store calls these blocks."""
        return hashes

    def accepts(self, content: BlockHash) -> bool:
        """Whether a block may be brought here that is not here yet. Not for a while after the disk failed."""
        return content not in self.store.occupied and time.monotonic() >= self._paused_until

    def take(self, count: int) -> list[BlockId]:
        """Return blocks that an offload may write to, at most `count`; the least recently used files make room."""
        return self.pool.allocate(min(count, self.pool.num_free), NOBODY, "offload") or []

    def prepare(self) -> Callable[[], None] | None:
        """Return what the worker must do before it writes to what was taken: remove the files that made room."""
        if not self._to_remove:
            return None
        hashes, self._to_remove = self._to_remove, []
        remove = self.store.remove

        def run() -> None:
            for content in hashes:
                remove(content)

        return run

    def note_write(self, reason: str) -> None:
        """After some failures in a row, do without the disk for a while; what is on it can still be read."""
        if not reason.startswith("disk_"):
            self._num_failures = 0 if not reason else self._num_failures
            return
        self._num_failures += 1
        if self._num_failures >= FAILURES_BEFORE_PAUSE:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            logger.warning("the disk tier takes no blocks for a while", reason=reason, seconds=PAUSE_SECONDS)

    def lose(self, block: BlockId, reason: str) -> None:
        """Forget a block that could not be read, unless somebody else is reading it and will find out."""
        content = self.pool.hashes[block]
        if content is not None and not self.pool.ref_counts[block]:
            self.pool.forget(block)
            if reason == "disk_read":
                self._to_remove.append(content)

    def discard(self, hashes: Sequence[BlockHash]) -> None:
        """Have files removed before anything else is written."""
        self._to_remove.extend(hashes)


Level = HostLevel | DiskLevel
