"""Lets the n-th operation of a kind fail while an engine serves a fixed small load, and looks at what that does.

As SQLite is tested: n = 1, 2, 3 ... until a run has no fault left, once and from then on. A fault is put in where the
engine meets the outside: the pool's answer, the executor, the memory, the device's and the host's blocks, files.
"""

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from builders import LedgerFollower, NullModel, Recorder, make_core, make_request
from slot_store import InlineWorker, SlotStore

from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.telemetry.events import (
    AllocationFailed,
    PoolRebuilt,
    StepCompleted,
    StepFailed,
    StepScheduled,
    TransferFailed,
)
from kvwatch.telemetry.events.block import AllocationReason
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch_engine.contracts.block import BlockId
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.contracts.step import Int64Array, StepInput, StepResult
from kvwatch_engine.core import sequence_seed
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.file_system import FileSystem
from kvwatch_engine.memory.tiers.stores import Bytes, MemoryStore
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings

MAX_STEPS = 400
SHARED = [4 + i % 11 for i in range(13)]
REQUESTS: dict[str, dict[str, Any]] = {
    "alone": {"prompt": [20, 21, 22], "max_tokens": 14},
    "forked": {"prompt": [*SHARED, 5, 6], "max_tokens": 9, "n": 3},
    "shared": {"prompt": [*SHARED, 7, 8, 9], "max_tokens": 12},
    "twice": {"prompt": [30] * 10, "max_tokens": 7, "n": 2},
    "late": {"prompt": [*SHARED, 5, 6, 31], "max_tokens": 6},
    "long": {"prompt": [40 - i % 9 for i in range(30)], "max_tokens": 10},
    "other": {"prompt": [3 + i % 13 for i in range(50)], "max_tokens": 3},
    "again": {"prompt": [40 - i % 9 for i in range(30)], "max_tokens": 5},
    "more": {"prompt": [2 + i % 17 for i in range(52)], "max_tokens": 3},
    "at last": {"prompt": [40 - i % 9 for i in range(30)], "max_tokens": 3},
    "other again": {"prompt": [3 + i % 13 for i in range(50)], "max_tokens": 2},
    "more again": {"prompt": [2 + i % 17 for i in range(52)], "max_tokens": 2},
}
ARRIVALS = {
    0: ("alone", "forked", "shared"),
    3: ("twice",),
    9: ("late", "long"),
    30: ("other",),
    40: ("again",),
    50: ("more",),
    60: ("at last",),
    70: ("other again",),
    80: ("more again",),
}
"""Step before which requests arrive."""
SIZES = {6: 16, 12: 24, 18: 15}
"""Step before which the pool gets another size; 22 at first. It is refused while too much is used."""

FAILURES = (AllocationFailed, StepFailed, PoolRebuilt, TransferFailed)
"""Events that tell of a failure."""


@dataclass
class FaultPlan:
    """Which operation of one kind fails."""

    number: int
    """The first that does, from 1."""
    is_lasting: bool
    num_seen: int = 0
    num_failed: int = 0

    def fails(self) -> bool:
        """Count one operation; say whether it is to fail."""
        self.num_seen += 1
        does = self.num_seen >= self.number if self.is_lasting else self.num_seen == self.number
        self.num_failed += does
        return does


class FaultyModel(NullModel):
    """A null model, and memory, in which steps, copies and rebuilding can fail; it does nothing then."""

    def __init__(self) -> None:
        super().__init__()
        self.before_step: Callable[[], None] = lambda: None
        self.before_copy: Callable[[], None] = lambda: None
        self.before_rebuild: Callable[[], None] = lambda: None

    def execute(self, step: StepInput) -> StepResult:
        self.before_step()
        return super().execute(step)

    def _copy_blocks(self, step: StepInput) -> None:
        for _ in step.copy_sources:
            self.before_copy()
        super()._copy_blocks(step)

    def rebuild(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        self.before_rebuild()
        super().rebuild(num_blocks, sources, destinations)


def _raising(plan: FaultPlan, error: Callable[[str], Exception]) -> Callable[[], None]:
    def operation() -> None:
        if plan.fails():
            raise error("made to fail")

    return operation


def _refusing(pool: BlockPool, plan: FaultPlan) -> None:
    allocate = pool.allocate

    def allocate_or_fail(count: int, owner: Owner, reason: AllocationReason, group: int = 0) -> list[BlockId] | None:
        return None if count and plan.fails() else allocate(count, owner, reason, group)

    pool.allocate = allocate_or_fail  # type: ignore[method-assign]


def fail_allocations(run: "FaultRun") -> None:
    """The pool has no blocks, whatever it counts."""
    _refusing(run.core.manager.pool, run.plan)


def fail_copies(run: "FaultRun") -> None:
    """A block cannot be copied; others of the step may have been."""
    run.model.before_copy = _raising(run.plan, RuntimeError)


def fail_steps(run: "FaultRun") -> None:
    """The model raises."""
    run.model.before_step = _raising(run.plan, RuntimeError)


def exhaust_memory(run: "FaultRun") -> None:
    """The device has no memory for a step."""
    run.model.before_step = _raising(run.plan, MemoryError)


def exhaust_memory_in_copies(run: "FaultRun") -> None:
    """The device has no memory for a copy; others of the step may have been made."""
    run.model.before_copy = _raising(run.plan, MemoryError)


def fail_rebuilding(run: "FaultRun") -> None:
    """There is no memory for the pool in another size."""
    run.model.before_rebuild = _raising(run.plan, MemoryError)


class FaultyFiles(FileSystem):
    """The real file system, until it is told to fail."""

    def __init__(self) -> None:
        self.before_write: Callable[[], None] = lambda: None
        self.before_read: Callable[[], None] = lambda: None

    def write(self, path: Path, parts: list[bytes | memoryview]) -> None:
        self.before_write()
        super().write(path, parts)

    def read(self, path: Path, size: int) -> bytes:
        self.before_read()
        return super().read(path, size)


class FaultyHostStore(MemoryStore):
    """The host's blocks."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def read(self, keys: Any, out: Bytes) -> None:
        self.before()
        super().read(keys, out)

    def write(self, keys: Any, data: Bytes) -> None:
        self.before()
        super().write(keys, data)


def fail_host_transfers(run: "FaultRun") -> None:
    """Blocks cannot be read from the device, or written to it."""
    run.device.before = _raising(run.plan, RuntimeError)


def fail_host_memory(run: "FaultRun") -> None:
    """Blocks cannot be read from the host's memory, or written to it."""
    for store in run.host_stores:
        store.before = _raising(run.plan, RuntimeError)


def fail_disk_writes(run: "FaultRun") -> None:
    """The disk is full."""
    run.files.before_write = _raising(run.plan, partial(OSError, errno.ENOSPC))


def fail_disk_reads(run: "FaultRun") -> None:
    """The disk has an unreadable sector."""
    run.files.before_read = _raising(run.plan, partial(OSError, errno.EIO))


def fail_tier_allocations(run: "FaultRun") -> None:
    """The host pool has no blocks, whatever it counts."""
    tiers = run.core.tiers
    assert isinstance(tiers, MemoryTiers)
    _refusing(tiers._levels[0].pool, run.plan)


Injection = Callable[["FaultRun"], None]
POINTS: dict[str, Injection] = {
    "block allocation": fail_allocations,
    "block copy": fail_copies,
    "block copy, memory": exhaust_memory_in_copies,
    "step": fail_steps,
    "step, memory": exhaust_memory,
    "rebuilding the pool": fail_rebuilding,
}
"""Where operations can be made to fail, by name."""

TIER_POINTS: dict[str, Injection] = {
    "host transfer": fail_host_transfers,
    "host memory": fail_host_memory,
    "host allocation": fail_tier_allocations,
    "disk write": fail_disk_writes,
    "disk read": fail_disk_reads,
    "block allocation": fail_allocations,
    "step": fail_steps,
}
"""The same where there are a host and a disk tier, and requests are swapped."""


@dataclass
class Outcome:
    """What a run brought."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    num_copies: int = 0

    def failed_requests(self) -> set[str]:
        """Return the requests of which a sequence ended with an error."""
        return {request for (request, _), reason in self.reasons.items() if reason is FinishReason.ERROR}

    def in_failed_steps(self) -> set[str]:
        """Return the requests that were in a step that failed."""
        found: set[str] = set()
        scheduled: list[str] = []
        for event in self.events:
            if isinstance(event, StepScheduled):
                scheduled = event.requests
            elif isinstance(event, StepFailed):
                found |= set(scheduled)
        return found


def expected_tokens() -> dict[tuple[str, int], list[int]]:
    """Return the whole answer of each sequence, which the null model's arithmetic gives."""
    model = NullModel()
    return {
        (name, index): [
            model.next_token(request["prompt"], sequence_seed(0, index), place)
            for place in range(request["max_tokens"])
        ]
        for name, request in REQUESTS.items()
        for index in range(request.get("n", 1))
    }


class FaultRun:
    """One run of the load; `plan` says what fails in it. After every step all invariants are checked."""

    def __init__(self, inject: Injection, plan: FaultPlan, disk: Path | None = None) -> None:
        """Make an engine; with a folder it has a host tier and a disk tier, and swaps."""
        self.plan = plan
        self.log = EventLog(200_000)
        self.model = FaultyModel()
        self.model.on_context = self._check_context
        self.texts = [[*REQUESTS[name]["prompt"], *tokens] for (name, _), tokens in expected_tokens().items()]
        self.device = SlotStore(self.model)
        self.host_stores: list[FaultyHostStore] = []
        self.files = FaultyFiles()
        self._disk = disk
        self.core = make_core(
            self.model,
            self.log,
            make_tiers=None if disk is None else self._make_tiers,
            num_blocks=22,
            max_num_seqs=8,
            max_batch_tokens=24,
            preemption_mode="recompute" if disk is None else "swap",
        )
        self.recorder = Recorder(self.log)
        self.follower = LedgerFollower(self.log, self.core.snapshot)
        self.outcome = Outcome()
        inject(self)

    def _make_tiers(self, manager: BlockManager) -> MemoryTiers:
        block_bytes = 8 * manager.block_size
        identity = StoreIdentity(
            weights_fingerprint="null", kv_dtype="tokens", block_size=manager.block_size, num_layers=1,
            num_kv_heads=1, head_dim=1,
        )  # fmt: skip
        settings = TierSettings(host_bytes=20 * block_bytes, disk_folder=self._disk, disk_bytes=1 << 20)
        machine = Machine(
            device=self.device, host_store=self._make_host_store, make_worker=InlineWorker, files=self.files
        )
        return MemoryTiers(manager, settings, machine, identity, block_bytes, self.log)

    def _make_host_store(self, blocks: Callable[[], Bytes]) -> FaultyHostStore:
        self.host_stores.append(FaultyHostStore(blocks))
        return self.host_stores[-1]

    def _check_context(self, _row: int, tokens: list[int]) -> None:
        """What a sequence looks back at is its own text, whatever way its blocks came."""
        assert any(text[: len(tokens)] == tokens for text in self.texts)

    def run(self) -> Outcome:
        """Serve everything; return what came of it, all blocks being free again."""
        core = self.core
        turn = 0
        while core.has_work or turn <= max(ARRIVALS):
            assert turn < MAX_STEPS, "it does not end"
            for request_id in ARRIVALS.get(turn, ()):
                core.add(make_request(request_id, **REQUESTS[request_id], ignore_eos=True), turn)
            self._watched(partial(self._resize, SIZES.get(turn)))
            self._watched(self._step)
            turn += 1
        assert core.scheduler.lifecycle.requests() == []
        assert not any(count for tier in core.snapshot().tiers for count in tier.ref_counts)
        self.outcome.events = self.recorder.drain()
        if core.tiers is not None:
            core.tiers.close()
        return self.outcome

    def _resize(self, num_blocks: int | None) -> None:
        if num_blocks is not None:
            with suppress(ChangeRefused, ChangeFailed):  # it is told, which is looked at
                self.core.resize(self.core.prepare_resize(num_blocks))

    def _step(self) -> None:
        for output in self.core.step():
            key = output.request_id, output.sequence
            self.outcome.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert key not in self.outcome.reasons, "a sequence ends once"
                self.outcome.reasons[key] = output.finish_reason

    def _watched(self, act: Callable[[], None]) -> None:
        """Do something; then every failure in it was told, and everything is sound."""
        num_failed, num_events = self.plan.num_failed, len(self.recorder.drain())
        act()
        told = [event for event in self.recorder.drain()[num_events:] if isinstance(event, FAILURES)]
        assert self.plan.num_failed == num_failed or told, "a failure nobody was told of"
        assert {event.error for event in told if isinstance(event, StepFailed)} <= {"RuntimeError", "MemoryError"}
        self.core.check_integrity()
        self._compare_checksums()
        self.follower.catch_up()

    def _compare_checksums(self) -> None:
        ledger, cursor = self.follower.ledger, self.follower._cursor
        for event in cursor.read(100_000):
            ledger.apply(event)
            if isinstance(event, StepCompleted):
                assert ledger.check(event) == []
