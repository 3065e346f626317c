"""A real engine on the arithmetic model, with what changes it while it serves."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from builders import NullModel, Recorder, make_request, make_settings
from openai_server import wait_until

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason, SequenceOutput
from kvwatch_engine.contracts.step import StepInput
from kvwatch_engine.contracts.tiers import Tiers
from kvwatch_engine.engine import Engine
from kvwatch_engine.live import LiveEngine
from kvwatch_engine.memory.block_manager import BlockManager


class Asking(TypedDict):
    """Who asks, and why."""

    actor: str
    reason: str


ASK: Asking = {"actor": "night shift", "reason": "to see what happens"}


class LiveStage:
    """An engine, and everything that its callers are told."""

    def __init__(
        self,
        model: NullModel | None = None,
        make_tiers: Callable[[BlockManager], Tiers] | None = None,
        pace_seconds: float = 0.002,
        **settings: Any,
    ) -> None:
        """Make an engine whose steps take at least `pace_seconds`, so that it is met in the middle of its work."""
        self._pace_seconds = pace_seconds
        self.model = model or NullModel()
        self.model.on_step = self._on_step
        self.log = EventLog()
        self.recorder = Recorder(self.log)
        limits = make_settings(**settings)
        self.model.block_size = limits.block_size
        self.engine = Engine(
            limits, self.model, self.log, self._collect, block_bytes=64, memory=self.model, make_tiers=make_tiers
        )
        self.control = LiveEngine(self.engine)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.expected: dict[str, list[int]] = {}
        self.num_steps = 0

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> None:
        """Submit a request whose answer is known."""
        request = make_request(request_id, prompt, max_tokens=max_tokens, ignore_eos=True, **sampling)
        self.expected[request_id] = [
            self.model.next_token(prompt, request.sampling.seed or 0, at) for at in range(max_tokens)
        ]
        self.engine.submit(request)

    def wait_begun(self, count: int) -> None:
        """Wait until so many steps have begun since the start."""
        wait_until(lambda: self.num_steps >= count, 60)

    def wait_steps(self, count: int) -> None:
        """Wait until so many more steps have begun: there must be work for them."""
        self.wait_begun(self.num_steps + count)

    def wait_idle(self) -> None:
        """Let everything end; answers must be those that were known."""
        wait_until(lambda: self.engine.num_live_requests == 0, 60)
        self.engine.check_integrity()
        for request_id, answer in self.expected.items():
            if self.reasons.get((request_id, 0)) is FinishReason.LENGTH:
                assert self.tokens[request_id, 0] == answer

    def _on_step(self, _step: StepInput) -> None:
        time.sleep(self._pace_seconds)
        self.num_steps += 1

    def _collect(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.sequence)
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason


@contextmanager
def live_stage(
    model: NullModel | None = None, make_tiers: Callable[[BlockManager], Tiers] | None = None, **settings: Any
) -> Iterator[LiveStage]:
    """Give a stage whose engine runs."""
    stage = LiveStage(model, make_tiers, **settings)
    stage.engine.start()
    try:
        yield stage
    finally:
        stage.engine.stop()
