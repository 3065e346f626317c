"""Block tables of one KV group: layers of one kind of attention, which take their blocks from the pool that all share.

    full attention     |  7 |  3 | 12 |  5 |        every block stays as long as the sequence does
    sliding window     |  0 |  0 |  9 |  4 |        what has left the window is given back: its entry is the null block

Knows neither the other groups nor hashes of tokens. Nothing here checks whether enough blocks are free: the block
manager does, for all groups at once.
"""

from collections.abc import Mapping, Sequence

from kvwatch_engine.contracts.block import NULL_BLOCK, BlockId
from kvwatch_engine.contracts.cache import most_window_blocks
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.layout import TableLayout


class GroupTables:
    """Engine thread only. Other parts read `tables`; only the block manager has them changed."""

    __slots__ = ("_pool", "block_size", "first_held", "num_passed", "num_stored", "number", "tables", "window")

    def __init__(self, pool: BlockPool, block_size: int, number: int = 0, window: int | None = None) -> None:
        """Create the tables of no sequences.

        Args:
            pool: where blocks come from.
            block_size: tokens of a block.
            number: of the group, as events name it.
            window: tokens that a query sees, itself included; none sees all.
        """
        self._pool = pool
        self.block_size = block_size
        self.number = number
        self.window = window
        self.tables: dict[Owner, list[BlockId]] = {}
        """Entry i of a table is the block of tokens i * block size and on."""
        self.num_stored: dict[Owner, int] = {}
        """Leading entries that were given to the prefix index, or given back."""
        self.num_passed: dict[Owner, int] = {}
        """Leading entries that have left the window: null blocks. A sequence without any is not in here."""
        self.first_held: dict[Owner, int] = {}
        """First token whose K/V exists, where that is in the middle of a block: the pool was laid out anew there."""

    # ------------------------------------------------------------------ windows

    def first_seen(self, num_computed: int) -> int:
        """Return the first entry that the token at position `num_computed`, or any later one, can see."""
        window = self.window
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_size

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at once, computed in such chunks."""
        all_blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return all_blocks
        return min(all_blocks, most_window_blocks(self.window, max_chunk, self.block_size))

    def pass_window(self, owner: Owner, num_computed: int) -> None:
        """Give back the blocks that no token from position `num_computed` on can see."""
        self._pass(owner, self.first_seen(num_computed))

    # ------------------------------------------------------------------ tables

    def open(self, owner: Owner, table: list[BlockId], num_stored: int = 0) -> None:
        """Give a sequence a table whose first `num_stored` entries are in the prefix index, or null blocks."""
        self.tables[owner] = table
        self.num_stored[owner] = num_stored
        if num_stored and not table[0]:
            self.num_passed[owner] = next((i for i in range(num_stored) if table[i]), num_stored)

    def close(self, owner: Owner) -> list[BlockId]:
        """Forget a sequence's table; return the blocks that it holds, the last first: the tail is evicted first."""
        table = self.tables.pop(owner)
        del self.num_stored[owner]
        table.reverse()
        self.first_held.pop(owner, None)
        passed = self.num_passed.pop(owner, 0)
        if passed:
            del table[-passed:]
        return table

    def held(self, owner: Owner) -> list[BlockId]:
        """Return the blocks that a sequence holds in this group, in order; none if it has no table."""
        table = self.tables.get(owner, [])
        passed = self.num_passed.get(owner, 0)
        return table[passed:] if passed else table

    def shared_in(self, table: Sequence[BlockId], start: int, end: int) -> list[int]:
        """Return the places in a table that tokens `start` to `end` write to and that have another owner."""
        ref_counts = self._pool.ref_counts
        first, last = start // self.block_size, min(len(table) - 1, (end - 1) // self.block_size)
        return [index for index in range(first, last + 1) if ref_counts[table[index]] > 1]

    def first_token(self, owner: Owner) -> int:
        """Return the first token of a sequence whose K/V this group still has."""
        return max(self.num_passed.get(owner, 0) * self.block_size, self.first_held.get(owner, 0))

    def lay_out(self, block_size: int, tables: Mapping[Owner, TableLayout]) -> None:
        """Have these tables over blocks of another size."""
        self.block_size = block_size
        for column in (self.tables, self.num_stored, self.num_passed, self.first_held):
            column.clear()
        for owner, each in tables.items():
            self.tables[owner] = each.table
            self.num_stored[owner] = -(-each.first_held // block_size)  # what is not whole must not be found
            if each.num_passed:
                self.num_passed[owner] = each.num_passed
            if each.first_held % block_size:
                self.first_held[owner] = each.first_held

    def truncate(self, owner: Owner, num_tokens: int) -> BlockId | None:
        """Give back what lies behind a sequence's first `num_tokens` tokens; return its last block if it is partial."""
        table, num_filled = self.tables[owner], num_tokens % self.block_size
        given_up = table[-(-num_tokens // self.block_size) :]
        if given_up:
            del table[len(table) - len(given_up) :]
            self._pool.release(given_up[::-1], owner, "truncated", self.number)
        if not num_filled:
            return None
        self._pool.filled_slots[table[-1]] = num_filled
        return table[-1]

    # ------------------------------------------------------------------ forks

    def can_fork(self, parent: Owner, num_tokens: int) -> bool:
        """Whether the parent still holds all that a sequence which goes on at `num_tokens` sees."""
        return self.num_passed.get(parent, 0) <= self.first_seen(num_tokens)

    def fork(self, parent: Owner, child: Owner, num_blocks: int, num_full: int) -> list[BlockId]:
        """Let a child's table begin as the parent's first `num_blocks` entries; return the blocks shared."""
        table = self.tables[parent][:num_blocks]
        passed = min(num_blocks, self.num_passed.get(parent, 0))
        shared = table[passed:] if passed else table
        self._pool.share(shared)
        self.tables[child] = table
        self.num_stored[child] = min(self.num_stored[parent], num_full)
        if passed:
            self.num_passed[child] = passed
        if parent in self.first_held:
            self.first_held[child] = self.first_held[parent]
        return shared

    def join(self, parent: Owner, child: Owner, num_tokens: int) -> list[BlockId]:
        """Make a child's table that of the parent's first `num_tokens` tokens; return the blocks newly shared.

        Both have computed so many. What both have already stays, the rest of the child's is given up.
        """
        num_blocks = -(-num_tokens // self.block_size)
        table, goal = self.tables[child], self.tables[parent][:num_blocks]
        self._pass(child, self.num_passed.get(parent, 0))
        first = self.num_passed.get(child, 0)
        kept = next((i for i in range(first, min(len(table), num_blocks)) if table[i] != goal[i]), None)
        num_kept = min(len(table), num_blocks) if kept is None else kept
        given_up, shared = table[num_kept:], goal[num_kept:]
        self._pool.share(shared)
        if given_up:
            self._pool.release(given_up[::-1], child, "truncated", self.number)
        table[num_kept:] = shared
        if parent in self.first_held:
            self.first_held[child] = self.first_held[parent]
        self.num_stored[child] = min(self.num_stored[parent], num_tokens // self.block_size)
        return shared

    # ------------------------------------------------------------------ parts

    def _pass(self, owner: Owner, first: int) -> None:
        """Give back the blocks before entry `first`."""
        passed = self.num_passed.get(owner, 0)
        if first <= passed:
            return
        table = self.tables[owner]
        blocks = table[passed:first]
        table[passed:first] = [NULL_BLOCK] * len(blocks)
        self.num_passed[owner] = passed + len(blocks)
        if self.num_stored[owner] < first:  # the prefix cache is off
            self.num_stored[owner] = first
        self._pool.release(blocks[::-1], owner, "window", self.number)
