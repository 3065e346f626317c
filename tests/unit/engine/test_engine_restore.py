"""A prefix that is restored from the host too slowly: the request does without, and what still arrives harms nobody."""

from builders import FakeClock, LedgerFollower, NullModel, Recorder, make_core, make_request
from slot_store import SlotStore
from tier_faults import SteppedWorker

from kvwatch.telemetry.events import Restored, TransferFailed
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings
from kvwatch_engine.memory.tiers.worker import Mover
from kvwatch_engine.scheduling.request import WaitReason

PROMPT = [5 + i % 7 for i in range(18)]
BLOCK_SIZE = 4


class Stage:
    """An engine with a host tier whose worker moves when told to, and a prefix that only the host has."""

    def __init__(self) -> None:
        self.clock, self.model, self.workers = FakeClock(), NullModel(), list[SteppedWorker]()
        self.log = EventLog(10_000, self.clock)
        self.core = make_core(self.model, self.log, num_blocks=12, make_tiers=self.make_tiers)
        self.recorder = Recorder(self.log)
        self.ledger = LedgerFollower(self.log, self.core.snapshot)
        self.submit("first", PROMPT)
        self.finish()
        for number in range(4):  # they push it out of the device
            self.submit(f"other {number}", [30 + number] * 30)
            self.finish()

    def make_tiers(self, manager: BlockManager) -> MemoryTiers:
        identity = StoreIdentity(
            weights_fingerprint="w", kv_dtype="int64", block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=1
        )
        settings = TierSettings(host_bytes=60 * 8 * BLOCK_SIZE, transfer_seconds=1.0)
        machine = Machine(SlotStore(self.model), make_worker=self.make_worker)
        return MemoryTiers(manager, settings, machine, identity, 8 * BLOCK_SIZE, self.log)

    def make_worker(self, mover: Mover) -> SteppedWorker:
        self.workers.append(SteppedWorker(mover))
        return self.workers[0]

    def submit(self, name: str, prompt: list[int]) -> None:
        self.core.add(make_request(name, prompt, max_tokens=3, ignore_eos=True), self.clock.monotonic_ns())

    def step(self) -> list[int]:
        outputs = self.core.step()
        self.core.check_integrity()
        self.ledger.catch_up()
        return [token for output in outputs for token in output.token_ids]

    def finish(self) -> None:
        while self.core.has_work:
            self.workers[0].carry_out(100)
            self.step()


def test_a_request_whose_prefix_comes_too_late_computes_it_in_other_blocks() -> None:
    stage = Stage()
    core: EngineCore = stage.core
    stage.submit("again", PROMPT)
    stage.step()
    request = core.scheduler.lifecycle.find("again")
    assert request is not None
    assert request.wait_reason is WaitReason.TRANSFER
    (table,) = [list(core.manager.table(owner)) for owner in core.manager.owners()]

    stage.clock.advance(2)
    tokens = stage.step()
    (later,) = [list(core.manager.table(owner)) for owner in core.manager.owners()]
    assert not set(later) & set(table), "the worker may still write to those"
    while core.scheduler.lifecycle.find("again"):
        tokens += stage.step()
    assert tokens == [stage.model.next_token(PROMPT, 0, position) for position in range(3)]
    assert core.manager.pool.num_used == len(table), "until it has let go of them"

    stage.finish()
    stage.ledger.catch_up()
    assert core.manager.pool.num_used == 0
    events = stage.recorder.drain()
    failed = [(event.kind, event.reason) for event in events if isinstance(event, TransferFailed)]
    assert ("restore", "deadline") in failed
    assert not any(isinstance(event, Restored) for event in events)
    assert not core.has_work


def test_a_request_whose_prefix_came_in_time_computes_only_the_rest() -> None:
    stage = Stage()
    stage.submit("again", PROMPT)
    stage.step()
    stage.workers[0].carry_out(100)
    tokens = stage.step()
    while stage.core.scheduler.lifecycle.find("again"):
        tokens += stage.step()

    assert tokens == [stage.model.next_token(PROMPT, 0, position) for position in range(3)]
    (restored,) = [event for event in stage.recorder.drain() if isinstance(event, Restored)]
    assert len(restored.destinations) == 4
