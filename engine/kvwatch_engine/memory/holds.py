"""Blocks that take part in transfers stay used until these have ended, even if their sequences let go of them.

    table of a sequence ──hold──▶ held ──release──▶ kept, under no table ──last hold ends──▶ free

Knows who holds what, not what a transfer is.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvwatch.telemetry.events.block import ReleaseReason
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.memory.block_pool import Owner


@dataclass(slots=True)
class KeptTable:
    """Block tables of a sequence that were released while transfers read or write its blocks."""

    owner: Owner
    blocks: list[list[BlockId]]
    """For each group the blocks held, the last one first."""
    reason: ReleaseReason
    num_holds: int
    """Transfers that have not ended."""


class Holds:
    """Engine thread only."""

    def __init__(self) -> None:
        self._holds: Counter[Owner] = Counter()
        self._kept: list[KeptTable] = []
        """The oldest first."""

    def __len__(self) -> int:
        """Return the number of sequences whose blocks take part in transfers."""
        return len(self._holds) + len(self._kept)

    def __contains__(self, owner: Owner) -> bool:
        """Whether the table that a sequence has now is held."""
        return owner in self._holds

    def __iter__(self) -> Iterator[KeptTable]:
        """Return the tables that were released while they were held."""
        return iter(self._kept)

    def keeps(self, owner: Owner) -> bool:
        """Whether a sequence has released a table that is still held."""
        return any(kept.owner == owner for kept in self._kept)

    def begin(self, owner: Owner) -> None:
        """Hold the table that a sequence has now."""
        self._holds[owner] += 1

    def keep(self, owner: Owner, blocks: list[list[BlockId]], reason: ReleaseReason) -> bool:
        """Keep what a sequence releases, if it is held; return whether it is."""
        num_holds = self._holds.pop(owner, 0)
        if num_holds:
            self._kept.append(KeptTable(owner, blocks, reason, num_holds))
        return num_holds > 0

    def end(self, owner: Owner) -> KeptTable | None:
        """End the oldest hold of a sequence; return the table that is free with it, if one is."""
        kept = next((kept for kept in self._kept if kept.owner == owner), None)
        if kept is None:
            self._holds[owner] -= 1
            if not self._holds[owner]:
                del self._holds[owner]
            return None
        kept.num_holds -= 1
        if kept.num_holds:
            return None
        self._kept.remove(kept)
        return kept
