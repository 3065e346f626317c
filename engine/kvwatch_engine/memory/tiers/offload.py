"""Evicted prefix blocks go to the next tier: device to host, host to disk.

When the device's pool evicts, the blocks are read at once, on the engine thread, into staging memory: their places
may be written to in the very next step. The worker carries them on from there. Blocks that the host evicts stay where
they are until the worker has written them to the disk; whoever got their places writes there by a later job.

Nothing is copied before it is evicted: what never loses its place on the device costs nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.events.transfer import TransferFailure
from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool, StoredRun
from kvwatch_engine.memory.tiers.desk import Transfer, TransferDesk
from kvwatch_engine.memory.tiers.levels import DiskLevel, HostLevel, Level
from kvwatch_engine.memory.tiers.speed import TransferSpeed
from kvwatch_engine.memory.tiers.staging import StagingRing
from kvwatch_engine.memory.tiers.stores import BlockStore, MemoryStore
from kvwatch_engine.memory.tiers.tier_pool import NOBODY
from kvwatch_engine.memory.tiers.worker import Job

MAX_BLOCKS_TO_DISK: Final = 256
"""Blocks that may wait for the disk; more are dropped, so that swapped requests do not wait behind them for long."""


class Evicted(NamedTuple):
    """A block that is evicted."""

    block: BlockId
    content: BlockHash
    parent: BlockHash | None
    """Hash of the block before it in its sequence."""


class Offload:
    """Takes in what is evicted. Engine thread only; never raises into the pool that evicts."""

    def __init__(
        self,
        levels: Sequence[Level],
        manager: BlockManager,
        device: BlockStore[int],
        staging: StagingRing,
        desk: TransferDesk,
        speed: TransferSpeed,
    ) -> None:
        """Serve `levels`, nearest first; there is at least one."""
        self._levels = levels
        self._manager = manager
        self._device = device
        self._staging = staging
        self._staging_store = MemoryStore(lambda: staging.memory)
        self._desk = desk
        self._speed = speed
        self._under_way: set[BlockHash] = set()
        if len(levels) > 1:
            levels[0].pool.on_evict = self.take_from_host

    def take_from_device(self, blocks: Sequence[BlockId], hashes: Sequence[BlockHash]) -> None:
        """Read blocks that the device's pool evicts, and begin to carry them to the nearest tier."""
        level = self._levels[0]
        wanted = self._unknown(self._manager.pool, blocks, hashes, self._levels)
        places = self._staging.take(len(wanted))
        targets = level.take(len(places))
        count = len(targets)
        self._lose("no_room", "device", level, len(wanted) - count)
        # The last ones were used last.
        kept, places = wanted[len(wanted) - count :], places[:count]
        try:
            if kept:
                self._device.read([each.block for each in kept], self._staging.memory[places.start : places.stop])
        except Exception:  # whatever the device raises costs this content, nothing else
            level.pool.release(targets, NOBODY, "aborted")
            self._lose("copy", "device", level, count)
            kept = []
        if not kept:
            self._staging.take_back(places)
            return
        found = [each.content for each in kept]
        job = Job(
            self._staging_store, places, level.store, level.keys(targets, found), prepare=level.prepare()
        )  # fmt: skip
        self._begin("device", level, targets, kept, job, self._staging.give_back)

    def take_from_host(self, blocks: Sequence[BlockId], hashes: Sequence[BlockHash]) -> None:
        """Begin to write blocks that the host's pool evicts to the disk."""
        host, disk = self._levels
        assert isinstance(host, HostLevel), "the nearest tier is the host"
        wanted = self._unknown(host.pool, blocks, hashes, [disk])
        has_room = self._desk.num_blocks_in_flight + len(wanted) <= MAX_BLOCKS_TO_DISK
        targets = disk.take(len(wanted) if has_room else 0)
        self._lose("no_room", "host", disk, len(wanted) - len(targets))
        if not targets:
            return
        kept = wanted[len(wanted) - len(targets) :]
        found = [each.content for each in kept]
        job = Job(
            host.store,
            [each.block for each in kept],
            disk.store,
            disk.keys(targets, found),
            is_limited=False,
            prepare=disk.prepare(),
        )
        self._begin("host", disk, targets, kept, job, _nothing)

    def clear(self) -> None:
        """Let nothing arrive that is under way."""
        for transfer in self._desk.of_request(NOBODY.request):
            self._desk.drop(transfer)
        self._under_way.clear()

    # ------------------------------------------------------------------ parts

    def _unknown(
        self, pool: BlockPool, blocks: Sequence[BlockId], hashes: Sequence[BlockHash], levels: Sequence[Level]
    ) -> list[Evicted]:
        """Return the blocks that none of these tiers has or is about to have, and that the nearest of them accepts."""
        return [
            Evicted(block, content, pool.parents[block])
            for block, content in zip(blocks, hashes, strict=True)
            if content not in self._under_way
            and levels[0].accepts(content)
            and all(level.pool.find(content) is None for level in levels)
        ]

    def _begin(
        self,
        source: Tier,
        level: Level,
        targets: list[BlockId],
        kept: list[Evicted],
        job: Job,
        free_source: Callable[[], None],
    ) -> None:
        self._under_way.update(each.content for each in kept)
        end = partial(self._end, level, targets, kept, free_source)
        self._desk.begin("offload", NOBODY.request, (source, level.tier), job, end, self._give_up)

    def _end(
        self,
        level: Level,
        targets: list[BlockId],
        kept: list[Evicted],
        free_source: Callable[[], None],
        transfer: Transfer,
    ) -> None:
        """Enter what arrived into the tier's pool."""
        free_source()
        hashes = [each.content for each in kept]
        self._under_way.difference_update(hashes)
        job, count, pool = transfer.job, transfer.num_arrived, level.pool
        if not transfer.is_dropped:
            level.note_write(job.reason)
        if count:
            arrived, size = targets[:count], self._manager.block_size
            for block in arrived:
                pool.filled_slots[block] = size
            self._desk.emit_arrived(transfer, (), arrived, [size] * count)
            parents = [each.parent for each in kept[:count]]
            pool.store(arrived, hashes[:count], None, StoredRun(NOBODY, 0, parents=parents))
            if transfer.from_tier == "device" and level.tier == "host":
                self._speed.note("out", count, job.duration_ns)
        elif job.num_done and isinstance(level, DiskLevel):
            level.discard([content for content in hashes[: job.num_done] if pool.find(content) is None])
        if count < len(targets):
            self._desk.emit_failed(transfer)
        pool.release(targets[:count], NOBODY, "offloaded")
        if count < len(targets):
            pool.release(targets[count:], NOBODY, "aborted")

    def _give_up(self, _transfer: Transfer) -> None:
        """Nobody waits for it."""

    def _lose(self, reason: TransferFailure, source: Tier, level: Level, count: int) -> None:
        if count:
            self._desk.emit_not_begun("offload", NOBODY.request, (source, level.tier), reason, count)


def _nothing() -> None:
    """The source keeps its own room."""
