"""A real engine core with the observatory's parts that recordings need, driven by hand on one thread.

The oracle is the engine itself: `snapshots` holds what it said after each step.
"""

import random
import threading
from pathlib import Path
from typing import Any

import msgspec
from builders import make_core, make_request
from scheduler_machine import FailingModel

from kvwatch.ledger.collector import Collector
from kvwatch.ledger.mirror import Mirror
from kvwatch.recorder.header import HeaderSource
from kvwatch.recorder.part import RecorderPart, RecorderSettings
from kvwatch.recorder.reader import Recording
from kvwatch.recorder.replay import Target, ledger_at
from kvwatch.recorder.sink import RecorderThread
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid

SMALL_FILES = 16 * 1024


def make_headers(log: EventLog) -> HeaderSource:
    return HeaderSource(log.clock, epoch="e1", identity={"engine": "test"}, config={"block_size": "4"})


def recorder_settings(folder: Path, **overrides: object) -> RecorderSettings:
    values: dict[str, object] = {"stem": "test", "record_dir": folder, **overrides}
    return msgspec.convert(values, RecorderSettings, dec_hook=lambda _, value: value)


class RecordingStage:
    """Steps an engine at random and records it."""

    def __init__(
        self, settings: RecorderSettings, seed: int = 0, log_capacity: int = 65_536, **core_settings: Any
    ) -> None:
        self.random = random.Random(seed)
        self.log = EventLog(log_capacity)
        self.model = FailingModel()
        self.core = make_core(self.model, self.log, **core_settings)
        self.mirror = Mirror(self.log.clock, 0)
        self.thread = RecorderThread()
        self._is_written = threading.Event()
        self._is_written.set()
        self._patience = 2.0
        self.part = RecorderPart(settings, make_headers(self.log), lambda: self.mirror, self.thread)
        self.part.open()
        follower = self.part.follower
        self.recorder = Collector(self.log, lambda _: self.core.snapshot(), follower, self.part.name)
        self.collectors = [Collector(self.log, lambda _: self.core.snapshot(), self.mirror), self.recorder]
        self.snapshots: dict[int, EngineSnapshot] = {}
        """What the engine said after each step, by step."""
        self.num_submitted = 0
        self.drain()

    def drain(self) -> None:
        """Bring everything to the parts, as the observatory's loop does."""
        for collector in self.collectors:
            if collector.needs_snapshot:
                assert collector.heal()
        while sum(collector.drain() for collector in self.collectors):
            pass
        self._wait_for_the_disk()
        if any(collector.needs_snapshot for collector in self.collectors):
            self.drain()

    def _wait_for_the_disk(self) -> None:
        """Let the writing thread come after: steps follow each other faster here than any model makes them."""
        if self._is_written.is_set():
            self._is_written.clear()
            self.thread.put(self._is_written.set)
        self._is_written.wait(self._patience)
        if not self._is_written.is_set():  # the test has stopped the disk
            self._patience = 0.0

    def submit(self) -> None:
        prompt = [self.random.randrange(4, 50) for _ in range(self.random.randrange(1, 24))]
        if self.random.random() < 0.6:
            prompt = [7] * 9 + prompt[:12]
        self.num_submitted += 1
        request = make_request(
            f"r{self.num_submitted}", prompt, n=self.random.choice([1, 1, 1, 2, 3]),
            max_tokens=self.random.randrange(1, 24),
        )  # fmt: skip
        try:
            self.core.add(request, self.log.clock.monotonic_ns())
        except (RequestInvalid, EngineOverloaded):
            self.num_submitted -= 1

    def run(self, num_steps: int, drain_every: int = 1, fail_chance: float = 0.0) -> None:
        """Take so many steps, with requests and aborts in between; some fail in the model."""
        for number in range(num_steps):
            if self.random.random() < 0.5 and len(self.core.live_request_ids()) < 24:
                self.submit()
            live = self.core.live_request_ids()
            if live and self.random.random() < 0.05:
                self.core.abort(self.random.choice(live))
            self.model.next_errors = [RuntimeError("the model fails")] if self.random.random() < fail_chance else []
            before = self.log.head
            self.core.step()
            if self.log.head != before:
                self.snapshots[self.log.step] = self.core.snapshot()
            if number % drain_every == 0:
                self.drain()
            elif self.random.random() < 0.3:  # ledger and recorder are hardly ever at the same event
                collector = self.random.choice(self.collectors)
                if not collector.needs_snapshot:
                    collector.drain()
        self.drain()

    def close(self) -> None:
        self.drain()
        for collector in self.collectors:
            collector.finish()
        self.part.close()


def record_files(folder: Path) -> list[Path]:
    """Return the recorder's files, oldest first."""
    return sorted(folder.glob("test-*.kvrec"))


def check_states(recording: Recording, snapshots: dict[int, EngineSnapshot], chooser: random.Random, num: int) -> int:
    """Compare the state at random places with what the engine said there; return how many were compared."""
    span = recording.span
    assert span is not None
    first_state = next(frame.span for frame in recording.frames if frame.kind.name == "STATE")
    inside = {
        step: snapshot
        for step, snapshot in snapshots.items()
        if first_state.first_seq <= snapshot.seq <= span.end_seq and first_state.first_step < step
    }
    steps = sorted(inside)
    for step in chooser.sample(steps, min(num, len(steps))):
        snapshot = inside[step]
        assert ledger_at(recording, Target(seq=snapshot.seq - 1)).differences(snapshot) == []
        assert ledger_at(recording, Target(step=step)).differences(snapshot) == []
    return min(num, len(steps))
