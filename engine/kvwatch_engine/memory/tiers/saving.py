"""At the end of an engine: cached prefixes are written to the disk, most recently used first, for a few seconds.

The engine has ended: pools do not change any more and no event is told. The next engine finds the files.
"""

import time
from collections import deque
from typing import Final

import structlog

from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.memory.block_pool import BlockPool
from kvwatch_engine.memory.tiers.levels import DiskLevel
from kvwatch_engine.memory.tiers.stores import BlockStore, TransferError, plain_memory

SAVE_SECONDS: Final = 5.0

logger = structlog.get_logger(__name__)


class Saver:
    """Writes blocks to the disk tier until its time is over, the disk fails, or everything there is newer."""

    def __init__(self, disk: DiskLevel, block_bytes: int, seconds: float) -> None:
        self._disk = disk
        self._buffer = plain_memory(1, block_bytes)
        self._deadline = time.monotonic() + seconds
        self._room = disk.pool.num_empty
        self._oldest = deque(disk.pool.cached())
        self._saved: set[BlockHash] = set()
        prepare = disk.prepare()
        if prepare is not None:
            prepare()

    def save(self, pool: BlockPool, store: BlockStore[int]) -> None:
        """Save what is cached in one pool, whose blocks lie in `store`."""
        before = len(self._saved)
        for block, content in reversed(pool.cached()):
            is_known = content in self._saved or self._disk.pool.find(content) is not None
            if is_known or not self._disk.accepts(content):
                continue
            if not self._make_room() or not self._save(store, block, content):
                break
        if len(self._saved) > before:
            logger.info("saved prefixes to the disk tier", blocks=len(self._saved) - before, tier=pool.tier)

    def _make_room(self) -> bool:
        """Return whether one more block may be written: the size bound holds here too."""
        if time.monotonic() >= self._deadline:
            return False
        if self._room:
            self._room -= 1
            return True
        if not self._oldest:
            return False
        _, content = self._oldest.popleft()
        self._disk.store.remove(content)
        return True

    def _save(self, store: BlockStore[int], block: BlockId, content: BlockHash) -> bool:
        try:
            store.read([block], self._buffer)
            self._disk.store.write([content], self._buffer)
        except TransferError as error:
            logger.warning("prefixes could not be saved to the disk tier", reason=error.reason)
            return False
        except Exception as error:  # the device may be what ended the engine
            logger.warning("prefixes could not be read to be saved", error=type(error).__name__)
            return False
        self._saved.add(content)
        return True
