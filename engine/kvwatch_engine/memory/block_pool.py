"""The block pool: which blocks are used, cached or empty, how often each is referred to, and what each holds.

    EMPTY ──allocate──▶ USED ──last release, no hash──▶ EMPTY
                         │ ▲
      last release, hash │ │ reuse (prefix hit)
                         ▼ │
                        CACHED ──evict (on demand, before an allocation)──▶ EMPTY

A cached block whose content is pinned is not free: it cannot be evicted.

Knows blocks and their owners' names, not block tables, tokens or tensors. Emits block events where they happen.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvwatch.telemetry.events import (
    BlocksAllocated,
    BlocksDuplicated,
    BlocksEvicted,
    BlocksReleased,
    BlocksRelocated,
    BlocksReused,
    BlocksStored,
    CacheCleared,
)
from kvwatch.telemetry.events.block import GROUPS, AllocationReason, EvictionReason, ReleaseReason, Tier
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import TierState
from kvwatch_engine.contracts.block import NULL_BLOCK, BlockHash, BlockId
from kvwatch_engine.contracts.errors import CacheCorruption
from kvwatch_engine.memory.eviction_memory import EvictionMemory
from kvwatch_engine.memory.free_list import FreeList
from kvwatch_engine.memory.relocation import Relocation, plan_relocation


class Owner(NamedTuple):
    """A sequence, as events name it."""

    request: str
    sequence: int


class StoredRun(NamedTuple):
    """Where blocks that are stored come from, as their event tells it."""

    owner: Owner
    first_index: int
    """Place of the first block in the owner's block table."""
    token_ids: list[list[int]] | None = None
    """Token ids of each block; none when nobody may know them."""
    group: int = 0
    """KV group of the blocks."""
    parents: list[BlockHash | None] | None = None
    """Hash of the block before each, where they do not follow each other; none where they do."""


class BlockHistory(NamedTuple):
    """What has become of a block since it was allocated. Times are monotonic ns."""

    allocated_ns: int
    released_ns: int
    """When its last owner released it; of no meaning while it is used."""
    num_hits: int
    """Times that its content was found in the prefix index."""


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
        self.groups = [0] * num_blocks if num_groups > 1 else []
        """Group of each used or cached block; read-only for others. Empty while there is only one group."""
        self.on_evict: OnEvict | None = None
        """Called when cached blocks make room for others; none while there is no tier behind this one."""
        self.num_blocks = num_blocks
        """Blocks including the null block."""
        self.ref_counts = [0] * num_blocks
        """Block tables that contain the block; read-only for others."""
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        """Hash of the block's content if the prefix index knows it; read-only for others."""
        self.filled_slots = [0] * num_blocks
        """Slots written since the block was allocated; the block manager writes it."""
        self.parents: list[BlockHash | None] = [None] * num_blocks
        """Hash of the block before it in the sequence that stored it; only of blocks that have a hash."""
        self.pinned: dict[BlockHash, int] = {}
        """Content that is not evicted, and how many pins it has; read-only for others."""
        self.num_idle_pinned = 0
        """Blocks that are pinned and not used: cached, and not free."""
        self.num_references = 0
        """Sum of the reference counts: entries of all block tables."""
        self._log = log
        self._index: dict[BlockHash, BlockId] = {}
        self._free = FreeList(1, num_blocks)
        self._allocated_ns = [0] * num_blocks
        self._released_ns = [0] * num_blocks
        self._hits = [0] * num_blocks
        self._evicted = EvictionMemory()
        """What was evicted for want of room while somebody listened."""

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
        return self._index.get(content)

    def cached(self) -> list[tuple[BlockId, BlockHash]]:
        """Return the cached blocks and what they hold, the next to be evicted first, pinned ones last. O(cached)."""
        evictable = [(block, content) for block in self._free.cached() if (content := self.hashes[block]) is not None]
        return evictable + [(block, content) for block in self._idle_pinned() if (content := self.hashes[block])]

    def is_pinned(self, block: BlockId) -> bool:
        """Return whether a block's content is pinned."""
        return bool(self.pinned) and self.hashes[block] in self.pinned

    def num_held_since(self, time_ns: int) -> int:
        """Return how many used blocks were allocated at a monotonic time or before. O(blocks)."""
        allocated = self._allocated_ns
        return sum(1 for block, count in enumerate(self.ref_counts) if count and allocated[block] <= time_ns)

    def history(self, block: BlockId) -> BlockHistory:
        """Return what has become of a block since it was allocated."""
        return BlockHistory(self._allocated_ns[block], self._released_ns[block], self._hits[block])

    def touch(self, blocks: Sequence[BlockId]) -> None:
        """Let those of `blocks` that are cached be evicted last, the first of them last of all."""
        for block in reversed(blocks):
            if self.ref_counts[block] == 0 and not self.is_pinned(block):
                self._free.touch_cached(block)

    def would_have_hit(self, content: BlockHash) -> bool:
        """Return whether `content` is here, or was evicted for want of room not long ago while somebody listened."""
        return content in self._index or content in self._evicted

    def num_cached_of(self, blocks: Sequence[BlockId]) -> int:
        """Return how many of `blocks` are free: reusing them lowers the number of free blocks."""
        ref_counts = self.ref_counts
        return sum(1 for block in blocks if ref_counts[block] == 0 and not self.is_pinned(block))

    def allocate(self, count: int, owner: Owner, reason: AllocationReason, group: int = 0) -> list[BlockId] | None:
        """Take `count` blocks for `owner` and a KV group, evicting the least recently used cached blocks if need be.

        Returns:
            The blocks, with reference count 1 and no content; None when fewer are free, and then nothing has changed.
        """
        if count > len(self._free):
            return None
        from_empty = min(count, self._free.num_empty)
        blocks = self._free.take_empty(from_empty)
        if count > from_empty:
            blocks += self._evict(count - from_empty, owner.request, "pressure")
        now = self._log.now_ns
        self.num_references += count
        for block in blocks:
            self.ref_counts[block] = 1
            self.filled_slots[block] = 0
            self._allocated_ns[block] = now
            self._hits[block] = 0
        if self.num_groups > 1:
            for block in blocks:
                self.groups[block] = group
        if blocks and self._log.active:
            self._log.append(
                BlocksAllocated(owner.request, owner.sequence, list(blocks), reason, self.tier, GROUPS[group])
            )
        return blocks

    def reuse(self, blocks: Sequence[BlockId], owner: Owner, group: int = 0) -> None:
        """Add a reference to blocks of one group found in the prefix index; cached ones become used."""
        now = self._log.now_ns
        gaps: list[int] = []
        self.num_references += len(blocks)
        for block in blocks:
            if self.ref_counts[block] == 0:
                if self.is_pinned(block):
                    self.num_idle_pinned -= 1
                else:
                    self._free.remove_cached(block)
                gaps.append(now - self._released_ns[block])
            self.ref_counts[block] += 1
            self._hits[block] += 1
        if self._log.active:
            self._log.append(BlocksReused(owner.request, owner.sequence, list(blocks), gaps, self.tier, GROUPS[group]))

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to used blocks, for a fork. The caller emits `SequenceForked`."""
        self.num_references += len(blocks)
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} is not used and cannot be shared"
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[BlockId], owner: Owner, reason: ReleaseReason, group: int = 0) -> None:
        """Give up one reference to each block of one group, in this order; the last owner's release frees it.

        Give the tail of a chain first: it is evicted first, and a prefix without its tail is still worth something.
        """
        now = self._log.now_ns
        self.num_references -= len(blocks)
        for block in blocks:
            count = self.ref_counts[block] - 1
            assert count >= 0, f"block {block} was released more often than it was taken"
            self.ref_counts[block] = count
            if count == 0:
                self._released_ns[block] = now
                content = self.hashes[block]
                if content is None:
                    self._free.add_empty(block)
                elif self.pinned and content in self.pinned:
                    self.num_idle_pinned += 1
                else:
                    self._free.add_cached(block)
        if self._log.active:  # without blocks too: it ends the sequence's empty table
            self._log.append(
                BlocksReleased(owner.request, owner.sequence, list(blocks), reason, self.tier, GROUPS[group])
            )

    def store(
        self,
        blocks: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        source: StoredRun,
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
        first, before, parents = 0, parent, source.parents
        duplicates: list[BlockId] = []
        for place, (block, content) in enumerate(zip(blocks, hashes, strict=True)):
            if content in self._index:
                self._emit_stored(blocks[first:place], hashes[first:place], parent, source, first)
                first, parent = place + 1, content
                duplicates.append(block)
                continue
            self._index[content] = block
            self.hashes[block] = content
            if parents is not None:
                before = parents[place]
            elif place:
                before = hashes[place - 1]
            self.parents[block] = before
        self._emit_stored(blocks[first:], hashes[first:], parent, source, first)
        if duplicates and self._log.active:
            names = dict(zip(blocks, hashes, strict=True))
            originals: list[int] = [self._index[names[block]] for block in duplicates]
            request, sequence = source.owner
            self._log.append(
                BlocksDuplicated(request, sequence, list(duplicates), originals, self.tier, GROUPS[source.group])
            )

    def forget(self, block: BlockId) -> None:
        """Drop the content of one cached block, since it cannot be read."""
        content = self.hashes[block]
        assert content is not None, f"block {block} holds nothing that could be forgotten"
        assert self.ref_counts[block] == 0, f"block {block} is in use"
        del self._index[content]
        self.hashes[block] = None
        self._evicted.discard([content])
        self._free.remove_cached(block)
        self._free.add_empty(block)
        if self._log.active:
            self._emit_evicted([block], [content], "unreadable", "")

    def lay_out(self, num_blocks: int, ref_counts: list[int], filled_slots: list[int], groups: list[int]) -> None:
        """Have other blocks, of which the used ones come first; nothing is cached. O(blocks).

        The caller has copied the content, changes the block tables and tells of all that.

        Args:
            num_blocks: from now on, the null block included.
            ref_counts: of the null block and the used ones.
            filled_slots: likewise.
            groups: likewise; of no interest where there is only one group.
        """
        self.clear_cache("resize")
        num_taken, now = len(ref_counts), self._log.now_ns
        empty = [0] * (num_blocks - num_taken)
        self.ref_counts[:] = ref_counts + empty
        self.filled_slots[:] = filled_slots + empty
        if self.num_groups > 1:
            self.groups[:] = groups + empty
        self._allocated_ns[:] = [now] * num_taken + empty
        self._released_ns[:] = self._hits[:] = [0] * num_blocks
        self.hashes[:] = [None] * num_blocks
        self.parents[:] = [None] * num_blocks
        self.num_references = sum(ref_counts)
        self._free = FreeList(num_taken, num_blocks)
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
        still_used = sorted(self._index.values())
        for block in still_used:
            self.hashes[block] = None
        self._index.clear()
        self._evicted.clear()
        if self._log.active:
            self._log.append(CacheCleared(list(still_used), self.tier, actor, reason))
        return cached

    def pin(self, hashes: Sequence[BlockHash]) -> None:
        """Let content that is here stay until as many `unpin` as `pin` named it."""
        for content in hashes:
            block = self._index[content]
            num_pins = self.pinned.get(content, 0)
            if not num_pins and self.ref_counts[block] == 0:
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
            block = self._index[content]
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
        moves = plan.moves
        for source, destination in moves.items():
            content = self.hashes[source]
            if content is not None:
                self._index[content] = destination
            self.hashes[source] = None
            self.hashes[destination], self.parents[destination] = content, self.parents[source]
        if moves and self._log.active:
            self._emit_relocated(moves)
        columns = [self.ref_counts, self.filled_slots, self._allocated_ns, self._released_ns, self._hits]
        if self.num_groups > 1:
            columns.append(self.groups)
        for column in columns:
            for source, destination in moves.items():
                column[destination] = column[source]
                column[source] = 0
        old, new = self.num_blocks, plan.num_blocks
        self._free.resize(old, new, moves)
        for column in columns:
            column[new:] = [0] * max(0, new - old)
        self.hashes[new:] = [None] * max(0, new - old)
        self.parents[new:] = [None] * max(0, new - old)
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
        free = list(self._free)
        if len(set(free)) != len(free):
            raise CacheCorruption(f"free list holds {len(free) - len(set(free))} blocks twice")
        if NULL_BLOCK in free or self.ref_counts[NULL_BLOCK] != 0 or self.hashes[NULL_BLOCK] is not None:
            raise CacheCorruption("the null block was allocated, hashed or freed")
        unreferenced = {block for block in range(1, self.num_blocks) if self.ref_counts[block] == 0}
        idle_pinned = set(self._idle_pinned())
        if unreferenced - idle_pinned != set(free):
            raise CacheCorruption(
                f"{len(unreferenced)} blocks have no reference, {len(idle_pinned)} of them are pinned, but {len(free)} "
                "are free"
            )
        if len(idle_pinned) != self.num_idle_pinned or not self.pinned.keys() <= self._index.keys():
            raise CacheCorruption(
                f"{len(idle_pinned)} pinned blocks have no reference, not {self.num_idle_pinned}, or pinned content is "
                "gone"
            )
        if min(self.ref_counts) < 0:
            raise CacheCorruption(f"reference count {min(self.ref_counts)} is negative")
        if sum(self.ref_counts) != self.num_references:
            raise CacheCorruption(f"reference counts sum to {sum(self.ref_counts)}, not {self.num_references}")
        inverse = {content: block for block, content in enumerate(self.hashes) if content is not None}
        if inverse != self._index:
            raise CacheCorruption(f"prefix index has {len(self._index)} entries, blocks have {len(inverse)} hashes")
        cached = {block for block in free if self.hashes[block] is not None}
        if cached != set(self._free.cached()):
            listed = self._free.num_cached
            raise CacheCorruption(f"{len(cached)} free blocks have a hash, but {listed} are listed as cached")

    # ------------------------------------------------------------------ parts

    def _idle_pinned(self) -> list[BlockId]:
        """Return the blocks that are pinned and not used. O(pinned)."""
        blocks = (self._index[content] for content in self.pinned if content in self._index)
        return [block for block in blocks if self.ref_counts[block] == 0]

    def _evict(self, count: int, beneficiary: str, reason: EvictionReason) -> list[BlockId]:
        """Drop the content of the `count` least recently used cached blocks; the caller decides where they go."""
        blocks: list[BlockId] = []
        hashes: list[BlockHash] = []
        for _ in range(count):
            block = self._free.take_oldest_cached()
            content = self.hashes[block]
            assert content is not None, f"cached block {block} has no hash"
            del self._index[content]
            self.hashes[block] = None
            blocks.append(block)
            hashes.append(content)
        if reason != "pressure":
            self._evicted.discard(hashes)
        if self._log.active:
            if reason == "pressure" and self.tier == "device":
                self._evicted.add(hashes, self.num_blocks)
            self._emit_evicted(blocks, hashes, reason, beneficiary)
        if self.on_evict is not None and reason == "pressure":
            self.on_evict(blocks, hashes)
        return blocks

    def _emit_evicted(
        self, blocks: list[BlockId], hashes: list[BlockHash], reason: EvictionReason, beneficiary: str
    ) -> None:
        """Report evicted blocks, group by group."""
        if self.num_groups == 1:
            self._log.append(self._evicted_event(blocks, hashes, reason, beneficiary))
            return
        by_group: dict[int, tuple[list[BlockId], list[BlockHash]]] = {}
        for block, content in zip(blocks, hashes, strict=True):
            some_blocks, some_hashes = by_group.setdefault(self.groups[block], ([], []))
            some_blocks.append(block)
            some_hashes.append(content)
        for group, evicted in by_group.items():
            self._log.append(self._evicted_event(*evicted, reason, beneficiary, group))

    def _evicted_event(
        self,
        blocks: list[BlockId],
        hashes: list[BlockHash],
        reason: EvictionReason,
        beneficiary: str,
        group: int = 0,
    ) -> BlocksEvicted:
        now, allocated, released, hits = self._log.now_ns, self._allocated_ns, self._released_ns, self._hits
        return BlocksEvicted(
            list(hashes),
            list(blocks),
            [now - allocated[block] for block in blocks],
            [now - released[block] for block in blocks],
            [hits[block] for block in blocks],
            reason,
            beneficiary,
            self.tier,
            GROUPS[group],
        )

    def _emit_relocated(self, moves: dict[BlockId, BlockId]) -> None:
        """Report blocks that move, group by group; their groups are still those of the places that they leave."""
        by_group: dict[int, dict[BlockId, BlockId]] = {}
        for source, destination in moves.items():
            by_group.setdefault(self.groups[source] if self.groups else 0, {})[source] = destination
        for group, some in by_group.items():
            self._log.append(BlocksRelocated(list(some), list(some.values()), self.tier, GROUPS[group]))

    def _emit_stored(
        self,
        blocks: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        source: StoredRun,
        first: int,
    ) -> None:
        """Report blocks that were stored; `first` is the place of the first of them among those that were given."""
        if not blocks or not self._log.active:
            return
        self._log.append(
            BlocksStored(
                list(hashes),
                list(blocks),
                parent,
                self.tier,
                request=source.owner.request,
                sequence=source.owner.sequence,
                first_index=source.first_index + first,
                token_ids=source.token_ids and source.token_ids[first : first + len(blocks)],
                parents=_told(source.parents, first, first + len(blocks)),
                group=GROUPS[source.group],
            )
        )


def _told(parents: list[BlockHash | None] | None, first: int, end: int) -> list[bytes] | None:
    """Return the parents of some blocks as events tell them."""
    return None if parents is None else [each or b"" for each in parents[first:end]]
