"""What sequences hold, seen together: in all KV groups, and in tables that a transfer keeps. Pure: it looks."""

from collections.abc import Iterable, Sequence

from kvwatch.telemetry.events.block import GROUPS
from kvwatch.telemetry.snapshot import SequenceState
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.group_tables import GroupTables
from kvwatch_engine.memory.holds import Holds


def num_blocks_freed(owners: Iterable[Owner], groups: Sequence[GroupTables], pool: BlockPool) -> int:
    """Return how many blocks would become free if all `owners` were released. Shared and pinned blocks stay."""
    held: dict[BlockId, int] = {}
    for owner in owners:
        for group in groups:
            for block in group.held(owner):
                held[block] = held.get(block, 0) + 1
    return sum(1 for block, count in held.items() if pool.ref_counts[block] == count and not pool.is_pinned(block))


def table_states(groups: Sequence[GroupTables], holds: Holds) -> list[SequenceState]:
    """Return all block tables for a snapshot, those included that were released while a transfer keeps them."""
    tables: dict[tuple[Owner, int], list[BlockId]] = {}
    for kept in holds:
        for number, blocks in enumerate(kept.blocks):
            tables.setdefault((kept.owner, number), []).extend(reversed(blocks))
    for group in groups:
        for owner in group.tables:
            tables.setdefault((owner, group.number), []).extend(group.held(owner))
    return [
        SequenceState(owner.request, owner.sequence, list(table), group=GROUPS[number])
        for (owner, number), table in tables.items()
    ]


def all_tables(groups: Sequence[GroupTables], holds: Holds) -> list[tuple[int, Sequence[BlockId]]]:
    """Return all block tables, kept ones included, with the group of each; null blocks left out."""
    return [
        (group.number, blocks)
        for group in groups
        for blocks in (*map(group.held, group.tables), *(each.blocks[group.number] for each in holds))
    ]
