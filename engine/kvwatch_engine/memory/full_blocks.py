"""Enters blocks that became full into the prefix index, under the hashes of their tokens.

Knows block tables and hash chains, not the free list, scheduling or tensors.
"""

from collections.abc import Sequence

from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_hash import HashChain, TokenSlice, hash_in_group
from kvwatch_engine.memory.block_pool import BlockPool, Owner, StoredRun
from kvwatch_engine.memory.group_tables import GroupTables
from kvwatch_engine.memory.strict import StoredContents


class FullBlocks:
    """Full blocks of all sequences in all groups. Engine thread only."""

    __slots__ = ("_groups", "_pool", "contents", "emits_token_ids")

    def __init__(
        self, pool: BlockPool, groups: Sequence[GroupTables], contents: StoredContents | None, *, emits_token_ids: bool
    ) -> None:
        """Store nothing yet.

        Args:
            pool: whose prefix index is meant.
            groups: the block tables.
            contents: remembers what is stored, where the prefix cache is strict.
            emits_token_ids: whether events tell the tokens of stored blocks.
        """
        self._pool = pool
        self._groups = groups
        self.contents = contents
        self.emits_token_ids = emits_token_ids

    def store(self, group: GroupTables, owner: Owner, chain: HashChain, num_full: int, tokens: TokenSlice) -> None:
        """Enter blocks of one group into the prefix index, up to the first `num_full` ones."""
        done, number = group.num_stored[owner], group.number
        hashes = chain.upto(num_full, tokens)
        parent = hash_in_group(hashes[done - 1], number) if done else None
        names = list(hashes[done:num_full])
        if self.contents is not None:
            self._note_contents(self.contents, chain.root, names, done, tokens)
        if number:
            names = [hash_in_group(content, number) for content in names]
        token_ids = _token_ids(tokens, done, num_full, group.block_size) if self.emits_token_ids else None
        source = StoredRun(owner, done, token_ids, number)
        self._pool.store(group.tables[owner][done:num_full], names, parent, source)
        group.num_stored[owner] = num_full

    def _note_contents(
        self, contents: StoredContents, root: BlockHash, hashes: Sequence[BlockHash], first: int, tokens: TokenSlice
    ) -> None:
        contents.note(root, hashes, first, tokens)
        find, numbers = self._pool.find, [group.number for group in self._groups]
        contents.forget(
            self._pool.num_blocks, lambda content: any(find(hash_in_group(content, number)) for number in numbers)
        )


def _token_ids(tokens: TokenSlice, first: int, end: int, block_size: int) -> list[list[int]]:
    return [list(tokens(index * block_size, (index + 1) * block_size)) for index in range(first, end)]
