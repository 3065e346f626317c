"""The block pool: which blocks are used, cached or empty, how often each is referred to, and what each holds.

    EMPTY ──allocate──▶ USED ──last release, no hash──▶ EMPTY
                         │ ▲
      last release, hash │ │ reuse (prefix hit)
                         ▼ │
                        CACHED ──evict (on demand, before an allocation)──▶ EMPTY

A cached block whose content is pinned is not free: it cannot be evicted.

Knows blocks and their owners' names, not block tables, tokens or tensors. What blocks hold is up to `prefix_index.py`,
what is noted of them to `block_columns.py`. Emits block events where they happen.

Lists that an operation is given or returns go into its event as they are: nobody changes them afterwards.
"""

from collections.abc import Callable, Sequence

from kvwatch.telemetry.events import BlocksAllocated, BlocksReleased, BlocksReused, CacheCleared
from kvwatch.telemetry.events.block import GROUPS, AllocationReason, EvictionReason, ReleaseReason, Tier
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import TierState
from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.contracts.errors import CacheCorruption
from kvwatch_engine.memory.block_columns import BlockColumns, BlockHistory
from kvwatch_engine.memory.block_events import BlockEvents
from kvwatch_engine.memory.eviction_memory import EvictionMemory
from kvwatch_engine.memory.free_list import FreeList
from kvwatch_engine.memory.integrity import check_blocks, check_pinned
from kvwatch_engine.memory.owner import Owner, StoredRun
from kvwatch_engine.memory.prefix_index import PrefixIndex
from kvwatch_engine.memory.relocation import Relocation, plan_relocation

__all__ = ["BlockPool", "OnEvict", "Owner", "StoredRun"]

OnEvict = Callable[[Sequence[BlockId], Sequence[BlockHash]], None]
"""Is given blocks that make room, and their hashes, before anything else can be written to them. Does not raise."""


class BlockPool:
    """Blocks of one tier. Engine thread only.

    Invariants, after every operation: capacity = empty + cached + used; a block is in the free list exactly when its
    reference count is 0 and its content is not pinned; the prefix index and `hashes` are each other's inverse; what is
    pinned is in the prefix index.
    """

    def __init__(self, num_blocks: int, log: EventLog, tier: Tier = "device", num_groups: int = 1) -> None:
        self.tier: Tier = tier
        self.num_groups = num_groups
        """KV groups that take blocks."""
        self.on_evict: OnEvict | None = None
        """Called when cached blocks make room for others; none while there is no tier behind this one."""
        self.num_blocks = num_blocks
        """Blocks including the null block."""
        self._columns = BlockColumns(num_blocks, num_groups)
        self.groups = self._columns.groups
        """Group of each used or cached block; read-only for others. Empty while there is only one group."""
        self.ref_counts = self._columns.ref_counts
        """Block tables that contain the block; read-only for others."""
        self.filled_slots = self._columns.filled_slots
        """Slots written since the block was allocated; the block manager writes it."""
        self.pinned: dict[BlockHash, int] = {}
        """Content that is not evicted, and how many pins it has; read-only for others."""
        self.num_idle_pinned = 0
        """Blocks that are pinned and not used: cached, and not free."""
        self.num_references = 0
        """Sum of the reference counts: entries of all block tables."""
        self._log = log
        self._index = PrefixIndex(num_blocks)
        self._evicted = EvictionMemory()  # while somebody listened
        self._free = FreeList(1, num_blocks)
        self._events = BlockEvents(log, tier, self._columns)
        self.hashes = self._index.hashes
        """Hash of the block's content if the prefix index knows it; read-only for others."""
        self.parents = self._index.parents
        """Hash of the block before it in the sequence that stored it; only of blocks that have a hash."""

    # ------------------------------------------------------------------ counts

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, evicting cached ones if need be."""
        return len(self._free)

    @property
    def num_empty(self) -> int:
        """Free blocks without content."""
        return self._free.num_empty

    @property
    def num_cached(self) -> int:
        """Unused blocks whose content may be reused: free, but for those that are pinned."""
        return self._free.num_cached + self.num_idle_pinned

    @property
    def num_used(self) -> int:
        """Blocks in at least one block table."""
        return self.capacity - len(self._free) - self.num_idle_pinned

    # ------------------------------------------------------------------ operations

    def find(self, content: BlockHash) -> BlockId | None:
        """Return the block that holds `content`, used or cached. O(1); changes nothing."""
        return self._index.find(content)

    def find_run(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the blocks that hold the leading part of `hashes` that is here; changes nothing."""
        return self._index.find_run(hashes)

    def cached(self) -> list[tuple[BlockId, BlockHash]]:
        """Return the cached blocks and what they hold, the next to be evicted first, pinned ones last. O(cached)."""
        blocks = [*self._free.cached(), *self._idle_pinned()]
        return [(block, content) for block in blocks if (content := self.hashes[block]) is not None]

    def is_pinned(self, block: BlockId) -> bool:
        """Return whether a block's content is pinned."""
        return bool(self.pinned) and self.hashes[block] in self.pinned

    def num_held_since(self, time_ns: int) -> int:
        """Return how many used blocks were allocated at a monotonic time or before. O(blocks)."""
        return self._columns.num_held_since(time_ns)

    def history(self, block: BlockId) -> BlockHistory:
        """Return what has become of a block since it was allocated."""
        return self._columns.history(block)

    def touch(self, blocks: Sequence[BlockId]) -> None:
        """Let those of `blocks` that are cached be evicted last, the first of them last of all."""
        for block in reversed(blocks):
            if self.ref_counts[block] == 0 and not self.is_pinned(block):
                self._free.touch_cached(block)

    def would_have_hit(self, content: BlockHash, *, is_first: bool = False) -> bool:
        """Return whether `content` is here, or was evicted for want of room not long ago while somebody listened."""
        return content in self._index or self._evicted.knows(content, is_first=is_first)

    def num_cached_of(self, blocks: Sequence[BlockId]) -> int:
        """Return how many of `blocks` are free: reusing them lowers the number of free blocks."""
        ref_counts = self.ref_counts
        if self.pinned:
            return sum(1 for block in blocks if ref_counts[block] == 0 and not self.is_pinned(block))
        return [ref_counts[block] for block in blocks].count(0)

    def allocate(self, count: int, owner: Owner, reason: AllocationReason, group: int = 0) -> list[BlockId] | None:
        """Take `count` blocks for `owner` and a KV group, evicting the least recently used cached blocks if need be.

        Returns:
            The blocks, with reference count 1 and no content; None when fewer are free, and then nothing has changed.
        """
        free = self._free
        if count > len(free):
            return None
        blocks = free.take_empty(count)
        if len(blocks) < count:
            evicted = self._evict(count - len(blocks), owner.request, "pressure")
            blocks = blocks + evicted if blocks else evicted
        now, ref_counts, filled_slots = self._log.now_ns, self.ref_counts, self.filled_slots
        allocated, hits = self._columns.allocated_ns, self._columns.hits
        for block in blocks:
            ref_counts[block] = 1
            filled_slots[block] = hits[block] = 0
            allocated[block] = now
        if self.groups:
            for block in blocks:
                self.groups[block] = group
        self.num_references += count
        if blocks and self._log.active:
            self._log.append(
                BlocksAllocated(owner.request, owner.sequence, blocks, reason, self.tier, GROUPS[group])  # type: ignore[arg-type]  # numbers by another name
            )
        return blocks

    def reuse(self, blocks: list[BlockId], owner: Owner, group: int = 0) -> None:
        """Add a reference to blocks of one group found in the prefix index; cached ones become used."""
        now, released, hits = self._log.now_ns, self._columns.released_ns, self._columns.hits
        ref_counts = self.ref_counts
        gaps: list[int] = []
        for block in blocks:
            count = ref_counts[block]
            ref_counts[block] = count + 1
            hits[block] += 1
            if not count:
                if self.pinned and self.is_pinned(block):
                    self.num_idle_pinned -= 1
                else:
                    self._free.remove_cached(block)
                gaps.append(now - released[block])
        self.num_references += len(blocks)
        if self._log.active:
            self._log.append(
                BlocksReused(owner.request, owner.sequence, blocks, gaps, self.tier, GROUPS[group])  # type: ignore[arg-type]  # numbers by another name
            )

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to used blocks, for a fork. The caller emits `SequenceForked`."""
        self.num_references += len(blocks)
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} is not used and cannot be shared"
            self.ref_counts[block] += 1

    def release(self, blocks: list[BlockId], owner: Owner, reason: ReleaseReason, group: int = 0) -> None:
        """Give up one reference to each block of one group, in this order; the last owner's release frees it.

        Give the tail of a chain first: it is evicted first, and a prefix without its tail is still worth something.
        """
        now, released, hashes, pinned = self._log.now_ns, self._columns.released_ns, self.hashes, self.pinned
        ref_counts = self.ref_counts
        add_cached, add_empty = self._free.add_cached, self._free.add_empty
        for block in blocks:
            count = ref_counts[block] - 1
            ref_counts[block] = count
            if count:
                assert count > 0, f"block {block} was released more often than it was taken"
                continue
            released[block] = now
            content = hashes[block]
            if content is None:
                add_empty(block)
            elif pinned and content in pinned:
                self.num_idle_pinned += 1
            else:
                add_cached(block)
        self.num_references -= len(blocks)
        if self._log.active:  # without blocks too: it ends the sequence's empty table
            self._log.append(
                BlocksReleased(owner.request, owner.sequence, blocks, reason, self.tier, GROUPS[group])  # type: ignore[arg-type]  # numbers by another name
            )

    def store(
        self, blocks: list[BlockId], hashes: list[BlockHash], parent: BlockHash | None, source: StoredRun
    ) -> None:
        """Enter full blocks, consecutive in one sequence, into the prefix index.

        A block whose content is already known under another block is left out: it serves its owner and becomes empty
        when released, so that the index names each content once.

        Args:
            blocks: used blocks, full.
            hashes: their hashes.
            parent: hash of the block before the first; None at the start of a sequence, and where they are not
                consecutive.
            source: whose blocks they are, for the event.
        """
        duplicates = self._index.enter(blocks, hashes, source.parents or [parent, *hashes[:-1]])
        if parent is None and source.parents is None and self.tier == "device":
            self._evicted.note_first(hashes[0], self._index)
        if not self._log.active:
            return
        self._events.stored(blocks, hashes, parent, source, duplicates)
        if duplicates:
            originals = [block for place in duplicates if (block := self.find(hashes[place]))]
            self._events.duplicated([blocks[place] for place in duplicates], originals, source)

    def forget(self, block: BlockId) -> None:
        """Drop the content of one cached block, since it cannot be read."""
        assert self.ref_counts[block] == 0, f"block {block} is in use"
        hashes = self._index.drop([block])
        self._evicted.discard(hashes)
        self._free.remove_cached(block)
        self._free.add_empty(block)
        if self._log.active:
            self._events.evicted([block], hashes, "unreadable", "")

    def lay_out(self, num_blocks: int, ref_counts: list[int], filled_slots: list[int], groups: list[int]) -> None:
        """Have other blocks, of which the used ones come first; nothing is cached. O(blocks).

        The caller has copied the content, changes the block tables and tells of all that.

        Args:
            num_blocks: from now on, the null block included.
            ref_counts: of the null block and the used ones.
            filled_slots: of these.
            groups: of these; of no interest where there is only one group.
        """
        self.clear_cache("resize")
        self._columns.lay_out(num_blocks, ref_counts, filled_slots, groups, self._log.now_ns)
        self._index.resize(num_blocks)
        self.num_references = sum(ref_counts)
        self._free = FreeList(len(ref_counts), num_blocks)
        self.num_blocks = num_blocks

    def clear_cache(self, cause: EvictionReason = "reset", actor: str = "", reason: str = "") -> int:
        """Forget all content. Used blocks go on and become empty when released. Nothing may be pinned.

        Args:
            cause: what events call it.
            actor: who asked for it.
            reason: why.

        Returns:
            The number of cached blocks that became empty.
        """
        assert not self.pinned, "whoever clears the cache ends the pins first"
        cached = self._free.num_cached
        if cached:
            for block in self._evict(cached, "", cause):
                self._free.add_empty(block)
        still_used = self._index.clear()
        self._evicted.clear()
        if self._log.active:
            self._log.append(CacheCleared(list(still_used), self.tier, actor, reason))
        return cached

    def pin(self, hashes: Sequence[BlockHash]) -> None:
        """Let content that is here stay until as many `unpin` as `pin` named it."""
        for content in hashes:
            num_pins = self.pinned.get(content, 0)
            if not num_pins and self.ref_counts[block := self._index.block_of(content)] == 0:
                self._free.remove_cached(block)
                self.num_idle_pinned += 1
            self.pinned[content] = num_pins + 1

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """Take a pin back; content without any other may be evicted, last of all, the first of `hashes` last."""
        for content in reversed(hashes):
            self.pinned[content] -= 1
            if self.pinned[content]:
                continue
            del self.pinned[content]
            block = self._index.block_of(content)
            if self.ref_counts[block] == 0:
                self.num_idle_pinned -= 1
                self._free.add_cached(block)

    def plan_resize(self, num_blocks: int) -> Relocation | None:
        """Return how to become a pool of `num_blocks` blocks; None when the used ones do not fit. Changes nothing."""
        return plan_relocation(self.ref_counts, self._free.cached(), num_blocks, self._idle_pinned())

    def resize(self, plan: Relocation) -> None:
        """Evict, move and then have the number of blocks that was planned just now; O(blocks).

        The caller moves the content, changes the block tables and tells the new size.
        """
        if plan.num_evictions:
            for block in self._evict(plan.num_evictions, "", "resize"):
                self._free.add_empty(block)
        moves, old, new = plan.moves, self.num_blocks, plan.num_blocks
        self._index.move(moves)
        if moves and self._log.active:
            self._events.relocated(moves)
        self._columns.resize(new, moves)
        self._free.resize(old, new, moves)
        self._index.resize(new)
        self.num_blocks = new

    # ------------------------------------------------------------------ truth

    def to_state(self, *, with_parents: bool = False) -> TierState:
        """Return the pool as plain columns for a snapshot."""
        pairs = zip(self.parents, self.hashes, strict=True) if with_parents else ()
        return TierState(
            tier=self.tier,
            num_blocks=self.num_blocks,
            ref_counts=list(self.ref_counts),
            hashes=list(self.hashes),
            filled_slots=list(self.filled_slots),
            block_groups=list(self.groups),
            parents=[None if content is None else parent for parent, content in pairs],
        )

    def check_integrity(self) -> None:
        """Verify the invariants of the class docstring; O(number of blocks).

        Raises:
            CacheCorruption: with the equation that does not hold.
        """
        idle_pinned = self._idle_pinned()
        check_blocks(self.ref_counts, self._free, self._index, idle_pinned)
        check_pinned(self.pinned, self._index, idle_pinned, self.num_idle_pinned)
        if sum(self.ref_counts) != self.num_references:
            raise CacheCorruption(f"reference counts sum to {sum(self.ref_counts)}, not {self.num_references}")

    # ------------------------------------------------------------------ parts

    def _idle_pinned(self) -> list[BlockId]:
        """Return the blocks that are pinned and not used. O(pinned)."""
        blocks = (self._index.find(content) for content in self.pinned)
        return [block for block in blocks if block is not None and self.ref_counts[block] == 0]

    def _evict(self, count: int, beneficiary: str, reason: EvictionReason) -> list[BlockId]:
        """Drop the content of the `count` least recently used cached blocks; the caller decides where they go."""
        blocks = self._free.take_oldest_cached(count)
        hashes = self._index.drop(blocks)
        if reason != "pressure":
            self._evicted.discard(hashes)
        if self._log.active:
            if reason == "pressure" and self.tier == "device":
                self._evicted.add(hashes, self.num_blocks)
            self._events.evicted(blocks, hashes, reason, beneficiary)
        if self.on_evict is not None and reason == "pressure":
            self.on_evict(blocks, hashes)
        return blocks
