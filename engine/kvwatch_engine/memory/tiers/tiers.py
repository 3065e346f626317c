"""The tiers behind the device as the scheduler sees them. Composes swap space, offload and restore over one worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from kvwatch.errors import ConfigError
from kvwatch.telemetry.events import BlocksLaidOut
from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import SequenceState, TierState, TransferState
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.cache import BlockLayout
from kvwatch_engine.contracts.tiers import TierHit, TransferOutcome
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner, StoredRun
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.desk import TransferDesk
from kvwatch_engine.memory.tiers.file_system import FileSystem
from kvwatch_engine.memory.tiers.folder import BlockFolder
from kvwatch_engine.memory.tiers.levels import DiskLevel, HostLevel, Level
from kvwatch_engine.memory.tiers.offload import Offload
from kvwatch_engine.memory.tiers.restore import Restore
from kvwatch_engine.memory.tiers.saving import SAVE_SECONDS, Saver
from kvwatch_engine.memory.tiers.speed import TransferSpeed
from kvwatch_engine.memory.tiers.staging import StagingRing
from kvwatch_engine.memory.tiers.stores import BlockStore, Bytes, MemoryStore, plain_memory
from kvwatch_engine.memory.tiers.swapping import Swapping
from kvwatch_engine.memory.tiers.tier_pool import NOBODY, TierPool
from kvwatch_engine.memory.tiers.worker import Job, Mover, TransferWorker, Worker

_STAGING_BYTES: Final = 32 * 2**20
_STAGING_BLOCKS: Final = (4, 256)
"""Fewest and most blocks in staging memory, whatever their size."""

DEFAULT_TRANSFER_SECONDS: Final = 30.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Which tiers there are."""

    host_bytes: int = 0
    """Memory of the host tier; 0 for none."""
    disk_folder: Path | None = None
    disk_bytes: int = 0
    """Most bytes of files in the folder."""
    bytes_per_second: float | None = None
    """Limit of the link to the device; none for what the machine can do."""
    transfer_seconds: float = DEFAULT_TRANSFER_SECONDS
    """A transfer that takes longer has failed."""

    @property
    def has_tiers(self) -> bool:
        """Whether there is any tier behind the device."""
        return self.host_bytes > 0 or self.disk_folder is not None


@dataclass(frozen=True, slots=True)
class Machine:
    """What the tiers ask of the machine; tests give parts that fail."""

    device: BlockStore[int]
    """Blocks of the KV cache."""
    host_memory: Callable[[int, int], Bytes] = plain_memory
    """Returns memory uint8[num_blocks, block_bytes]; where the device is a GPU it is pinned."""
    host_store: Callable[[Callable[[], Bytes]], MemoryStore] = MemoryStore
    make_worker: Callable[[Mover], Worker] = TransferWorker
    files: FileSystem = field(default_factory=FileSystem)


class MemoryTiers:
    """Implements `contracts.tiers.Tiers`. Engine thread only."""

    def __init__(
        self,
        manager: BlockManager,
        settings: TierSettings,
        machine: Machine,
        identity: StoreIdentity,
        block_bytes: int,
        log: EventLog,
    ) -> None:
        """Claim memory, open the folder and start the worker.

        Args:
            manager: the device's block tables.
            settings: which tiers there are; at least one.
            machine: where bytes are.
            identity: what the bytes of a block depend on besides its hash.
            block_bytes: size of one block over all layers.
            log: where events go.

        Raises:
            ConfigError: a tier is too small for a block, or the folder cannot be used.
        """
        self._manager = manager
        self._settings = settings
        self._machine = machine
        self._log = log
        self._device = machine.device
        self._folder: BlockFolder | None = None
        self._make(identity, block_bytes)

    def _make(self, identity: StoreIdentity, block_bytes: int, *, is_folder_needed: bool = True) -> None:
        """Make everything that depends on the layout of a block; if need be with a disk that takes no blocks."""
        manager, settings, machine, log = self._manager, self._settings, self._machine, self._log
        self._identity, self._block_bytes = identity, block_bytes
        self._levels: list[Level] = []
        host = self._make_host(settings, machine, block_bytes)
        if settings.disk_folder is not None:
            store = BlockFolder(settings.disk_folder, identity, block_bytes, machine.files)
            self._make_disk(settings.disk_bytes, store, is_folder_needed=is_folder_needed)
        num_staged = min(max(_STAGING_BYTES // block_bytes, _STAGING_BLOCKS[0]), _STAGING_BLOCKS[1])
        staged = machine.host_memory(num_staged, block_bytes)
        self._worker = machine.make_worker(Mover(staged, settings.bytes_per_second))
        self._speed = TransferSpeed()
        self._desk = TransferDesk(self._worker, log, block_bytes, settings.transfer_seconds)
        device = machine.device
        self._swapping = Swapping(manager, host, device, self._desk, self._speed)
        self._restore = Restore(manager, self._levels, device, self._desk, self._speed)
        staging = StagingRing(machine.host_memory(num_staged, block_bytes))
        self._remove_files()
        self._offload = Offload(self._levels, manager, device, staging, self._desk, self._speed)
        manager.pool.on_evict = self._offload.take_from_device

    # ------------------------------------------------------------------ swap space

    def can_take(self, request_id: str) -> bool:
        """Whether the host has room for all distinct blocks that the request's sequences hold."""
        return self._swapping.can_take(request_id)

    def num_blocks_to_restore(self, request_id: str) -> int:
        """Return how many device blocks `begin_in` will take."""
        return self._swapping.num_blocks_to_restore(request_id)

    def estimate_seconds(self, num_blocks: int) -> float | None:
        """Return the time out and in again of so many blocks, behind what is in flight; None before any transfer."""
        seconds = self._speed.round_trip_seconds(num_blocks)
        if seconds is None:
            return None
        return seconds + self._speed.one_way_seconds(self._desk.num_blocks_in_flight)

    def begin_out(self, request_id: str) -> None:
        """Begin to copy a request's blocks. They stay its own until `poll` tells the end, and are released then."""
        self._swapping.begin_out(request_id)

    def begin_in(self, request_id: str) -> bool:
        """Take device blocks, rebuild the block tables and begin to fill them; False when too few blocks are free."""
        return self._swapping.begin_in(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a request, whatever its transfers are doing."""
        self._swapping.drop(request_id)

    # ------------------------------------------------------------------ prefixes

    def find(self, hashes: Sequence[BlockHash]) -> list[TierHit]:
        """Return which leading part of `hashes` the tiers hold, nearest first; it is evicted last now."""
        return self._restore.find(hashes)

    def claim(self, request_id: str, sequence: int, hits: Sequence[TierHit]) -> None:
        """Keep what `find` found until `begin_restore` or `end_claim`."""
        self._restore.claim(Owner(request_id, sequence), hits)

    def end_claim(self, request_id: str, sequence: int) -> None:
        """Let go of what a sequence has claimed, since there is no room for it."""
        self._restore.end_claim(Owner(request_id, sequence))

    def begin_restore(self, request_id: str, sequence: int, first_index: int, hits: Sequence[TierHit]) -> None:
        """Begin to fill the blocks of a sequence's table from `first_index` on with what `find` found."""
        self._restore.begin(Owner(request_id, sequence), first_index, hits)

    def clear(self) -> dict[str, int]:
        """Forget all prefixes, as the device's prefix cache does; return how many blocks of each tier became empty."""
        self._offload.clear()
        num_cleared: dict[str, int] = {}
        for level in self._levels:
            if isinstance(level, DiskLevel):
                level.discard([content for content in level.pool.hashes if content is not None])
            num_cleared[level.tier] = level.pool.clear_cache()
        self._remove_files()
        return num_cleared

    # ------------------------------------------------------------------ the end

    def poll(self) -> list[TransferOutcome]:
        """Return what has ended since the last call, after its blocks were released."""
        return self._desk.poll()

    def wait(self, seconds: float) -> bool:
        """Sleep until a transfer has ended, at most so long; return whether one has."""
        return self._worker.wait(seconds)

    @property
    def num_in_flight(self) -> int:
        """Transfers that have not ended, those that were given up but still touch blocks included."""
        return self._desk.num_in_flight

    def close(self) -> None:
        """Stop the worker, save what the disk lacks, and let go of the folder; safe to call twice."""
        if self._folder is not None:
            self._worker.stop()
            self._save_to_disk()
        self._let_go()

    def lay_out(self, layout: BlockLayout) -> None:
        """Go on, empty, with blocks laid out otherwise; see `Tiers`."""
        assert self.num_in_flight == 0, "a transfer knows blocks by their ids"
        identity, block_bytes = self._identity, self._block_bytes
        self._let_go()
        try:
            self._make(replace(identity, block_size=layout.block_size, kv_dtype=layout.dtype), layout.block_bytes)
        except Exception:
            self._let_go()
            # A folder that is gone must not take the other tiers with it: their transfers would never end.
            self._make(identity, block_bytes, is_folder_needed=False)
            raise

    # ------------------------------------------------------------------ truth

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that the tiers keep."""
        return self._identity.block_size

    def states(self) -> list[TierState]:
        """Return the pools behind the device as plain columns, for a snapshot."""
        return [level.pool.to_state(with_parents=self._manager.emit_token_ids) for level in self._levels]

    def sequences(self) -> list[SequenceState]:
        """Return who holds blocks in these pools, for a snapshot."""
        return [state for level in self._levels for state in level.pool.to_sequences()]

    def transfers(self) -> list[TransferState]:
        """Return what is on its way, for a snapshot."""
        return self._desk.to_states()

    def check_integrity(self) -> None:
        """Verify the invariants of the pools behind the device.

        Raises:
            CacheCorruption: with the equation that does not hold.
        """
        for level in self._levels:
            level.pool.check_integrity()

    # ------------------------------------------------------------------ parts

    def _let_go(self) -> None:
        """Stop the worker and let another engine use the folder; safe to call twice."""
        self._manager.pool.on_evict = None
        self._worker.stop()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _save_to_disk(self) -> None:
        """Heads of prefixes are evicted last, so that the disk has tails which are of no use without them."""
        *nearer, disk = self._levels
        assert isinstance(disk, DiskLevel), "there is a folder"
        saver = Saver(disk, self._block_bytes, SAVE_SECONDS)
        saver.save(self._manager.pool, self._device)
        for level in nearer:
            if isinstance(level, HostLevel):
                saver.save(level.pool, level.store)

    def _remove_files(self) -> None:
        """Do not wait for the next write with what was discarded."""
        for level in self._levels:
            prepare = level.prepare()
            if prepare is not None:
                self._desk.submit(Job(level.store, (), level.store, (), prepare=prepare))

    def _make_host(self, settings: TierSettings, machine: Machine, block_bytes: int) -> HostLevel | None:
        if not settings.host_bytes:
            return None
        num_blocks = _capacity(settings.host_bytes, block_bytes, "--host-memory")
        memory = machine.host_memory(1 + num_blocks, block_bytes)  # place 0 is the null block's
        host = HostLevel(self._make_pool(1 + num_blocks, "host", {}), machine.host_store(lambda: memory))
        self._levels.append(host)
        return host

    def _make_pool(self, num_blocks: int, tier: Tier, ignored_files: dict[str, int]) -> TierPool:
        """Return an empty pool, and tell whoever follows the log that the tier has it from now on."""
        size, block_bytes = self._identity.block_size, self._block_bytes
        if self._log.active:
            ignored = dict(ignored_files)
            self._log.append(BlocksLaidOut(num_blocks, size, block_bytes, tier=tier, ignored_files=ignored))
        pool = TierPool(num_blocks, self._log, tier)
        pool.ignored_files.update(ignored_files)
        return pool

    def _make_disk(self, num_bytes: int, store: BlockFolder, *, is_folder_needed: bool) -> None:
        num_blocks = _capacity(num_bytes, store.file_bytes, "--disk-bytes")
        try:
            found = store.open()
        except ConfigError as error:
            if is_folder_needed:
                raise
            logger.warning("the disk tier takes no blocks until the engine starts anew", error=str(error))
            found = []
        self._folder = store
        pool = self._make_pool(1 + num_blocks, "disk", store.ignored)
        disk = DiskLevel(pool, store)
        disk.discard(found[: max(0, len(found) - num_blocks)])
        for content in found[-num_blocks:]:
            blocks = pool.allocate(1, NOBODY, "offload")
            assert blocks is not None, "there is room for as many as are taken"
            pool.filled_slots[blocks[0]] = self._identity.block_size
            pool.store(blocks, [content], None, StoredRun(NOBODY, 0))
            pool.release(blocks, NOBODY, "offloaded")
        self._levels.append(disk)


def _capacity(num_bytes: int, block_bytes: int, setting: str) -> int:
    """Return how many blocks fit."""
    if num_bytes < block_bytes:
        raise ConfigError(f"{setting}: {num_bytes} bytes hold no block of {block_bytes} bytes; give more, or none")
    return num_bytes // block_bytes
