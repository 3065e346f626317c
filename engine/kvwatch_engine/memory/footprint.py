"""What a request's sequences hold of a pool, and what of it is shared. Knows block tables and reference counts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvwatch_engine.contracts.block import BlockId


@dataclass(frozen=True, slots=True)
class Footprint:
    """Blocks that some block tables hold together."""

    num_blocks: int = 0
    """Distinct blocks."""
    num_shared_blocks: int = 0
    """Those of them that are in more than one block table, of whomever."""
    num_foreign_blocks: int = 0
    """Those of them that are also in a block table of somebody else: they stay used when these tables are released."""
    num_entries: int = 0
    """Table entries: what would be held without sharing."""

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that these tables save by sharing among themselves."""
        return self.num_entries - self.num_blocks


def footprint(tables: Iterable[Sequence[BlockId]], ref_counts: Sequence[int]) -> Footprint:
    """Return what block tables hold together. O(table entries).

    Args:
        tables: all block tables of one owner, a request for instance.
        ref_counts: of each block, in how many block tables of the pool it is.
    """
    held = Counter(block for table in tables for block in table)
    return Footprint(
        num_blocks=len(held),
        num_shared_blocks=sum(1 for block in held if ref_counts[block] > 1),
        num_foreign_blocks=sum(1 for block, count in held.items() if ref_counts[block] > count),
        num_entries=held.total(),
    )
