"""Pool, blocks, watermark and preemption change under full load: no request fails, no text differs, all is told."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import NullModel, make_request, make_settings
from live_load import LiveLoad
from live_stage import ASK
from openai_server import wait_until
from opentelemetry.sdk.resources import Resource
from tiny_models import make_tiny_model

from kvwatch.control import SettingValue
from kvwatch.exporters.otel.assembler import TraceAssembler
from kvwatch.exporters.otel.request_trace import RequestTrace
from kvwatch.exporters.otel.sampling import Sampler
from kvwatch.exporters.otel.spans import SpanBuilder
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events import ConfigChanged, PoolRebuilt, RequestPreempted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason, SequenceOutput
from kvwatch_engine.contracts.step import StepInput
from kvwatch_engine.engine import Engine
from kvwatch_engine.live import LiveEngine, RebuildLimits
from kvwatch_engine.model.loader import LoadedModel, load_model

CHANGES: list[dict[str, SettingValue]] = [
    {"block_size": 32},
    {"block_size": 8},
    {"block_size": 16},
    {"num_blocks": 80},
    {"num_blocks": 300},
    {"watermark": "0.05"},
    {"preemption_mode": "swap"},
    {"block_size": 32, "num_blocks": 60},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))), dtype="float32")


def test_every_change_under_full_load_keeps_every_text(model: LoadedModel, tmp_path: Path) -> None:
    undisturbed = LiveLoad(model)
    undisturbed.run()
    load = LiveLoad(model, tmp_path)
    builder, spans = SpanBuilder(Resource({}), "tiny", {}), []

    def finish(trace: RequestTrace) -> None:
        spans.append(builder.build(trace, 0).spans[0])

    assembler = TraceAssembler(Sampler(1.0, 1e9), finish)
    assembler.load(load.core.snapshot())
    mirror, cursor = Mirror(load.log.clock, 0), load.log.subscribe("metrics")
    mirror.load(load.core.snapshot())

    for changes in CHANGES:
        load.reach_full_load()
        preview, outcome = load.change(changes)
        assert preview.is_possible
        assert preview.changes == outcome.changes
        for key, value in changes.items():
            assert {str(each.key): each.new for each in outcome.changes}[key] == value
    load.run()
    while events := cursor.read(10_000):
        mirror.apply(events)
        assembler.apply(events)
    mirror.publish()

    assert load.texts == undisturbed.texts
    assert set(load.reasons.values()) == {FinishReason.LENGTH}
    assert load.core.manager.pool.num_used == 0
    told = [event for event in load.events if isinstance(event, ConfigChanged)]
    assert {event.key for event in told} == {"block_size", "num_blocks", "watermark", "preemption_mode"}
    rebuilt = [event.outcome for event in load.events if isinstance(event, PoolRebuilt)]
    assert rebuilt == ["rebuilt", "rebuilt", "rebuilt", "resized", "resized", "rebuilt"]
    modes = {event.mode for event in load.events if isinstance(event, RequestPreempted)}
    assert "recompute" in modes
    view = mirror.view
    assert view.value(m.POOL_REBUILDS, "rebuilt") == 4
    assert view.value(m.POOL_REBUILDS, "resized") == 2
    assert view.value(m.CONFIG_CHANGES, "block_size") == 4
    assert view.value(m.CONFIG_DRIFT, "preemption_mode") == 1
    assert mirror.num_violations == 0
    changed = [event for span in spans for event in span.events if event.name == "kvwatch.config_changed"]
    assert {(event.attributes or {})["kvwatch.config.key"] for event in changed} == {event.key for event in told}
    assert "kvwatch.pool_rebuilt" in {event.name for span in spans for event in span.events}
    load.core.close()


class PacedModel(NullModel):
    """Notes when each step begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_at = 0.0
        self.on_step = self._note

    def _note(self, _step: StepInput) -> None:
        self.begun_at = time.monotonic()
        time.sleep(0.01)


def test_the_pause_that_callers_see_is_the_one_that_is_reported() -> None:
    """Callers see the time from what one step brought to the beginning of the next."""
    model = PacedModel()
    settings = make_settings(num_blocks=400, max_model_len=400, eos_token_ids=())
    model.block_size = settings.block_size
    gaps: list[tuple[float, float]] = []
    last = [0.0]

    def listen(_outputs: Sequence[SequenceOutput]) -> None:
        gaps.append((last[0], model.begun_at))
        last[0] = time.monotonic()

    engine = Engine(settings, model, EventLog(), listen, block_bytes=64, memory=model)
    slow = {"memory"}
    control = LiveEngine(engine, RebuildLimits(), lambda phase: time.sleep(1.5) if phase in slow else None)
    engine.start()
    try:
        for number in range(4):
            engine.submit(make_request(f"r{number}", [5 + number] * 9, max_tokens=300, ignore_eos=True))
        wait_until(lambda: len(gaps) > 10, 60)
        outcome = control.apply({"block_size": 8}, **ASK)
        num_seen = len(gaps)
        wait_until(lambda: len(gaps) > num_seen + 3, 60)
    finally:
        engine.stop()

    seen = max(begun - ended for ended, begun in gaps[1:])
    assert outcome.pause_seconds >= 1.5
    assert seen == pytest.approx(outcome.pause_seconds, rel=0.1)
