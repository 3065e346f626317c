"""Strict mode of the prefix cache: what stored blocks hold is remembered, and compared when they are found.

Equal sha256 digests of different content do not happen by chance. This is for those who want to see it: it finds a
defect in hashing or in the index, at the price of the token ids of all stored blocks in memory.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_hash import TokenSlice

_FORGET_AT: Final = 2
"""Entries for each block of the pool at which those are forgotten that no block holds any more."""


class StoredContents:
    """Root and token ids of stored blocks, by the hash of the first KV group. Engine thread only."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[BlockHash, tuple[BlockHash, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        """Return the number of blocks that are remembered, present or not."""
        return len(self._contents)

    def note(self, root: BlockHash, hashes: Sequence[BlockHash], first_index: int, tokens: TokenSlice) -> None:
        """Remember blocks that are being stored; what another sequence has stored under a hash is not overwritten.

        Args:
            root: of the sequence.
            hashes: of the blocks, consecutive in the sequence.
            first_index: place of the first of them.
            tokens: gives the sequence's token ids from one position to another.
        """
        for index, content in enumerate(hashes, first_index):
            self._contents.setdefault(content, (root, self._tokens_of(index, tokens)))

    def num_equal(self, root: BlockHash, hashes: Sequence[BlockHash], tokens: TokenSlice) -> int:
        """Return how many leading blocks of a sequence hold what was stored under their hashes.

        What was not seen being stored cannot be compared and is not equal.
        """
        for index, content in enumerate(hashes):
            if self._contents.get(content) != (root, self._tokens_of(index, tokens)):
                return index
        return len(hashes)

    def forget(self, num_blocks: int, is_known: Callable[[BlockHash], bool]) -> None:
        """Forget what no block holds any more, once there is much of it in a pool of `num_blocks`; O(1) on average."""
        if len(self._contents) > _FORGET_AT * num_blocks:
            self._contents = {content: held for content, held in self._contents.items() if is_known(content)}

    def _tokens_of(self, index: int, tokens: TokenSlice) -> tuple[int, ...]:
        return tuple(tokens(index * self._block_size, (index + 1) * self._block_size))
