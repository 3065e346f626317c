"""An engine under random load with every feature on, watched by a mirror and by the oracle of all metrics."""

from contextlib import suppress
from dataclasses import replace
from random import Random

from builders import FakeClock, NullModel, make_core, make_groups
from metrics_oracle import Oracle

from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.adapter import LoadId
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, Refusal, RequestOrigin
from kvwatch_engine.contracts.sampling import BeamParams, SamplingParams
from kvwatch_engine.contracts.step import Int64Array, StepInput, StepResult
from kvwatch_engine.prefixes import PrefixDesk
from kvwatch_engine.scheduling.policy import most_blocks

STEP_NS = (0, 1_000_000, 20_000_000, 300_000_000, 2_000_000_000)
PAUSE_SECONDS = (0.0, 0.0, 0.0, 0.001, 1.0, 40.0, 90.0)


class TimedModel(NullModel):
    """A null model whose steps take the time that a fake clock is told, and fail when told."""

    def __init__(self, clock: FakeClock, random: Random) -> None:
        super().__init__()
        self.clock = clock
        self.random = random
        self.next_error: Exception | None = None

    def rebuild(self, num_blocks: int, sources: Int64Array, destinations: Int64Array) -> None:
        self.clock.now_ns += self.random.choice(STEP_NS)
        if self.random.random() < 0.2:
            raise MemoryError("made to fail")
        super().rebuild(num_blocks, sources, destinations)

    def execute(self, step: StepInput) -> StepResult:
        duration = self.random.choice(STEP_NS)
        self.clock.now_ns += duration
        error, self.next_error = self.next_error, None
        if error is not None:
            raise error
        result = super().execute(step)
        errors = {0: "made to fail"} if self.random.random() < 0.01 and result.token_ids else {}
        return replace(result, forward_ns=duration, sample_ns=7, errors=errors)


class RandomLoad:
    """Submits, aborts, stops, refuses, resets and steps at random; the seed says how. `windows` are the KV groups'."""

    def __init__(self, seed: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.random = random = Random(seed)
        self.clock = FakeClock()
        self.log = EventLog(200_000, self.clock)
        block_size = random.choice([1, 2, 4, 8])
        self.core = make_core(
            TimedModel(self.clock, random),
            self.log,
            num_blocks=random.randint(14, 50) + 12 * (len(windows) - 1),
            groups=make_groups(*windows),
            block_size=block_size,
            max_num_seqs=random.randint(3, 8),
            max_batch_tokens=random.randint(8, 40),
            max_prefill_chunk=random.choice([None, 4, 9]),
            watermark_blocks=random.randint(0, 3),
            enable_prefix_cache=random.random() < 0.8,
            reserve_prompt=random.random() < 0.7,
            priority_aging_seconds=random.choice([0.0, 1.0, 30.0]),
            victim_policy=random.choice(["newest", "least-computed", "lowest-priority"]),
            deadline_seconds=random.choice([None, None, 20.0]),
        )
        self.cursor = self.log.subscribe("test")
        self.oracle = Oracle(self.core)
        self.mirror = Mirror(self.clock, 0)
        self.mirror.load(self.core.snapshot())
        self.desk = PrefixDesk(self.core)
        self.num_submitted = 0

    def turn(self) -> None:
        """Let something happen, or nothing, then step."""
        if self.random.random() < 0.4:
            self.submit()
        if self.random.random() < 0.1:
            self.disturb()
        self.clock.advance(self.random.choice(PAUSE_SECONDS))
        self.core.step()

    def submit(self) -> None:
        random = self.random
        self.num_submitted += 1
        n, max_tokens = random.choice([1, 1, 1, 2, 3]), random.randint(1, 16)
        beams = BeamParams(width=n, early_stopping="never") if random.random() < 0.3 else None
        prompt = tuple(random.randint(0, 1) for _ in range(random.randint(1, 24)))
        settings = self.core.settings
        if most_blocks(settings, len(prompt), max_tokens, n) > settings.num_blocks - 1:
            self.core.reject(Refusal(f"r{self.num_submitted}", "too_long"))
            return
        origin = RequestOrigin(
            tenant=random.choice(["", "t1", "t2"]), adapter=random.choice(["", "", "", "one", "other"]), is_stream=True
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n, beams=beams, seed=random.randint(0, 99))
        request = GenerationRequest(
            request_id=f"r{self.num_submitted}",
            prompt_token_ids=prompt,
            sampling=sampling,
            origin=origin,
            load_id=LoadId(origin.adapter) if origin.adapter else None,
            priority=random.choice([0, 0, 1, 2]),
        )
        self.log.begin(self.core.num_steps)
        self.core.add(request, self.clock.monotonic_ns())

    def disturb(self) -> None:
        random, core = self.random, self.core
        self.clock.advance(random.choice(PAUSE_SECONDS))
        self.log.begin(core.num_steps)
        live = core.live_request_ids()
        kind = random.choice(
            ["abort", "abort", "abort all", "stop", "fail", "out of memory", "reset", "resize", "pin", "unpin"]
        )
        model = core._executor
        assert isinstance(model, TimedModel)
        if kind in ("reset", "pin", "unpin"):
            self.change_prefixes(kind)
        elif kind == "resize":
            with suppress(ChangeRefused, ChangeFailed):
                core.resize(core.prepare_resize(random.randint(1, 60) + 12 * (len(core.settings.groups) - 1)))
        elif kind == "fail":
            model.next_error = RuntimeError("made to fail")
        elif kind == "out of memory":
            model.next_error = MemoryError("made to fail")
        elif kind == "abort all":
            for request_id in live:
                core.abort(request_id)
        elif live and kind == "abort":
            core.abort(random.choice(live), FinishReason.ABORT)
        elif live:
            core.stop_sequence(random.choice(live), random.randint(0, 2))

    def change_prefixes(self, kind: str) -> None:
        """Reset the cache, pin the beginning of what some request has computed, or end a pin."""
        desk, live, pins = self.desk, self.core.live_request_ids(), self.desk.pins()
        if kind == "reset":
            desk.reset(unpin=True, actor="", reason="")
        elif kind == "pin" and live:
            name, length, accepted = self.random.choice(live), self.random.randint(1, 24), self.core.accepted()
            with suppress(ChangeRefused):
                desk.prepare_pin_of(name, length, accepted, actor="", reason="")[1]()
        elif pins:
            desk.prepare_unpin(self.random.choice(pins).pin, actor="", reason="")[1]()

    def differences(self) -> list[str]:
        """Bring the mirror up to date and compare its view with the engine, exactly."""
        self.mirror.apply(self.cursor.read(200_000))
        self.mirror.publish(self.log.now_ns)
        offset = self.clock.wall_ns() - self.clock.monotonic_ns()
        return self.oracle.differences(self.mirror.view, offset)
