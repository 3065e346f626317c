"""A thousand mixed requests in a pool of 40 blocks, in time that only passes while a step is computed."""

from dataclasses import replace
from typing import Any

import pytest
from builders import FakeClock, LedgerFollower, NullModel, Recorder, make_settings
from mixed_load import LONGEST, mixed_requests
from slot_store import InlineWorker, SlotStore
from waits import check_fairness

from kvwatch.telemetry.events import RequestFinished, RequestPreempted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import EngineCore, sequence_seed
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings

BLOCK_SIZE = 16
NUM_CLIENTS = 12
VOCAB_SIZE = 400


class TimedModel(NullModel):
    """A null model whose steps take as long as on some small GPU: 10 ms, and 0.2 ms a token."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(VOCAB_SIZE)
        self.clock = clock
        self.block_size = BLOCK_SIZE

    def execute(self, step: StepInput) -> StepResult:
        result = super().execute(step)
        duration = 10_000_000 + 200_000 * step.num_tokens
        self.clock.now_ns += duration
        return replace(result, forward_ns=duration)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_nobody_waits_much_longer_than_others_and_every_answer_is_right(mode: str) -> None:
    clock = FakeClock()
    log = EventLog(2_000_000, clock)
    model = TimedModel(clock)

    def make_tiers(manager: BlockManager) -> MemoryTiers:
        identity: dict[str, Any] = dict.fromkeys(("num_layers", "num_kv_heads", "head_dim"), 1)
        return MemoryTiers(
            manager,
            TierSettings(host_bytes=200 * 8 * BLOCK_SIZE),
            Machine(SlotStore(model), make_worker=InlineWorker),
            StoreIdentity(weights_fingerprint="w", kv_dtype="int64", block_size=BLOCK_SIZE, **identity),
            8 * BLOCK_SIZE,
            log,
        )

    settings = make_settings(
        num_blocks=41, block_size=BLOCK_SIZE, max_num_seqs=NUM_CLIENTS, max_batch_tokens=256, watermark_blocks=1,
        max_model_len=LONGEST, vocab_size=VOCAB_SIZE, preemption_mode=mode,
    )  # fmt: skip
    core = EngineCore(settings, model, log, make_tiers=make_tiers if mode != "recompute" else None)
    recorder = Recorder(log)
    ledger = LedgerFollower(log, core.snapshot)
    requests = mixed_requests(1000, 7, VOCAB_SIZE)
    todo = iter(requests)
    tokens: dict[tuple[str, int], list[int]] = {}
    while True:
        while core.scheduler.lifecycle.num_live < NUM_CLIENTS and (following := next(todo, None)) is not None:
            core.add(following[1], clock.monotonic_ns())
        if not core.has_work:
            break
        for output in core.step():
            assert not output.error
            tokens.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
    ledger.catch_up()

    for _, request in requests:
        prompt, params = request.prompt_token_ids, request.sampling
        for index in range(params.n):
            seed = sequence_seed(params.seed or 0, index)
            answer = [model.next_token(prompt, seed, position) for position in range(params.max_tokens)]
            found = tokens[request.request_id, index]
            assert found == answer[: len(found)]
            assert len(found) == len(answer) or (not params.ignore_eos and found[-1] == 3)
    events = recorder.drain()
    preempted = [event for event in events if isinstance(event, RequestPreempted)]
    most = max(event.num_preemptions for event in events if isinstance(event, RequestFinished))
    print(f"{mode}: {len(preempted)} preemptions, at most {most} of one request, {clock.now_ns / 1e9:.1f} s")
    assert preempted
    check_fairness([(kind, request.request_id) for kind, request in requests], events)
    core.check_integrity()
    assert core.manager.pool.num_used == 0
