"""Block tables: which blocks hold the tokens of each sequence.

    sequence tokens   | t0 .. t15 | t16 .. t31 | t32 t33 . . |
    block table       |    7      |     3      |     12      |      slot of t33 = 12 * 16 + 1
                        full, hashed, shared?    partial: one writer

A sequence has one table for each KV group (see `group_tables.py`), all over one pool. Knows tokens only to hash full
blocks; knows neither scheduling nor tensors. Check, then act, for all groups at once: an operation that finds too few
free blocks returns None or False and has changed nothing.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvwatch.telemetry.events import BlocksShared, SequenceForked
from kvwatch.telemetry.events.block import GROUPS, AllocationReason, ReleaseReason
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import SequenceState
from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.memory.block_hash import HashChain, TokenSlice
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.full_blocks import FullBlocks
from kvwatch_engine.memory.group_tables import GroupTables
from kvwatch_engine.memory.held_blocks import all_tables, num_blocks_freed, table_states
from kvwatch_engine.memory.holds import Holds
from kvwatch_engine.memory.integrity import check_tables
from kvwatch_engine.memory.layout import Layout, laid_out_event
from kvwatch_engine.memory.prefix import Prefix, find_prefix, longest_prefix
from kvwatch_engine.memory.relocation import Relocation
from kvwatch_engine.memory.strict import StoredContents
from kvwatch_engine.memory.table_rebuild import TableRebuilder
from kvwatch_engine.memory.table_write import BlockCopy, TableWriter


class BlockManager:
    """Block tables over one pool. Engine thread only.

    Invariant: the reference count of a block equals the number of tables that contain it.
    """

    def __init__(  # noqa: PLR0913 - by keyword
        self,
        pool: BlockPool,
        block_size: int,
        log: EventLog,
        *,
        enable_prefix_cache: bool = True,
        emit_token_ids: bool = False,
        windows: Sequence[int | None] = (None,),
        max_chunk: int = 1,
        is_strict: bool = False,
    ) -> None:
        """Create the tables of no sequences.

        Args:
            pool: where all groups take their blocks from.
            block_size: tokens of a block.
            log: where events go.
            enable_prefix_cache: whether full blocks enter the prefix index.
            emit_token_ids: whether events tell the tokens of stored blocks.
            windows: for each KV group the tokens that a query sees, itself included; none sees all.
            max_chunk: most tokens of a sequence that are written at once; matters to groups with a window only.
            is_strict: whether the token ids of stored blocks are kept, to be compared when they are found.
        """
        assert pool.num_groups == len(windows), "the pool notes each block's group"
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.max_chunk = max_chunk
        self.groups = tuple(GroupTables(pool, block_size, number, window) for number, window in enumerate(windows))
        self.has_windows = any(window is not None for window in windows)
        self._is_plain = len(windows) == 1 and not self.has_windows
        self._log = log
        self._tables = self.groups[0].tables
        contents = StoredContents(block_size) if is_strict else None
        self._full_blocks = FullBlocks(pool, self.groups, contents, emits_token_ids=emit_token_ids)
        self._writer = TableWriter(pool, self.groups, log)
        self._rebuilder = TableRebuilder(pool, self.groups[0], log)
        self._holds = Holds()

    @property
    def emit_token_ids(self) -> bool:
        """Whether events tell the tokens of stored blocks."""
        return self._full_blocks.emits_token_ids

    @property
    def contents(self) -> StoredContents | None:
        """What stored blocks hold; none unless the prefix cache is strict."""
        return self._full_blocks.contents

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens in one group."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, num_shared: int = 0) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds over all groups while it is computed.

        Args:
            num_tokens: of the sequence.
            num_shared: leading tokens of which another sequence has the full blocks; those of a window are counted.
        """
        if self._is_plain:
            return -(-num_tokens // self.block_size) - num_shared // self.block_size
        return sum(
            group.most_blocks(num_tokens, self.max_chunk)
            - (num_shared // self.block_size if group.window is None else 0)
            for group in self.groups
        )

    def table(self, owner: Owner) -> list[BlockId]:
        """Return the block table of a sequence in the first group; read-only for callers."""
        return self._tables[owner]

    def num_held(self, owner: Owner) -> int:
        """Return the number of entries that a sequence's tables have over all groups."""
        if self._is_plain:
            return len(self._tables[owner])
        return sum(len(group.held(owner)) for group in self.groups)

    def owners(self) -> Iterable[Owner]:
        """Return the sequences that have a block table."""
        return self._tables.keys()

    # ------------------------------------------------------------------ admission

    def find_prefix(self, hashes: Sequence[BlockHash]) -> Prefix:
        """Return the blocks that hold the longest known prefix of a hash chain; changes nothing."""
        if self._is_plain:
            return Prefix((self.pool.find_run(hashes),))
        return find_prefix(hashes, self.groups, self.pool.find)

    def num_blocks_regretted(self, hashes: Sequence[BlockHash], num_hits: int) -> int:
        """Return how many more blocks of a hash chain than `num_hits` would be found, had none been evicted."""
        pool = self.pool
        if self._is_plain and not num_hits and not (hashes and pool.would_have_hit(hashes[0], is_first=True)):
            return 0  # nearly always, where prompts have nothing in common
        return max(0, longest_prefix(hashes, self.groups, pool.would_have_hit, num_hits) - num_hits)

    def num_blocks_missing(self, prefix: Prefix, num_tokens: int) -> int:
        """Return how many free blocks a new sequence takes: new ones, and cached ones of its prefix hit.

        Groups with a window take theirs step by step: what they need at most is counted.
        """
        held = prefix.held()
        return max(0, self.most_blocks(num_tokens) - len(held)) + self.pool.num_cached_of(held)

    def open(self, owner: Owner, prefix: Prefix, num_tokens: int) -> bool:
        """Give a new sequence block tables for `num_tokens` tokens that begin with `prefix`.

        All or nothing: returns False, changing nothing, when too few blocks are free. In groups with a window the
        table is as long as the prefix.
        """
        assert owner not in self._tables, f"{owner} already has a block table"
        if self.num_blocks_missing(prefix, num_tokens) > self.pool.num_free:
            return False
        tables = [list(blocks) for blocks in prefix.groups] if prefix else [[] for _ in self.groups]
        # First of all: what is reused can then not be evicted for the blocks that are still missing.
        reused: list[list[BlockId]] = []
        for group, table in zip(self.groups, tables, strict=True):
            held = list(table) if not table or table[0] else [block for block in table if block]
            reused.append(held)
            if held:
                self.pool.reuse(held, owner, group.number)
        num_hits, wanted = len(prefix), -(-num_tokens // self.block_size)
        for group, table in zip(self.groups, tables, strict=True):
            if group.window is None and wanted > num_hits:
                blocks = self.pool.allocate(wanted - num_hits, owner, "prefill", group.number)
                if blocks is None:
                    self._give_back(owner, reused, tables, num_hits)
                    return False
                table.extend(blocks)
        for group, table in zip(self.groups, tables, strict=True):
            group.open(owner, table, num_hits)
        return True

    # ------------------------------------------------------------------ growth

    def num_blocks_to_write(self, owner: Owner, start: int, end: int) -> int:
        """Return how many free blocks are needed before tokens `start` to `end` can be written."""
        return self._writer.num_blocks_for(owner, start, end)

    def prepare_write(
        self, owner: Owner, start: int, end: int, reason: AllocationReason
    ) -> tuple[BlockCopy, ...] | None:
        """Make tokens `start` to `end` of a sequence writable: grow its tables, un-share the blocks it writes to.

        Returns:
            The copies that must be carried out before the write (usually none); None, with nothing changed, when too
            few blocks are free.
        """
        if self._is_plain and end - start == 1:  # a token in a block that is there: nearly always
            table, place = self._tables[owner], start // self.block_size
            if place < len(table) and self.pool.ref_counts[table[place]] == 1:
                return ()
        return self._writer.prepare(owner, start, end, reason)

    def record_written(self, owner: Owner, start: int, end: int) -> list[BlockId]:
        """Note that the K/V of tokens `start` to `end` is being written; return the blocks that it is written to."""
        size, filled = self.block_size, self.pool.filled_slots
        first, last = start // size, (end - 1) // size
        if self._is_plain and first == last:
            block = self._tables[owner][first]
            filled[block] = end - first * size
            return [block]
        all_written: list[BlockId] = []
        for group in self.groups:
            written = group.tables[owner][first : last + 1]
            filled[written[-1]] = end - last * size
            if first < last:
                for block in written[:-1]:
                    filled[block] = size
            all_written = all_written + written if all_written else written
        return all_written

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
        for group in self.groups:
            if num_full > group.num_stored[owner]:
                self._full_blocks.store(group, owner, chain, num_full, tokens)

    def truncate(self, owner: Owner, num_tokens: int) -> list[BlockId]:
        """Take back what was written behind a sequence's first `num_tokens` tokens, of which none may be stored.

        Returns:
            The blocks that are still held and filled otherwise now: the last one of each group, if it is partial.
        """
        return [block for group in self.groups if (block := group.truncate(owner, num_tokens)) is not None]

    def leave_unstored(self, owner: Owner, num_computed: int) -> None:
        """Keep the blocks that are full now out of the prefix index: only those that become full later enter it."""
        for group in self.groups:
            group.num_stored[owner] = max(group.num_stored[owner], num_computed // self.block_size)

    def pass_windows(self, owner: Owner, num_computed: int) -> None:
        """Give back what no later token of the sequence can see, once it has computed so many and was forked, if so."""
        if self.has_windows:
            for group in self.groups:
                group.pass_window(owner, num_computed)

    # ------------------------------------------------------------------ sharing and end

    def fork(self, parent: Owner, child: Owner, num_tokens: int) -> int:
        """Give `child` block tables that share the blocks of `parent`'s first `num_tokens` tokens.

        Returns:
            The number of tokens shared. It is `num_tokens`, but for two cases: when the parent has filled the last of
            these blocks with tokens of its own and the prefix index knows it, the block is left out. The child would
            write over content that others may look up. And when the parent has given back what the child would see in
            a group with a window, nothing is shared.
        """
        assert child not in self._tables, f"{child} already has a block table"
        num_full, num_in_partial = divmod(num_tokens, self.block_size)
        hashes = self.pool.hashes
        if num_in_partial and any(hashes[group.tables[parent][num_full]] is not None for group in self.groups):
            num_tokens -= num_in_partial
        if self.has_windows and not all(group.can_fork(parent, num_tokens) for group in self.groups):
            num_tokens = num_full = 0
        num_blocks = -(-num_tokens // self.block_size)
        shared = [group.fork(parent, child, num_blocks, num_full) for group in self.groups]
        if self._log.active:
            if self._holds.keeps(parent):  # it has two tables: blocks have to be named
                for group, blocks in zip(self.groups, shared, strict=True):
                    self._emit_shared(child, blocks, group.number)
            else:
                number, *others = (len(blocks) for blocks in shared)
                self._log.append(SequenceForked(parent.request, parent.sequence, child.sequence, number, others))
        self.pass_windows(child, num_tokens)  # the parent may hold more: it has not passed its last chunk yet
        return num_tokens

    def join(self, parent: Owner, child: Owner, num_tokens: int) -> None:
        """Make `child`'s block tables those of `parent`'s first `num_tokens` tokens, all by reference.

        What both have already stays; the rest of the child's is given up. No block is needed or copied.
        """
        assert child not in self._holds, f"a transfer knows the blocks of {child}"
        for group in self.groups:
            shared = group.join(parent, child, num_tokens)
            if shared and self._log.active:
                self._emit_shared(child, shared, group.number)

    def release(self, owner: Owner, reason: ReleaseReason) -> None:
        """Drop a sequence's block tables; does nothing when it has none."""
        if owner not in self._tables:
            return
        held = [group.close(owner) for group in self.groups]
        if not self._holds.keep(owner, held, reason):
            self._release(owner, held, reason)

    # ------------------------------------------------------------------ transfers

    def hold(self, owner: Owner) -> None:
        """Keep the blocks of a sequence's tables used even if they are released: a transfer reads or writes them.

        The sequence may get other block tables meanwhile, which are not held. Holds end in the order in which they
        began.
        """
        assert owner in self._tables, f"{owner} has no block table"
        self._holds.begin(owner)

    def end_hold(self, owner: Owner) -> None:
        """End the oldest hold of a sequence; a table that was released becomes free with its last one."""
        kept = self._holds.end(owner)
        if kept is not None:
            self._release(owner, kept.blocks, kept.reason)

    @property
    def num_holds(self) -> int:
        """Sequences whose blocks take part in transfers: nobody may move these blocks."""
        return len(self._holds)

    def rebuild(self, tables: Mapping[Owner, Sequence[int]], num_distinct: int) -> list[BlockId] | None:
        """Give sequences of one request block tables that share as `tables` says, in new blocks of the one group.

        Args:
            tables: for each sequence numbers from 0 to `num_distinct` - 1; equal numbers stand for one block. Each
                number occurs.
            num_distinct: how many there are.

        Returns:
            The block of each number; None, with nothing changed, when too few are free.
        """
        assert self._is_plain, "tiers serve one group with full attention"
        return self._rebuilder.rebuild(tables, num_distinct)

    def num_blocks_freed_by(self, owners: Iterable[Owner]) -> int:
        """Return how many blocks would become free if all `owners` were released. Shared and pinned blocks stay."""
        return num_blocks_freed(owners, self.groups, self.pool)

    def num_distinct_blocks(self, owners: Sequence[Owner]) -> int:
        """Return how many blocks the sequences hold together, over all groups."""
        if len(owners) == 1:
            return sum(len(group.held(owners[0])) for group in self.groups)
        return len({block for owner in owners for group in self.groups for block in group.held(owner)})

    def resize(self, plan: Relocation) -> None:
        """Give the pool another number of blocks as `BlockPool.plan_resize` said just now; O(blocks)."""
        assert not self.num_holds, "a transfer knows blocks by their ids"
        self.pool.resize(plan)
        for group in self.groups:
            for table in group.tables.values():
                table[:] = map(plan.place_of, table)

    def lay_out(self, layout: Layout, block_bytes: int) -> None:
        """Have blocks of another size as `plan_layout` said just now for the tables of all sequences; O(blocks).

        Nothing is cached afterwards: whoever knows the tokens stores full blocks anew.
        """
        assert not self.num_holds, "a transfer knows blocks by their ids"
        assert len(layout.tables) == len(self._tables) * len(self.groups), "every table has its place"
        self.pool.lay_out(layout.num_blocks, layout.ref_counts, layout.filled_slots, layout.groups)
        self.block_size = layout.block_size
        if self._full_blocks.contents is not None:
            self._full_blocks.contents = StoredContents(layout.block_size)
        for group in self.groups:
            of_group = {owner: each for (number, owner), each in layout.tables.items() if number == group.number}
            group.lay_out(layout.block_size, of_group)
        if self._log.active:
            self._log.append(laid_out_event(layout, block_bytes))

    # ------------------------------------------------------------------ truth

    def to_states(self) -> list[SequenceState]:
        """Return all block tables for a snapshot."""
        return table_states(self.groups, self._holds)

    def check_integrity(self) -> None:
        """Verify the pool's invariants and that reference counts equal occurrences in tables.

        Raises:
            CacheCorruption: with the equation that does not hold.
        """
        self.pool.check_integrity()
        check_tables(self.pool.ref_counts, self.pool.groups, all_tables(self.groups, self._holds))

    # ------------------------------------------------------------------ parts

    def _give_back(
        self, owner: Owner, reused: Sequence[list[BlockId]], tables: Sequence[list[BlockId]], num_hits: int
    ) -> None:
        """Undo what `open` has taken: the pool refused the blocks behind it."""
        for group, hits, table in zip(self.groups, reused, tables, strict=True):
            blocks = [*hits, *table[num_hits:]]
            if blocks:
                self.pool.release(blocks[::-1], owner, "truncated", group.number)

    def _release(self, owner: Owner, held: Sequence[list[BlockId]], reason: ReleaseReason) -> None:
        for group, blocks in zip(self.groups, held, strict=True):
            self.pool.release(blocks, owner, reason, group.number)

    def _emit_shared(self, owner: Owner, blocks: Sequence[BlockId], group: int) -> None:
        self._log.append(BlocksShared(owner.request, owner.sequence, list(blocks), group=GROUPS[group]))
