"""Events of single blocks: who took them, shared them, filled them, lost them.

From these alone (and `StepScheduled` for filled slots) a ledger rebuilds the pool: a block is *used* while at least one
block table contains it, else *cached* when it still has a hash, else *empty*. Numbers 10 to 29.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, get_args

import msgspec

from kvwatch.telemetry import metrics
from kvwatch.telemetry.schema import Event, each_of, event, identity, label, size_of, value

NS = 1e-9

Tier = Literal["device", "host", "disk", "external"]
"""Where blocks lie: with the model, in the machine's memory, in its disk folder, or somewhere that others share."""

Group = Literal["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"]
"""KV groups by number: layers of one kind of attention, which have block tables of their own over the common pool."""

GROUPS: tuple[Group, ...] = get_args(Group)
AllocationReason = Literal["prefill", "decode", "cow", "restore", "swap", "offload"]
ReleaseReason = Literal[
    "finished", "aborted", "preempted", "cow", "window", "truncated", "restored", "offloaded"
]  # fmt: skip
UnpinCause = Literal["asked", "reset", "rebuild"]
EvictionReason = Literal["pressure", "reset", "resize", "removed", "unreadable"]


@event(
    10, "block.allocated", "Empty blocks were taken from the pool and appended to a sequence's block table.",
    feeds=(metrics.KV_BLOCK_ALLOCATIONS.count(size_of("block_ids")),),
)  # fmt: skip
class BlocksAllocated(Event):
    """With reason `cow` the block is not appended: the `BlocksCopied` that follows puts it in its source's place."""

    request: Annotated[str, identity(1, "Request that owns the blocks.")]
    sequence: Annotated[int, identity(2, "Sequence of the request, from 0.")]
    block_ids: Annotated[list[int], identity(3, "Blocks taken, in table order.")]
    reason: Annotated[AllocationReason, label(4, "What the blocks are for.")]
    tier: Annotated[Tier, label(5, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(6, "KV group of the blocks.")] = "0"


@event(
    11, "block.released", "A sequence gave up table entries; each block's reference count fell by one.",
    feeds=(metrics.KV_BLOCK_RELEASES.count(size_of("block_ids")),),
)  # fmt: skip
class BlocksReleased(Event):
    """With reason `cow` the block has already been replaced in the table; else the entries leave it."""

    request: Annotated[str, identity(1, "Request that owned the blocks.")]
    sequence: Annotated[int, identity(2, "Sequence of the request, from 0.")]
    block_ids: Annotated[list[int], identity(3, "Blocks given up, in the order in which they become free: tail first.")]
    reason: Annotated[ReleaseReason, label(4, "Why they were given up.")]
    tier: Annotated[Tier, label(5, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(6, "KV group of the blocks.")] = "0"


@event(
    12, "block.stored", "Blocks became full and entered the prefix index.",
    feeds=(metrics.KV_BLOCK_STORES.count(size_of("hashes")),),
)  # fmt: skip
class BlocksStored(Event):
    """Blocks of one sequence, consecutive in its table; `parent` is the hash of the block before the first.

    In a tier behind the device, blocks of several sequences in any order: then `parents` says what is before each.
    Of a foreign engine: hashes that became resident; nothing tells in which blocks, so there are no block ids.
    """

    hashes: Annotated[list[bytes], identity(1, "Block hashes, one for each block.")]
    block_ids: Annotated[list[int], identity(2, "Blocks that were stored.")]
    parent: Annotated[bytes | None, identity(3, "Hash of the preceding block; none at the start of a sequence.")]
    tier: Annotated[Tier, label(4, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(5, "KV group of the blocks.")] = "0"
    request: Annotated[str, identity(6, "Request that computed them.")] = ""
    sequence: Annotated[int, identity(7, "Sequence of the request, from 0.")] = 0
    first_index: Annotated[int, value(8, "Place of the first of them in the sequence's block table.", "blocks")] = 0
    token_ids: Annotated[
        list[list[int]] | None, identity(9, "Token ids of each block; none unless the engine was told to give them.")
    ] = None
    parents: Annotated[
        list[bytes] | None,
        identity(10, "Hash of the block before each, empty for none or unknown; none where hashes and parent say it."),
    ] = None


@event(
    13, "block.evicted", "Cached blocks lost their content and became empty.",
    feeds=(
        metrics.KV_BLOCK_EVICTIONS.count(size_of("hashes")),
        metrics.KV_BLOCK_LIFETIME.observe(each_of("ages_ns", NS)),
        metrics.KV_BLOCK_IDLE.observe(each_of("idles_ns", NS)),
    ),
)  # fmt: skip
class BlocksEvicted(Event):
    """Emitted before the allocation that needed the room. With reason `reset` see `CacheCleared`, which follows.

    Of a foreign engine: hashes of which no copy is resident any more, without block ids, idle times and hits; ages
    since they became resident, where that is known.
    """

    # An engine that makes room is in a hurry: it may put the times themselves where ages and idle times belong, as
    # tuples. Whoever reads the event finds the ages.
    is_settled_late: ClassVar[bool] = True

    hashes: Annotated[list[bytes], identity(1, "Hashes that left the prefix index.")]
    block_ids: Annotated[list[int], identity(2, "Blocks that became empty, oldest first.")]
    ages_ns: Annotated[list[int], value(3, "Time since each block was allocated.", "ns")]
    idles_ns: Annotated[list[int], value(4, "Time since each block was last released.", "ns")]
    hits: Annotated[list[int], value(5, "Prefix hits of each block during its life.", "1")]
    reason: Annotated[
        EvictionReason, label(6, "Why; `removed` where a foreign engine does not say it.", foreign_values=("removed",))
    ]
    request: Annotated[str, identity(7, "Request for which room was made; empty for a reset.")]
    tier: Annotated[Tier, label(8, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(9, "KV group of the blocks.")] = "0"

    def settle(self) -> None:
        """Compute ages and idle times where the emitter has only noted times, which are in tuples."""
        now = self.time_ns
        ages: Sequence[int] = self.ages_ns
        if isinstance(ages, tuple):
            self.ages_ns = [now - time_ns for time_ns in ages]
        idles: Sequence[int] = self.idles_ns
        if isinstance(idles, tuple):
            self.idles_ns = [now - time_ns for time_ns in idles]


@event(
    14, "block.reused", "A prefix hit: blocks with known content were appended to a sequence's block table.",
    feeds=(metrics.KV_BLOCK_REUSE_GAP.observe(each_of("gaps_ns", NS)),),
)  # fmt: skip
class BlocksReused(Event):
    """Each block's reference count rose by one; those that were cached became used."""

    request: Annotated[str, identity(1, "Request that hit.")]
    sequence: Annotated[int, identity(2, "Sequence of the request, from 0.")]
    block_ids: Annotated[list[int], identity(3, "Blocks reused, in table order.")]
    gaps_ns: Annotated[list[int], value(4, "For each block that was free: time since its release.", "ns")]
    tier: Annotated[Tier, label(5, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(6, "KV group of the blocks.")] = "0"


@event(
    15, "block.copied", "Shared blocks were copied since a sequence is about to write to them.",
    feeds=(metrics.KV_BLOCK_COPIES.count(size_of("sources")),),
)  # fmt: skip
class BlocksCopied(Event):
    """In the sequence's block table each source is replaced by its destination, which holds the same tokens."""

    request: Annotated[str, identity(1, "Request that writes.")]
    sequence: Annotated[int, identity(2, "Sequence that writes.")]
    sources: Annotated[list[int], identity(3, "Shared blocks.")]
    destinations: Annotated[list[int], identity(4, "Their copies, of which the sequence is the only owner.")]
    tier: Annotated[Tier, label(5, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(6, "KV group of the blocks.")] = "0"


@event(16, "block.cache_cleared", "The prefix cache was reset: no block has a hash any more.")
class CacheCleared(Event):
    """Cached blocks became empty; used blocks go on and become empty when released."""

    block_ids: Annotated[list[int], identity(1, "Used blocks that lost their hash.")]
    tier: Annotated[Tier, label(2, "Tier.")] = "device"
    actor: Annotated[str, identity(3, "Who asked for it; empty if nobody said.")] = ""
    reason: Annotated[str, identity(4, "Why, in the words of whoever asked.")] = ""


@event(
    17, "block.allocation_failed", "A sequence needed more blocks than were free; nothing was changed.",
    feeds=(metrics.KV_ALLOCATION_FAILURES.count(),),
)  # fmt: skip
class AllocationFailed(Event):
    """Check, then act: a failed allocation leaves pool and tables as they were."""

    request: Annotated[str, identity(1, "Request that asked.")]
    needed: Annotated[int, value(2, "Blocks needed.", "blocks")]
    available: Annotated[int, value(3, "Blocks that could be had (free, above the watermark on admission).", "blocks")]
    reason: Annotated[Literal["admission", "growth"], label(4, "Whether a request wanted to start or to go on.")]


@event(18, "block.relocated", "Used and cached blocks moved elsewhere in the pool, with everything they hold.")
class BlocksRelocated(Event):
    """Destinations were empty; sources are. Tables, reference counts, hashes and filled slots name the new places."""

    sources: Annotated[list[int], identity(1, "Blocks that moved.")]
    destinations: Annotated[list[int], identity(2, "Where each of them is now; none of them is also a source.")]
    tier: Annotated[Tier, label(3, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(4, "KV group of the blocks.")] = "0"


@event(21, "block.laid_out", "The blocks of a tier were made anew: other size, other tables, nothing cached.")
class BlocksLaidOut(Event):
    """All that a tier holds from now on; what was known of its blocks and hashes before is void."""

    num_blocks: Annotated[int, value(1, "Blocks of the tier, the null block included.", "blocks")]
    block_size_tokens: Annotated[int, value(2, "Tokens in one block.", "tokens")]
    block_bytes: Annotated[int, value(3, "Size of one block over all layers; 0 if that is not known.", "bytes")]
    requests: Annotated[list[str], identity(4, "Request of each block table.")] = msgspec.field(default_factory=list)
    sequences: Annotated[list[int], identity(5, "Sequence of each.")] = msgspec.field(default_factory=list)
    groups: Annotated[list[int], identity(6, "KV group of each, by its number.")] = msgspec.field(default_factory=list)
    table_lengths: Annotated[list[int], value(7, "Blocks of each.", "blocks")] = msgspec.field(default_factory=list)
    block_ids: Annotated[list[int], identity(8, "The tables one after the other.")] = msgspec.field(
        default_factory=list
    )
    written_block_ids: Annotated[list[int], identity(9, "Blocks that hold something.")] = msgspec.field(
        default_factory=list
    )
    filled_slots: Annotated[list[int], value(10, "Filled slots of each of them.", "tokens")] = msgspec.field(
        default_factory=list
    )
    tier: Annotated[Tier, label(11, "Tier.")] = "device"
    ignored_files: Annotated[
        dict[str, int], value(12, "Files in the tier's folder that are of no use from now on, by why.", "1")
    ] = msgspec.field(default_factory=dict)


@event(20, "block.shared", "Blocks of one of a request's sequences were appended to another one's block table.")
class BlocksShared(Event):
    """Each block's reference count rose by one.

    Rebuilds the tables of a request that was swapped out, and lets a beam go on from another one's beginning.
    """

    request: Annotated[str, identity(1, "Request that owns the blocks.")]
    sequence: Annotated[int, identity(2, "Sequence whose table grows, from 0.")]
    block_ids: Annotated[list[int], identity(3, "Used blocks, in table order.")]
    tier: Annotated[Tier, label(4, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(5, "KV group of the blocks.")] = "0"


@event(
    22, "block.duplicated", "Full blocks did not enter the prefix index: another block holds their content already.",
    feeds=(metrics.PREFIX_CACHE_DUPLICATE_BLOCKS.count(size_of("block_ids")),),
)  # fmt: skip
class BlocksDuplicated(Event):
    """Several sequences computed the same at the same time. The blocks serve their owner and are empty afterwards."""

    request: Annotated[str, identity(1, "Request that computed them.")]
    sequence: Annotated[int, identity(2, "Sequence of the request, from 0.")]
    block_ids: Annotated[list[int], identity(3, "Blocks that nobody else can find.")]
    originals: Annotated[list[int], identity(4, "For each of them the block that is found instead.")]
    tier: Annotated[Tier, label(5, "Tier of the blocks.")] = "device"
    group: Annotated[Group, label(6, "KV group of the blocks.")] = "0"


@event(23, "block.prefix_pinned", "Somebody pinned a prefix: its blocks are not evicted until it is unpinned.")
class PrefixPinned(Event):
    """All content of it is in the device's prefix index, used or cached. What is pinned several times counts once."""

    pin: Annotated[str, identity(1, "Name of the pin.")]
    hashes: Annotated[list[bytes], identity(2, "Content that stays, of all KV groups.")]
    num_tokens: Annotated[int, value(3, "Tokens of the prefix that stay.", "tokens")]
    actor: Annotated[str, identity(4, "Who pinned it.")] = ""
    reason: Annotated[str, identity(5, "Why, in the words of whoever asked.")] = ""


@event(24, "block.prefix_unpinned", "A pin ended: blocks that no other pin names may be evicted again, last of all.")
class PrefixUnpinned(Event):
    """Those that nobody uses are cached, and free from now on."""

    pin: Annotated[str, identity(1, "Name of the pin.")]
    hashes: Annotated[list[bytes], identity(2, "Content that it kept.")]
    cause: Annotated[UnpinCause, label(3, "What ended it.")]
    actor: Annotated[str, identity(4, "Who ended it.")] = ""
    reason: Annotated[str, identity(5, "Why, in the words of whoever asked.")] = ""


@event(
    25, "block.prefix_mismatched", "A block that was found under a hash holds something else; it was not used.",
    feeds=(metrics.PREFIX_CACHE_MISMATCHES.count(),),
)  # fmt: skip
class PrefixMismatched(Event):
    """Only in strict mode, which compares token ids. Never, unless hashing or the index has a defect."""

    request: Annotated[str, identity(1, "Request that looked the prefix up.")]
    block_hash: Annotated[bytes, identity(2, "The hash.")]
    index: Annotated[int, value(3, "Place of the block in the prefix; hits end there.", "blocks")]
