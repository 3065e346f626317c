"""The block pool of a tier behind the device: the device's, and who holds what in it.

There are no block tables behind the device, but events name the owner of each block all the same, and a snapshot must
say who holds what. So what each owner took is remembered in the order of the events.
"""

from typing import Final

from msgspec import structs

from kvwatch.telemetry.events.block import AllocationReason, ReleaseReason, Tier
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import SequenceState, TierState
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.contracts.errors import CacheCorruption
from kvwatch_engine.memory.block_pool import BlockPool, Owner

NOBODY: Final = Owner("", 0)
"""Owner of blocks that an offload is writing: no request waits for it."""


class TierPool(BlockPool):
    """Blocks of one tier behind the device. Engine thread only.

    Used: held by a swapped request, or being read or written. Cached: prefixes that can be restored.
    """

    def __init__(self, num_blocks: int, log: EventLog, tier: Tier) -> None:
        super().__init__(num_blocks, log, tier)
        self.ignored_files: dict[str, int] = {}
        """Files in the tier's folder that were of no use when it was opened, by why."""
        self._held: dict[Owner, list[BlockId]] = {}

    def allocate(self, count: int, owner: Owner, reason: AllocationReason, group: int = 0) -> list[BlockId] | None:
        """Take blocks, see `BlockPool.allocate`."""
        blocks = super().allocate(count, owner, reason, group)
        if blocks:
            self._held.setdefault(owner, []).extend(blocks)
        return blocks

    def reuse(self, blocks: list[BlockId], owner: Owner, group: int = 0) -> None:
        """Hold blocks that are about to be read, see `BlockPool.reuse`."""
        super().reuse(blocks, owner, group)
        self._held.setdefault(owner, []).extend(blocks)

    def release(self, blocks: list[BlockId], owner: Owner, reason: ReleaseReason, group: int = 0) -> None:
        """Give blocks up, see `BlockPool.release`."""
        super().release(blocks, owner, reason, group)
        held = self._held.get(owner, [])
        if held[: -len(blocks) - 1 : -1] == blocks:  # all of it, or what was taken last: nearly always
            del held[len(held) - len(blocks) :]
        else:
            for block in blocks:
                del held[_last_index(held, block)]
        if not held:
            self._held.pop(owner, None)

    def to_state(self, *, with_parents: bool = False) -> TierState:
        """Return the pool as plain columns for a snapshot."""
        return structs.replace(super().to_state(with_parents=with_parents), ignored_files=dict(self.ignored_files))

    def to_sequences(self) -> list[SequenceState]:
        """Return who holds what, for a snapshot."""
        return [
            SequenceState(owner.request, owner.sequence, list(blocks), self.tier)
            for owner, blocks in self._held.items()
        ]

    def check_integrity(self) -> None:
        """Verify the pool's invariants, and that reference counts equal what is held.

        Raises:
            CacheCorruption: with the equation that does not hold.
        """
        super().check_integrity()
        occurrences = [0] * self.num_blocks
        for blocks in self._held.values():
            for block in blocks:
                occurrences[block] += 1
        if occurrences != self.ref_counts:
            raise CacheCorruption(f"{self.tier}: reference counts {self.ref_counts} != holders {occurrences}")


def _last_index(blocks: list[BlockId], block: BlockId) -> int:
    return len(blocks) - 1 - blocks[::-1].index(block)
