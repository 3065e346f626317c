"""An engine under random load with every feature on, watched by a mirror and by the oracle of all metrics."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
from builders import FakeClock, NullModel, make_core, make_groups
from metrics_oracle import Oracle
from slot_store import SlotStore
from tier_faults import SteppedWorker

from kvwatch.control import Changes
from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.adapter import LoadId
from kvwatch_engine.contracts.cache import BlockLayout
from kvwatch_engine.contracts.image import PreparedImage, PromptImage
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, Refusal, RequestOrigin
from kvwatch_engine.contracts.sampling import BeamParams, SamplingParams
from kvwatch_engine.contracts.step import Int64Array, StepInput, StepResult
from kvwatch_engine.live.changer import Changer, RebuildLimits
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings
from kvwatch_engine.memory.tiers.worker import Mover
from kvwatch_engine.prefixes import PrefixDesk
from kvwatch_engine.scheduling.policy import most_blocks

STEP_NS = (0, 1_000_000, 20_000_000, 300_000_000, 2_000_000_000)
PAUSE_SECONDS = (0.0, 0.0, 0.0, 0.001, 1.0, 40.0, 90.0)
SLOT_BYTES = 8
PIXELS = np.zeros((1, 1, 1), np.float32)


class TimedModel(NullModel):
    """A null model whose steps take the time that a fake clock is told, and fail when told."""

    def __init__(self, clock: FakeClock, random: Random) -> None:
        super().__init__()
        self.slot_bytes = SLOT_BYTES
        self.clock = clock
        self.random = random
        self.next_error: Exception | None = None

    def rebuild(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        self._change_memory()
        super().rebuild(num_blocks, sources, destinations)

    def relay(self, layout: BlockLayout, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        self._change_memory()
        super().relay(layout, num_blocks, sources, destinations)

    def replace(self, layout: BlockLayout, num_blocks: int) -> None:
        self._change_memory()
        super().replace(layout, num_blocks)

    def _change_memory(self) -> None:
        self.clock.now_ns += self.random.choice(STEP_NS)
        if self.random.random() < 0.2:
            raise MemoryError("made to fail")

    def execute(self, step: StepInput) -> StepResult:
        duration = self.random.choice(STEP_NS)
        self.clock.now_ns += duration
        error, self.next_error = self.next_error, None
        if error is not None:
            raise error
        result = super().execute(step)
        errors = {0: "made to fail"} if self.random.random() < 0.01 and result.token_ids else {}
        return replace(result, forward_ns=duration, sample_ns=7, errors=errors)


@dataclass(frozen=True)
class Behind:
    """What is behind the device."""

    host_blocks: int = 0
    """Room in the host's memory, in blocks of the first size; 0 for none."""
    disk: Path | None = None
    disk_blocks: int = 60
    copy_failures: float = 0.1
    """Share of copies between device and host that fail."""
    seconds: float = 30.0
    """A transfer that takes longer has failed."""


class RandomLoad:
    """Submits, aborts, stops, refuses, resets, changes and steps at random; the seed says how.

    Args:
        seed: of everything.
        windows: the KV groups'.
        behind: tiers behind the device; none without it.
        emit_token_ids: whether events tell tokens.
        log_capacity: events that slow followers may fall behind.
    """

    def __init__(
        self,
        seed: int,
        windows: tuple[int | None, ...] = (None,),
        *,
        behind: Behind | None = None,
        emit_token_ids: bool = False,
        log_capacity: int = 200_000,
    ) -> None:
        self.random = random = Random(seed)
        self.clock = FakeClock()
        self.log = EventLog(log_capacity, self.clock)
        self.model = TimedModel(self.clock, random)
        self.worker: SteppedWorker | None = None
        self.behind = behind
        block_size = random.choice([1, 2, 4, 8])
        self.model.period = random.choice([0, 2, 5])
        self.core = make_core(
            self.model,
            self.log,
            num_blocks=random.randint(14, 50) + 12 * (len(windows) - 1),
            groups=make_groups(*windows),
            block_size=block_size,
            max_num_seqs=random.randint(3, 8),
            max_batch_tokens=random.randint(8, 40),
            max_prefill_chunk=random.choice([None, 4, 9]),
            watermark_blocks=random.randint(0, 3),
            enable_prefix_cache=random.random() < 0.8 or behind is not None,
            reserve_prompt=random.random() < 0.7,
            priority_aging_seconds=random.choice([0.0, 1.0, 30.0]),
            victim_policy=random.choice(["newest", "least-computed", "lowest-priority"]),
            deadline_seconds=random.choice([None, None, 20.0]),
            num_speculative_tokens=random.choice([0, 1, 5]),
            prompt_lookup_min=random.randint(1, 2),
            emit_token_ids=emit_token_ids,
            preemption_mode="recompute" if behind is None else random.choice(["swap", "swap", "auto"]),
            make_tiers=None if behind is None else self._make_tiers,
        )
        self.changer = Changer(self.core, RebuildLimits(cooldown_seconds=0.0))
        self.cursor = self.log.subscribe("test")
        self.oracle = Oracle(self.core)
        self.oracle.changes.watch(self.changer)
        self.mirror = Mirror(self.clock, 0)
        self.mirror.load(self.core.snapshot())
        self.desk = PrefixDesk(self.core)
        self.num_submitted = 0
        self.latest: GenerationRequest | None = None

    def _make_tiers(self, manager: BlockManager) -> MemoryTiers:
        behind, size = self.behind, manager.block_size
        assert behind is not None
        device = SlotStore(self.model)
        device.before = self._copy
        identity = StoreIdentity(
            weights_fingerprint="w", kv_dtype="int64", block_size=size, num_layers=1, num_kv_heads=1, head_dim=1
        )
        settings = TierSettings(
            host_bytes=SLOT_BYTES * size * behind.host_blocks,
            disk_folder=behind.disk,
            disk_bytes=1000 * behind.disk_blocks if behind.disk else 0,
            transfer_seconds=behind.seconds,
        )
        self.model.block_size = size
        machine = Machine(device, make_worker=self._make_worker)
        return MemoryTiers(manager, settings, machine, identity, SLOT_BYTES * size, self.log)

    def _make_worker(self, mover: Mover) -> SteppedWorker:
        self.worker = SteppedWorker(mover)
        return self.worker

    def _copy(self) -> None:
        assert self.behind is not None
        if self.random.random() < self.behind.copy_failures:
            raise RuntimeError("made to fail")

    # ------------------------------------------------------------------ what happens

    def turn(self) -> None:
        """Let something happen, or nothing, then step."""
        if self.random.random() < 0.4:
            self.submit()
        if self.random.random() < 0.1:
            self.disturb()
        self.clock.advance(self.random.choice(PAUSE_SECONDS))
        if self.worker is not None:
            self.worker.carry_out(self.random.choice([0, 0, 1, 2, 3]))
        self.core.step()

    def submit(self) -> None:
        """Submit a request, now and then one that an earlier one is equal to; refuse it if it can never run."""
        settings = self.core.settings
        self.log.begin(self.core.num_steps)
        self.num_submitted += 1
        if self.latest is None or self.random.random() < 0.8:
            self.latest = self._make_request()
        request = replace(self.latest, request_id=f"r{self.num_submitted}")
        sampling, num_tokens = request.sampling, len(request.prompt_token_ids)
        most = most_blocks(settings, num_tokens, sampling.max_tokens, sampling.num_sequences)
        if most > settings.num_usable_blocks or sampling.num_sequences > settings.max_num_seqs:
            self.core.reject(Refusal(request.request_id, "too_long"))
        else:
            self.core.add(request, self.clock.monotonic_ns())

    def _make_request(self) -> GenerationRequest:
        random = self.random
        n = random.choice([1, 1, 1, 2, 3])
        beams = BeamParams(width=n, early_stopping="never") if random.random() < 0.3 else None
        prompt = tuple(random.randint(0, 1) for _ in range(random.randint(1, 24)))
        origin = RequestOrigin(
            tenant=random.choice(["", "t1", "t2"]), adapter=random.choice(["", "", "", "one", "other"]), is_stream=True
        )
        return GenerationRequest(
            request_id="",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=random.randint(1, 16),
                n=n,
                beams=beams,
                seed=random.randint(0, 99),
                prompt_logprobs=1 if self.num_submitted % 8 == 5 else None,
            ),
            origin=origin,
            load_id=LoadId(origin.adapter) if origin.adapter else None,
            priority=random.choice([0, 0, 1, 2]),
            cache_salt=random.choice(["", "", "", "", "salt"]),
            tenant_salt=random.choice(["", "", "", "", "of t1"]),
            images=self._images(len(prompt)) if random.random() < 0.2 else (),
        )

    def refuse(self, name: str, number: int) -> None:
        """Refuse so many requests of this name."""
        self.log.begin(self.core.num_steps)
        for _ in range(number):
            self.core.reject(Refusal(name, "invalid"))

    def _images(self, num_tokens: int) -> tuple[PromptImage, ...]:
        """Return an image somewhere in the prompt."""
        position = self.random.randrange(num_tokens)
        length = self.random.randint(1, num_tokens - position)
        content = self.random.choice([b"cat", b"dog"]).ljust(32)
        return (PromptImage(position, length, PreparedImage(content, PIXELS)),)

    def disturb(self) -> None:
        """Let somebody change, end or break something."""
        self.clock.advance(self.random.choice(PAUSE_SECONDS))
        self.log.begin(self.core.num_steps)
        actions: list[Callable[[], None]] = [
            self.end_some, self.end_some, self.end_some, self.end_all, self.fail, self.fail, self.pause, self.reset,
            self.pin, self.unpin, self.change_settings, self.change_settings,
        ]  # fmt: skip
        self.random.choice(actions)()

    def end_some(self) -> None:
        """Abort a request, or stop one of its sequences."""
        live = self.core.live_request_ids()
        if live and self.random.random() < 0.7:
            self.core.abort(self.random.choice(live), FinishReason.ABORT)
        elif live:
            self.core.stop_sequence(self.random.choice(live), self.random.randint(0, 2))

    def end_all(self) -> None:
        """Abort all requests."""
        for request_id in self.core.live_request_ids():
            self.core.abort(request_id)

    def fail(self) -> None:
        """Let the next step fail."""
        self.model.next_error = self.random.choice([RuntimeError("made to fail"), MemoryError("made to fail")])

    def pause(self) -> None:
        """Pause admission for a time, or end that."""
        pause = self.core.scheduler.admission.pause
        if pause.is_active:
            pause.end("", "")
        else:
            pause.begin(self.random.choice([0.1, 3.0, 60.0]), "", "")

    def reset(self) -> None:
        """Forget all content."""
        self.desk.reset(unpin=True, actor="", reason="")

    def pin(self) -> None:
        """Pin the beginning of what some request has computed."""
        live, length = self.core.live_request_ids(), self.random.randint(1, 24)
        if live:
            with suppress(ChangeRefused):
                name = self.random.choice(live)
                self.desk.prepare_pin_of(name, length, self.core.accepted(), actor="", reason="")[1]()

    def unpin(self) -> None:
        """End a pin."""
        pins = self.desk.pins()
        if pins:
            self.desk.prepare_unpin(self.random.choice(pins).pin, actor="", reason="")[1]()

    def change_settings(self) -> None:
        """Resize the pool, lay it out anew, or change a policy; much of it is refused or fails."""
        random, num_groups = self.random, len(self.core.settings.groups)
        modes = ["recompute"] if self.core.tiers is None else ["recompute", "swap", "auto"]
        choices: list[Callable[[], Changes]] = [
            lambda: {"num_blocks": random.randint(2, 60) + 12 * (num_groups - 1)},
            lambda: {"num_blocks": random.randint(2, 60) + 12 * (num_groups - 1)},
            lambda: {"block_size": random.choice([1, 2, 3, 4, 8])},
            lambda: {"watermark": random.choice(["0", "2", "0.1"]), "reserve_prompt": random.random() < 0.5},
            lambda: {"max_num_seqs": random.randint(3, 8), "max_queued_requests": random.randint(20, 30)},
            lambda: {"victim_policy": random.choice(["newest", "least-computed", "lowest-priority"])},
            lambda: {"max_prefill_chunk": random.choice([None, 4, 9]), "preemption_mode": random.choice(modes)},
            lambda: {"prefix_cache": random.random() < 0.8, "num_speculative_tokens": random.choice([0, 3])},
        ]
        self.model.spare_bytes = random.choice([0, 1 << 40])
        with suppress(ChangeRefused, ChangeFailed):
            self.changer.prepare(random.choice(choices)(), [], actor="", reason="", version=None)[1]()

    def differences(self) -> list[str]:
        """Bring the mirror up to date and compare its view with the engine, exactly."""
        self.mirror.apply(self.cursor.read(200_000))
        self.mirror.publish(self.log.now_ns)
        offset = self.clock.wall_ns() - self.clock.monotonic_ns()
        return self.oracle.differences(self.mirror.view, offset)
