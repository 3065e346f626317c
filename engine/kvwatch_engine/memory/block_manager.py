"""Block tables: which blocks hold the tokens of each sequence.

    sequence tokens   | t0 .. t15 | t16 .. t31 | t32 t33 . . |
    block table       |    7      |     3      |     12      |      slot of t33 = 12 * 16 + 1
                        full, hashed, shared?    partial: one writer

Knows tokens only to hash full blocks; knows neither scheduling nor tensors. Check, then act: an operation that finds
too few free blocks returns None or False and has changed nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvwatch.telemetry.events import BlocksCopied, BlocksShared, SequenceForked
from kvwatch.telemetry.events.block import AllocationReason, ReleaseReason
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import SequenceState
from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.contracts.errors import CacheCorruption
from kvwatch_engine.memory.block_hash import HashChain, TokenSlice
from kvwatch_engine.memory.block_pool import BlockPool, Owner, StoredRun
from kvwatch_engine.memory.relocation import Relocation


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block to be copied before the next write (copy-on-write)."""

    source: BlockId
    destination: BlockId


@dataclass(slots=True)
class KeptTable:
    """A block table that was released while transfers read or write its blocks."""

    owner: Owner
    blocks: list[BlockId]
    """The last one first."""
    reason: ReleaseReason
    num_holds: int
    """Transfers that have not ended."""


class BlockManager:
    """Block tables over one pool. Engine thread only.

    Invariant: the reference count of a block equals the number of tables that contain it.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        log: EventLog,
        *,
        enable_prefix_cache: bool = True,
        emit_token_ids: bool = False,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._emit_token_ids = emit_token_ids
        self._log = log
        self._tables: dict[Owner, list[BlockId]] = {}
        self._num_stored: dict[Owner, int] = {}
        self._holds: Counter[Owner] = Counter()
        self._kept: list[KeptTable] = []
        """Tables that were released while transfers read or write their blocks, the oldest first."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, owner: Owner) -> list[BlockId]:
        """Return the block table of a sequence; read-only for callers."""
        return self._tables[owner]

    def owners(self) -> Iterable[Owner]:
        """Return the sequences that have a block table."""
        return self._tables.keys()

    # ------------------------------------------------------------------ admission

    def find_prefix(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the blocks that hold the longest known prefix of a hash chain; changes nothing."""
        blocks: list[BlockId] = []
        for content in hashes:
            block = self.pool.find(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_blocks_missing(self, prefix: Sequence[BlockId], num_tokens: int) -> int:
        """Return how many free blocks a new sequence takes: new ones, and cached ones of its prefix hit."""
        return self.blocks_for(num_tokens) - len(prefix) + self.pool.num_cached_of(prefix)

    def open(self, owner: Owner, prefix: Sequence[BlockId], num_tokens: int) -> bool:
        """Give a new sequence a block table for `num_tokens` tokens that begins with `prefix`.

        All or nothing: returns False, changing nothing, when too few blocks are free.
        """
        assert owner not in self._tables, f"{owner} already has a block table"
        if self.num_blocks_missing(prefix, num_tokens) > self.pool.num_free:
            return False
        table = list(prefix)
        if table:
            # First of all: what is reused can then not be evicted for the blocks that are still missing.
            self.pool.reuse(table, owner)
        missing = self.blocks_for(num_tokens) - len(table)
        if missing:
            blocks = self.pool.allocate(missing, owner, "prefill")
            if blocks is None:
                self._give_back(table, owner)
                return False
            table += blocks
        self._tables[owner] = table
        self._num_stored[owner] = len(prefix)
        return True

    # ------------------------------------------------------------------ growth

    def num_blocks_to_write(self, owner: Owner, start: int, end: int) -> int:
        """Return how many free blocks are needed before tokens `start` to `end` can be written."""
        table = self._tables[owner]
        return max(0, self.blocks_for(end) - len(table)) + len(self._shared_in(table, start, end))

    def prepare_write(
        self, owner: Owner, start: int, end: int, reason: AllocationReason
    ) -> tuple[BlockCopy, ...] | None:
        """Make tokens `start` to `end` of a sequence writable: grow its table, un-share the blocks it writes to.

        Returns:
            The copies that must be carried out before the write (usually none); None, with nothing changed, when too
            few blocks are free.
        """
        table = self._tables[owner]
        shared = self._shared_in(table, start, end)
        missing = self.blocks_for(end) - len(table)
        if missing <= 0 and not shared:
            return ()
        if max(0, missing) + len(shared) > self.pool.num_free:
            return None
        own = self.pool.allocate(len(shared), owner, "cow") if shared else []
        if own is None:
            return None
        if missing > 0:
            blocks = self.pool.allocate(missing, owner, reason)
            if blocks is None:
                self.pool.release(own, owner, "cow")
                return None
            table += blocks
        return self._unshare(owner, table, shared, own) if shared else ()

    def record_written(self, owner: Owner, start: int, end: int) -> list[BlockId]:
        """Note that the K/V of tokens `start` to `end` is being written; return the blocks that it is written to."""
        size = self.block_size
        first, last = start // size, (end - 1) // size
        filled = self.pool.filled_slots
        written = self._tables[owner][first : last + 1]
        for block in written[:-1]:
            filled[block] = size
        filled[written[-1]] = end - last * size
        return written

    def store_full(self, owner: Owner, chain: HashChain, num_computed: int, tokens: TokenSlice) -> None:
        """Enter the sequence's blocks that became full into the prefix index.

        Args:
            owner: the sequence.
            chain: its hash chain, extended here.
            num_computed: tokens of it whose K/V exists.
            tokens: gives its token ids from one position to another.
        """
        if not self.enable_prefix_cache:
            return
        num_full = num_computed // self.block_size
        done = self._num_stored[owner]
        if num_full <= done:
            return
        hashes = chain.upto(num_full, tokens)
        parent = hashes[done - 1] if done else None
        token_ids = self._token_ids(tokens, done, num_full) if self._emit_token_ids else None
        source = StoredRun(owner, done, token_ids)
        self.pool.store(self._tables[owner][done:num_full], hashes[done:num_full], parent, source)
        self._num_stored[owner] = num_full

    # ------------------------------------------------------------------ sharing and end

    def fork(self, parent: Owner, child: Owner, num_tokens: int) -> int:
        """Give `child` a block table that shares the blocks of `parent`'s first `num_tokens` tokens.

        Returns:
            The number of tokens shared. It is `num_tokens`, but for one case: when the parent has filled the last of
            these blocks with tokens of its own and the prefix index knows it, the block is left out. The child would
            write over content that others may look up.
        """
        assert child not in self._tables, f"{child} already has a block table"
        table = self._tables[parent]
        num_full, num_in_partial = divmod(num_tokens, self.block_size)
        if num_in_partial and self.pool.hashes[table[num_full]] is not None:
            num_tokens -= num_in_partial
        blocks = table[: self.blocks_for(num_tokens)]
        self.pool.share(blocks)
        self._tables[child] = blocks
        self._num_stored[child] = min(self._num_stored[parent], num_full)
        if self._log.active:
            if any(kept.owner == parent for kept in self._kept):  # it has two tables: blocks have to be named
                self._log.append(BlocksShared(child.request, child.sequence, list(blocks)))
            else:
                self._log.append(SequenceForked(parent.request, parent.sequence, child.sequence, len(blocks)))
        return num_tokens

    def join(self, parent: Owner, child: Owner, num_tokens: int) -> None:
        """Make `child`'s block table that of `parent`'s first `num_tokens` tokens, all by reference.

        What both have already stays; the rest of the child's is given up. No block is needed or copied.
        """
        assert child not in self._holds, f"a transfer knows the blocks of {child}"
        table, goal = self._tables[child], self._tables[parent][: self.blocks_for(num_tokens)]
        kept = next((place for place, pair in enumerate(zip(table, goal, strict=False)) if pair[0] != pair[1]), None)
        num_kept = min(len(table), len(goal)) if kept is None else kept
        given_up, shared = table[num_kept:], goal[num_kept:]
        self.pool.share(shared)
        if given_up:
            self.pool.release(given_up[::-1], child, "truncated")
        table[num_kept:] = shared
        if shared and self._log.active:
            self._log.append(BlocksShared(child.request, child.sequence, list(shared)))
        self._num_stored[child] = min(self._num_stored[parent], num_tokens // self.block_size)

    def release(self, owner: Owner, reason: ReleaseReason) -> None:
        """Drop a sequence's block table; does nothing when it has none."""
        table = self._tables.pop(owner, None)
        if table is None:
            return
        del self._num_stored[owner]
        table.reverse()  # the tail of a chain is evicted first
        num_holds = self._holds.pop(owner, 0)
        if num_holds:
            self._kept.append(KeptTable(owner, table, reason, num_holds))
        else:
            self.pool.release(table, owner, reason)

    # ------------------------------------------------------------------ transfers

    def hold(self, owner: Owner) -> None:
        """Keep the blocks of a sequence's table used even if they are released: a transfer reads or writes them.

        The sequence may get another block table meanwhile, which is not held. Holds end in the order in which they
        began.
        """
        assert owner in self._tables, f"{owner} has no block table"
        self._holds[owner] += 1

    def end_hold(self, owner: Owner) -> None:
        """End the oldest hold of a sequence; a table that was released becomes free with its last one."""
        kept = next((kept for kept in self._kept if kept.owner == owner), None)
        if kept is None:
            self._holds[owner] -= 1
            if not self._holds[owner]:
                del self._holds[owner]
            return
        kept.num_holds -= 1
        if not kept.num_holds:
            self._kept.remove(kept)
            self.pool.release(kept.blocks, owner, kept.reason)

    @property
    def num_holds(self) -> int:
        """Block tables whose blocks take part in transfers: nobody may move these blocks."""
        return len(self._holds) + len(self._kept)

    def rebuild(self, tables: Mapping[Owner, Sequence[int]], num_distinct: int) -> list[BlockId] | None:
        """Give sequences of one request block tables that share as `tables` says, in new blocks.

        Args:
            tables: for each sequence numbers from 0 to `num_distinct` - 1; equal numbers stand for one block. Each
                number occurs.
            num_distinct: how many there are.

        Returns:
            The block of each number; None, with nothing changed, when too few are free.
        """
        if num_distinct > self.pool.num_free:
            return None
        places: list[BlockId | None] = [None] * num_distinct
        for owner, numbers in tables.items():
            assert owner not in self._tables, f"{owner} already has a block table"
            if not self._extend(owner, numbers, places):
                self._undo_rebuild(tables)
                return None
        return [place for place in places if place is not None]

    def num_blocks_freed_by(self, owners: Iterable[Owner]) -> int:
        """Return how many blocks would become free if all `owners` were released. Shared blocks of others stay."""
        held: dict[BlockId, int] = {}
        for owner in owners:
            for block in self._tables.get(owner, ()):
                held[block] = held.get(block, 0) + 1
        return sum(1 for block, count in held.items() if self.pool.ref_counts[block] == count)

    def num_distinct_blocks(self, owners: Sequence[Owner]) -> int:
        """Return how many blocks the sequences hold together."""
        if len(owners) == 1:
            return len(self._tables.get(owners[0], ()))
        return len({block for owner in owners for block in self._tables.get(owner, ())})

    def resize(self, plan: Relocation) -> None:
        """Give the pool another number of blocks as `BlockPool.plan_resize` said just now; O(blocks)."""
        assert not self.num_holds, "a transfer knows blocks by their ids"
        self.pool.resize(plan)
        for table in self._tables.values():
            table[:] = map(plan.place_of, table)

    # ------------------------------------------------------------------ truth

    def to_states(self) -> list[SequenceState]:
        """Return all block tables for a snapshot."""
        tables: dict[Owner, list[BlockId]] = {}
        for kept in self._kept:
            tables.setdefault(kept.owner, []).extend(reversed(kept.blocks))
        for owner, table in self._tables.items():
            tables.setdefault(owner, []).extend(table)
        return [
            SequenceState(request=owner.request, sequence=owner.sequence, block_ids=list(table))
            for owner, table in tables.items()
        ]

    def check_integrity(self) -> None:
        """Verify the pool's invariants and that reference counts equal occurrences in tables.

        Raises:
            CacheCorruption: with the equation that does not hold.
        """
        self.pool.check_integrity()
        occurrences = [0] * self.pool.num_blocks
        for table in (*self._tables.values(), *(kept.blocks for kept in self._kept)):
            for block in table:
                occurrences[block] += 1
        for index, (count, expected) in enumerate(zip(self.pool.ref_counts, occurrences, strict=True)):
            if count != expected:
                raise CacheCorruption(f"block {index}: reference count {count}, but it is in {expected} tables")

    # ------------------------------------------------------------------ parts

    def _extend(self, owner: Owner, numbers: Sequence[int], places: list[BlockId | None]) -> bool:
        """Make one table of `rebuild`: runs of blocks that are new, and runs that another sequence has already."""
        table = self._tables[owner] = []
        self._num_stored[owner] = 0  # they enter the prefix index again when the sequence goes on
        for is_new, group in groupby(numbers, lambda number: places[number] is None):
            run = list(group)
            if is_new:
                blocks = self.pool.allocate(len(run), owner, "restore")
                if blocks is None:
                    return False
                for number, taken in zip(run, blocks, strict=True):
                    places[number] = taken
            else:
                blocks = [block for number in run if (block := places[number]) is not None]
                self.pool.share(blocks)
                if self._log.active:
                    self._log.append(BlocksShared(owner.request, owner.sequence, list(blocks)))
            table += blocks
        return True

    def _undo_rebuild(self, tables: Iterable[Owner]) -> None:
        """The pool refused blocks against its own count."""
        for owner in tables:
            self.release(owner, "aborted")

    def _token_ids(self, tokens: TokenSlice, first: int, end: int) -> list[list[int]]:
        size = self.block_size
        return [list(tokens(index * size, (index + 1) * size)) for index in range(first, end)]

    def _shared_in(self, table: list[BlockId], start: int, end: int) -> list[int]:
        """Return the places in the table that tokens `start` to `end` write to and that have another owner."""
        ref_counts = self.pool.ref_counts
        first, last = start // self.block_size, min(len(table) - 1, (end - 1) // self.block_size)
        return [index for index in range(first, last + 1) if ref_counts[table[index]] > 1]

    def _give_back(self, prefix: list[BlockId], owner: Owner) -> None:
        """Undo the reuse of a prefix: the pool refused the blocks behind it."""
        if prefix:
            self.pool.release(prefix[::-1], owner, "truncated")

    def _unshare(
        self, owner: Owner, table: list[BlockId], places: list[int], own: list[BlockId]
    ) -> tuple[BlockCopy, ...]:
        """Put blocks of the sequence's own into these places of its table, which hold shared ones."""
        shared = [table[place] for place in places]
        filled_slots = self.pool.filled_slots
        for place, source, destination in zip(places, shared, own, strict=True):
            table[place] = destination
            filled_slots[destination] = filled_slots[source]
        if self._log.active:
            self._log.append(BlocksCopied(owner.request, owner.sequence, list(shared), list(own)))
        self.pool.release(shared, owner, "cow")
        return tuple(map(BlockCopy, shared, own))
