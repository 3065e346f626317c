"""A tiny real model under a load that decodes, prefills and waits for preempted requests at every moment.

Without threads: what happens in which step is the same in every run, so that texts can be compared.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import LedgerFollower, make_request, make_settings

from kvwatch.control import ChangeOutcome, ChangePreview, RequestQuery, SettingValue
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch_engine.contracts.request import FinishReason
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.changer import Changer, RebuildLimits
from kvwatch_engine.live.inspection import inspect_requests
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.tiers.tiers import TierSettings
from kvwatch_engine.model.loader import LoadedModel
from kvwatch_engine.model.runner import ModelRunner
from kvwatch_engine.scheduling.request import Request, RequestState
from kvwatch_engine.serve.tiers import tiers_factory

BLOCK_SIZE, NUM_BLOCKS = 16, 200
NUM_SHORT = 16
MAX_TOKENS = 90
Texts = dict[tuple[str, int], list[int]]


class LiveLoad:
    """An engine with host and disk tiers, its load, and what its callers and its events have told."""

    def __init__(self, model: LoadedModel, disk: Path | None = None, **changed: Any) -> None:
        runner = ModelRunner(model, KVCache(model.cache_spec(BLOCK_SIZE), NUM_BLOCKS))
        block_bytes = runner.kv_cache.spec.block_bytes
        settings = make_settings(
            **{
                "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": 512, "max_num_seqs": 64,
                "max_batch_tokens": 96, "max_prefill_chunk": 6, "vocab_size": 512, "eos_token_ids": (),
                "preemption_mode": "recompute", "reserve_prompt": False, "watermark_ratio": 0.0, **changed,
            }
        )  # fmt: skip
        self.log = EventLog(1 << 16)
        tiers = TierSettings(host_bytes=64 * block_bytes, disk_folder=disk, disk_bytes=64 * block_bytes if disk else 0)
        self.core = EngineCore(
            settings,
            runner,
            self.log,
            block_bytes=block_bytes,
            memory=runner,
            make_tiers=tiers_factory(tiers, runner, model.info, self.log),
        )
        self.on_phase: Callable[[str], None] = lambda _phase: None
        self.changer = Changer(self.core, RebuildLimits(cooldown_seconds=0.0), self._reach)
        self.ledger = LedgerFollower(self.log, self.core.snapshot)
        self._cursor = self.log.subscribe("test")
        self.events: list[Event] = []
        self.texts: Texts = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self._submit_all()

    def _submit_all(self) -> None:
        """Short prompts that soon decode, and long ones that are in prefill for many steps, one after the other."""
        shared = [(17 * i + 5) % 500 for i in range(21)]
        for number in range(NUM_SHORT):
            prompt = [*shared, *((7 * number + 3 * i) % 500 for i in range(number + 1))]
            n = 2 if number == 3 else 1
            self._submit(make_request(f"short{number}", prompt, max_tokens=MAX_TOKENS, n=n, ignore_eos=True))
        for number in range(6):
            prompt = [(13 * number + 11 * i + 1) % 500 for i in range(150)]
            self._submit(make_request(f"long{number}", prompt, max_tokens=4, ignore_eos=True))

    def _submit(self, request: Any) -> None:
        self.core.add(request, self.log.clock.monotonic_ns())

    # ------------------------------------------------------------ running

    def step(self) -> None:
        """Do one step, or wait a moment for a transfer; the ledger must then equal the engine."""
        before = self.core.num_steps
        for output in self.core.step():
            key = (output.request_id, output.sequence)
            self.texts.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
        if self.core.num_steps == before and self.core.tiers is not None:
            self.core.tiers.wait(0.05)
        self.look()

    def look(self) -> None:
        """Check that ledger and engine agree exactly."""
        self.ledger.catch_up()
        self.core.check_integrity()
        while events := self._cursor.read():
            self.events += events

    def run(self) -> None:
        """Serve everything."""
        for _ in range(20_000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("requests are still live")

    def change(self, changes: dict[str, SettingValue]) -> tuple[ChangePreview, ChangeOutcome]:
        """Change settings between two steps."""
        self.log.begin(self.core.num_steps)
        preview = self.changer.preview(changes, [])
        _, carry_out = self.changer.prepare(changes, [], actor="test", reason="load", version=None)
        try:
            return preview, carry_out()
        finally:
            self.look()

    def _reach(self, phase: str) -> None:
        self.on_phase(phase)

    # ------------------------------------------------------------ the load's shape

    def running(self) -> list[Request]:
        return self.core.scheduler.lifecycle.running

    def num_decoding(self) -> int:
        return sum(any(each.is_decoding for each in request.active_sequences()) for request in self.running())

    def has_prefill(self) -> bool:
        return any(request.request_id.startswith("long") and not request.first_token_ns for request in self.running())

    def preempted(self) -> list[str]:
        return [
            each.request_id
            for each in self.core.scheduler.lifecycle.requests()
            if each.num_preemptions and each.state in (RequestState.WAITING, RequestState.SWAPPED)
        ]

    def reach_full_load(self) -> None:
        """Step until at least 8 requests decode and 1 is in prefill, and see that 1 is preempted and stays so now."""
        for _ in range(400):
            if self.num_decoding() >= 9 and self.has_prefill():
                break
            self.step()
        if not self.preempted():
            short = [each for each in self.running() if each.request_id.startswith("short")]
            self.log.begin(self.core.num_steps)
            self.core.scheduler.drop(short[-1], "blocks")
            self.look()
        found = inspect_requests(self.core, RequestQuery()).requests
        assert self.num_decoding() >= 8, [(each.request, each.state) for each in found]
        assert self.has_prefill()
        assert self.preempted()
