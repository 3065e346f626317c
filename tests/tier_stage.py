"""Tiers over a pool whose bytes are known: the content of every block is a function of the tokens up to its end.

So a wrong block, a torn copy or a place that was reused too early is seen at once by whoever reads it.
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
from builders import ROOT, FakeClock
from tier_faults import Fault, FaultyFiles, FaultyMemory, SteppedWorker

from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_hash import HashChain
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.file_system import FileSystem
from kvwatch_engine.memory.tiers.stores import Bytes, MemoryStore
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings
from kvwatch_engine.memory.tiers.worker import Mover, TransferWorker, Worker

BLOCK_SIZE = 3
BLOCK_BYTES = 96
IDENTITY = StoreIdentity(
    weights_fingerprint="w1", kv_dtype="float32", block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=4
)


def content_of(tokens: list[int]) -> Bytes:
    """Bytes of the block that holds the last of these tokens, which are all up to there."""
    digest = sha256(bytes(tokens)).digest()
    return np.frombuffer(digest * (BLOCK_BYTES // len(digest)), np.uint8)


def hashes_of(tokens: list[int]) -> list[BlockHash]:
    """Hashes of the full blocks."""
    chain = HashChain(ROOT, BLOCK_SIZE)
    return list(chain.upto(len(tokens) // BLOCK_SIZE, lambda start, end: tokens[start:end]))


class TierStage:
    """A device of bytes, a manager, and tiers behind it, whose worker moves when told to, or by itself."""

    def __init__(
        self,
        num_blocks: int = 9,
        host_blocks: int = 6,
        disk_blocks: int = 0,
        folder: Path | None = None,
        *,
        is_threaded: bool = False,
        files: FileSystem | None = None,
        identity: StoreIdentity = IDENTITY,
        **settings: float | None,
    ) -> None:
        self.clock = FakeClock()
        self.log = EventLog(4096, self.clock)
        self.manager = BlockManager(BlockPool(num_blocks, self.log), BLOCK_SIZE, self.log)
        self.memory = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)
        self.device_fault, self.host_fault = Fault(), Fault()
        self.files = files or FaultyFiles()
        self.worker: SteppedWorker | None = None
        self.tiers = MemoryTiers(
            self.manager,
            TierSettings(
                host_bytes=host_blocks * BLOCK_BYTES,
                disk_folder=folder if disk_blocks else None,
                disk_bytes=disk_blocks * (512 + BLOCK_BYTES),
                **settings,  # type: ignore[arg-type]
            ),
            Machine(
                FaultyMemory(lambda: self.memory, self.device_fault),
                host_store=self._host_store,
                make_worker=TransferWorker if is_threaded else self._stepped,
                files=self.files,
            ),
            identity,
            BLOCK_BYTES,
            self.log,
        )

    def _host_store(self, blocks: Callable[[], Bytes]) -> MemoryStore:
        self.host_memory = blocks()
        return FaultyMemory(blocks, self.host_fault)

    def _stepped(self, mover: Mover) -> Worker:
        self.worker = SteppedWorker(mover)
        return self.worker

    def again(self, **settings: object) -> MemoryTiers:
        """Make further tiers over the same device."""
        machine = Machine(MemoryStore(lambda: self.memory), make_worker=self._stepped)
        return MemoryTiers(self.manager, TierSettings(**settings), machine, IDENTITY, BLOCK_BYTES, self.log)  # type: ignore[arg-type]

    def carry_out(self, num_jobs: int = 1000) -> None:
        """Let the worker do its oldest jobs."""
        assert self.worker is not None, "it moves by itself"
        self.worker.carry_out(num_jobs)

    def snapshot(self) -> EngineSnapshot:
        """What an engine with these tiers says of itself."""
        return EngineSnapshot(
            seq=self.log.head,
            step=self.log.step,
            time_ns=self.log.now_ns,
            block_size_tokens=BLOCK_SIZE,
            block_bytes=BLOCK_BYTES,
            watermark_blocks=0,
            max_queued_requests=0,
            max_queued_tokens=0,
            tiers=[self.manager.pool.to_state(), *self.tiers.states()],
            sequences=[*self.manager.to_states(), *self.tiers.sequences()],
            requests=[],
            transfers=self.tiers.transfers(),
        )

    def check_integrity(self) -> None:
        """Invariants of all pools."""
        self.manager.check_integrity()
        self.tiers.check_integrity()
