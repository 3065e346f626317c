"""Prefix hits in tiers behind the device: their blocks are copied into the block table of the sequence that hit.

A hit may lie partly in the host and partly on the disk: each part is one transfer, carried out in order. What counts is
the leading run of good blocks over all parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.contracts.tiers import TierHit, TransferKind, TransferOutcome
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.memory.tiers.desk import Transfer, TransferDesk
from kvwatch_engine.memory.tiers.levels import Level
from kvwatch_engine.memory.tiers.speed import TransferSpeed
from kvwatch_engine.memory.tiers.stores import BlockStore
from kvwatch_engine.memory.tiers.worker import Job


@dataclass(slots=True, eq=False)
class Hit:
    """All parts of one restore."""

    owner: Owner
    parts: list[Transfer] = field(default_factory=list)
    """Those that have not ended."""
    num_good: int = 0
    """Leading blocks that arrived."""
    is_short: bool = False
    """Whether less was there than had been found."""
    is_broken: bool = False
    """Whether a block is missing: what comes behind it is of no use."""
    error: str = ""
    """Why the run of good blocks ended before the hit did."""
    is_told: bool = False
    """The scheduler has its answer."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Part of a hit that is kept where it is: blocks of one tier, held by the sequence."""

    level: Level
    blocks: list[BlockId]
    hashes: tuple[BlockHash, ...]
    num_missing: int
    """Blocks of this part that were found, and are gone."""


class Restore:
    """Engine thread only."""

    def __init__(
        self,
        manager: BlockManager,
        levels: Sequence[Level],
        device: BlockStore[int],
        desk: TransferDesk,
        speed: TransferSpeed,
    ) -> None:
        """Serve hits in `levels`, nearest first."""
        self._manager = manager
        self._levels = levels
        self._device = device
        self._desk = desk
        self._speed = speed
        self._claims: dict[Owner, list[Claim]] = {}

    def find(self, hashes: Sequence[BlockHash]) -> list[TierHit]:
        """Return which leading part of `hashes` the tiers hold, nearest tier first for each.

        What was found is evicted last from now on: the request that asks is about to make room for itself.
        """
        runs: list[tuple[Level, list[BlockId], list[BlockHash]]] = []
        for content in hashes:
            found = self._find(content)
            if found is None:
                break
            level, block = found
            if not runs or runs[-1][0] is not level:
                runs.append((level, [], []))
            runs[-1][1].append(block)
            runs[-1][2].append(content)
        for level, blocks, _ in reversed(runs):
            level.pool.touch(blocks)
        return [TierHit(level.tier, tuple(run)) for level, _, run in runs]

    def claim(self, owner: Owner, hits: Sequence[TierHit]) -> None:
        """Hold what was found for a sequence, up to the first block that is gone."""
        assert owner not in self._claims, f"{owner} has claimed something already"
        claims = self._claims[owner] = []
        for hit in hits:
            level = next(level for level in self._levels if level.tier == hit.tier)
            blocks = _leading(level, hit.hashes)
            if blocks:
                level.pool.reuse(blocks, owner)
            count = len(blocks)
            claims.append(Claim(level, blocks, hit.hashes[:count], len(hit.hashes) - count))
            if claims[-1].num_missing:
                return

    def end_claim(self, owner: Owner) -> None:
        """Let go of what a sequence has claimed."""
        for claim in self._claims.pop(owner):
            if claim.blocks:
                claim.level.pool.release(claim.blocks[::-1], owner, "aborted")

    def begin(self, owner: Owner, first_index: int, hits: Sequence[TierHit]) -> None:
        """Begin to fill the blocks of a sequence's table from `first_index` on."""
        if owner not in self._claims:
            self.claim(owner, hits)
        hit = Hit(owner)
        table = self._manager.table(owner)
        for claim in self._claims.pop(owner):
            targets = table[first_index : first_index + len(claim.blocks)]
            first_index += len(targets)
            if targets:
                self._begin_part(hit, claim, targets)
            if claim.num_missing:
                missing, tier = claim.num_missing, claim.level.tier
                self._desk.emit_not_begun("restore", owner.request, (tier, "device"), "missing", missing)
                hit.is_short = True
        if not hit.parts:
            self._desk.tell(self._outcome(hit))

    # ------------------------------------------------------------------ parts

    def _find(self, content: BlockHash) -> tuple[Level, BlockId] | None:
        for level in self._levels:
            block = level.pool.find(content)
            if block is not None:
                return level, block
        return None

    def _begin_part(self, hit: Hit, claim: Claim, targets: list[BlockId]) -> None:
        level = claim.level
        self._manager.hold(hit.owner)
        job = Job(level.store, level.keys(claim.blocks, claim.hashes), self._device, targets)
        end = partial(self._end_part, hit, level, claim.blocks, targets)
        late = partial(self._tell_late, hit)
        part = self._desk.begin("restore", hit.owner.request, (level.tier, "device"), job, end, late)
        hit.parts.append(part)

    def _end_part(
        self, hit: Hit, level: Level, blocks: list[BlockId], targets: list[BlockId], transfer: Transfer
    ) -> TransferOutcome | None:
        job, count, manager = transfer.job, transfer.num_arrived, self._manager
        if count:
            size = manager.block_size
            for block in targets[:count]:
                manager.pool.filled_slots[block] = size
            self._desk.emit_arrived(transfer, blocks[:count], targets[:count], [size] * count)
            if level.tier == "host":
                self._speed.note("in", count, job.duration_ns)
        if count < len(blocks):
            self._desk.emit_failed(transfer)
        level.pool.release(blocks[::-1], hit.owner, "restored")
        if job.reason and job.num_done < len(blocks):
            level.lose(blocks[job.num_done], job.reason)
        manager.end_hold(hit.owner)
        if not hit.is_broken:
            hit.num_good += count
        if count < len(blocks) and not hit.is_broken:
            hit.is_broken, hit.error = True, job.reason
        hit.parts.remove(transfer)
        if hit.parts or hit.is_told or transfer.is_dropped:
            return None
        return self._outcome(hit)

    def _tell_late(self, hit: Hit, transfer: Transfer) -> TransferOutcome | None:
        """Give the hit up. The blocks stay held until the worker has let go of them, and nobody uses them meanwhile."""
        for other in hit.parts:
            if other is not transfer:
                self._desk.drop(other)
        if hit.is_told:
            return None
        hit.is_broken = hit.is_told = True
        self._manager.release(hit.owner, "truncated")
        return TransferOutcome(hit.owner.request, TransferKind.RESTORE, 0, "deadline", is_given_up=True)

    def _outcome(self, hit: Hit) -> TransferOutcome:
        hit.is_told = True
        error = hit.error or ("missing" if hit.is_short else "")
        return TransferOutcome(hit.owner.request, TransferKind.RESTORE, hit.num_good, error)


def _leading(level: Level, hashes: Sequence[BlockHash]) -> list[BlockId]:
    blocks: list[BlockId] = []
    for content in hashes:
        block = level.pool.find(content)
        if block is None:
            break
        blocks.append(block)
    return blocks
