"""Which known prefix a new sequence can begin with. Pure: it looks, others take.

A prefix of n blocks is of use when every KV group has what the token behind it sees: a group with full attention all n
blocks, one with a sliding window those of the last window. The longest such prefix is the hit.

    group 0 (full)      | A | B | C | D | - |
    group 1 (sliding)   | - | - | C'| D'| - |      window of two blocks: a hit of 4 blocks, none of 3
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvwatch_engine.contracts.block import NULL_BLOCK, BlockHash, BlockId
from kvwatch_engine.memory.block_hash import hash_in_group
from kvwatch_engine.memory.group_tables import GroupTables


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix hit: for each group the entries that a block table begins with. Its length is in blocks."""

    groups: tuple[list[BlockId], ...] = ()
    """All of one length; none at all is no hit. Null blocks stand for what lies before a group's window."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.groups[0]) if self.groups else 0

    def held(self) -> list[BlockId]:
        """Return the blocks of all groups, null blocks left out."""
        return [block for blocks in self.groups for block in blocks if block]


def find_prefix(
    hashes: Sequence[BlockHash], groups: Sequence[GroupTables], find: Callable[[BlockHash], BlockId | None]
) -> Prefix:
    """Return the blocks that hold the longest known prefix of a hash chain, in every group what is seen of it.

    Args:
        hashes: of the first group; those of the others follow from them.
        groups: all KV groups.
        find: returns the block that holds something.
    """
    length = longest_prefix(hashes, groups, lambda content: find(content) is not None)
    return _blocks_of(hashes, length, groups, find)


def longest_prefix(
    hashes: Sequence[BlockHash],
    groups: Sequence[GroupTables],
    knows: Callable[[BlockHash], bool],
    num_known: int = 0,
) -> int:
    """Return how many leading blocks of a hash chain can be reused if `knows` tells what is there.

    Args:
        hashes: of the first group; those of the others follow from them.
        groups: all KV groups.
        knows: whether a block with this hash could be reused.
        num_known: a prefix of so many blocks can be reused, whatever `knows` says of it.
    """
    length = len(hashes)
    for group in groups:
        if group.window is None:
            number = group.number
            missing = (i for i in range(num_known, length) if not knows(hash_in_group(hashes[i], number)))
            length = next(missing, length)
    sliding = [group for group in groups if group.window is not None]
    settled = -1
    while settled != length:  # a group that cuts the prefix shorter may ask for other blocks of the next one
        settled = length
        for group in sliding:
            length = _last_whole_window(hashes, length, group, knows)
    return length


def _last_whole_window(
    hashes: Sequence[BlockHash], length: int, group: GroupTables, knows: Callable[[BlockHash], bool]
) -> int:
    """Return the longest prefix of at most `length` blocks whose last window a sliding group has."""
    index = length
    while index > group.first_seen(length * group.block_size):
        index -= 1
        if not knows(hash_in_group(hashes[index], group.number)):
            length = index
    return length


def _blocks_of(
    hashes: Sequence[BlockHash],
    length: int,
    groups: Sequence[GroupTables],
    find: Callable[[BlockHash], BlockId | None],
) -> Prefix:
    """Return the blocks of a prefix whose length was found with the same knowledge."""
    found: list[list[BlockId]] = []
    for group in groups:
        first = group.first_seen(length * group.block_size)
        blocks = [NULL_BLOCK] * first
        for content in hashes[first:length]:
            block = find(hash_in_group(content, group.number))
            assert block is not None, "it was found just now"
            blocks.append(block)
        found.append(blocks)
    return Prefix(tuple(found))
