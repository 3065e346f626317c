"""The prefix index: which block of a pool holds which content.

Knows neither who uses a block nor which one is evicted next.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.contracts.errors import CacheCorruption


class PrefixIndex:
    """Engine thread only. Invariant: the index and `hashes` are each other's inverse."""

    __slots__ = ("_blocks", "hashes", "parents")

    def __init__(self, num_blocks: int) -> None:
        """Know nothing of so many blocks, the null block included."""
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        """Hash of each block's content, if it is known; read-only for others."""
        self.parents: list[BlockHash | None] = [None] * num_blocks
        """Hash of the block before it in the sequence that stored it; only of blocks that have a hash."""
        self._blocks: dict[BlockHash, BlockId] = {}

    # ------------------------------------------------------------------ queries

    def __contains__(self, content: object) -> bool:
        """Return whether a block holds `content`."""
        return content in self._blocks

    def find(self, content: BlockHash) -> BlockId | None:
        """Return the block that holds `content`. O(1)."""
        return self._blocks.get(content)

    def block_of(self, content: BlockHash) -> BlockId:
        """Return the block of content that is here."""
        return self._blocks[content]

    def find_run(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Return the blocks that hold the leading part of `hashes` that is here."""
        find = self._blocks.get
        blocks: list[BlockId] = []
        for content in hashes:
            block = find(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    # ------------------------------------------------------------------ changes

    def enter(
        self, blocks: Sequence[BlockId], hashes: Sequence[BlockHash], parents: Sequence[BlockHash | None]
    ) -> list[int]:
        """Enter what blocks hold; return the places of those left out since another block holds the same."""
        index, held, before = self._blocks, self.hashes, self.parents
        duplicates: list[int] = []
        for place, (block, content) in enumerate(zip(blocks, hashes, strict=True)):
            if content in index:
                duplicates.append(place)
                continue
            index[content] = block
            held[block] = content
            before[block] = parents[place]
        return duplicates

    def drop(self, blocks: Sequence[BlockId]) -> list[BlockHash]:
        """Forget what blocks hold, and return it."""
        index, held = self._blocks, self.hashes
        hashes: list[BlockHash] = []
        for block in blocks:
            content = held[block]
            assert content is not None, f"block {block} holds nothing that could be forgotten"
            del index[content]
            held[block] = None
            hashes.append(content)
        return hashes

    def clear(self) -> list[BlockId]:
        """Forget everything; return the blocks that held something, in order."""
        held = sorted(self._blocks.values())
        for block in held:
            self.hashes[block] = None
        self._blocks.clear()
        return held

    def move(self, moves: Mapping[BlockId, BlockId]) -> None:
        """What a block holds is in another one from now on, which held nothing."""
        hashes, parents = self.hashes, self.parents
        for source, destination in moves.items():
            content = hashes[source]
            if content is not None:
                self._blocks[content] = destination
            hashes[source] = None
            hashes[destination], parents[destination] = content, parents[source]

    def resize(self, num_blocks: int) -> None:
        """Have another number of blocks; those that go hold nothing."""
        num_new = max(0, num_blocks - len(self.hashes))
        self.hashes[num_blocks:] = [None] * num_new
        self.parents[num_blocks:] = [None] * num_new

    # ------------------------------------------------------------------ truth

    def check_integrity(self) -> None:
        """Verify the invariant of the class docstring; O(number of blocks).

        Raises:
            CacheCorruption: with what does not hold.
        """
        inverse = {content: block for block, content in enumerate(self.hashes) if content is not None}
        if inverse != self._blocks:
            raise CacheCorruption(f"prefix index has {len(self._blocks)} entries, blocks have {len(inverse)} hashes")
