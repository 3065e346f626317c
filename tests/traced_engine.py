"""An engine whose requests are traced.

The engine is real, the model arithmetic; the clock moves only when a step runs.
"""

from collections.abc import Sequence
from typing import Any

from builders import FakeClock, NullModel, make_core, make_request
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from kvwatch.exporters.otel.assembler import TraceAssembler
from kvwatch.exporters.otel.genai import GenAiHistograms
from kvwatch.exporters.otel.request_trace import RequestTrace
from kvwatch.exporters.otel.sampling import Sampler
from kvwatch.exporters.otel.spans import FinishedTrace, SpanBuilder
from kvwatch.telemetry.events import (
    RequestPreempted,
)
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch_engine.contracts.request import GenerationRequest, RequestOrigin

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STEP_SECONDS = 0.01


class Traced:
    """An engine whose requests are traced."""

    def __init__(self, *, ratio: float = 1.0, slow_seconds: float = 1e9, **settings: Any) -> None:
        self.clock = FakeClock()
        self.log = EventLog(1 << 16, self.clock)
        self.model = NullModel()
        self.model.on_step = lambda _: self.clock.advance(STEP_SECONDS)
        self.core = make_core(self.model, self.log, **settings)
        self.cursor = self.log.subscribe("otel")
        self.assembler = TraceAssembler(Sampler(ratio, slow_seconds), self._finish)
        self.assembler.load(self.core.snapshot())
        self.builder = SpanBuilder(Resource({}), "tiny", {"server.port": 8000})
        self.histograms = GenAiHistograms("tiny", {})
        self.finished: dict[str, RequestTrace] = {}
        self.traces: dict[str, FinishedTrace] = {}
        self.events: list[Event] = []

    def _finish(self, trace: RequestTrace) -> None:
        self.finished[trace.request] = trace
        self.histograms.count(trace)
        if trace.chosen is not None:
            self.traces[trace.request] = self.builder.build(trace, self.clock.wall_ns() - self.clock.monotonic_ns())

    def add(self, request: GenerationRequest) -> None:
        self.log.begin(self.core.num_steps)
        self.core.add(request, self.clock.monotonic_ns())

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.step()
        self.follow()

    def run(self) -> None:
        for _ in range(5_000):
            if not self.core.has_work:
                break
            self.core.step()
            self.follow()
        assert not self.core.has_work

    def follow(self) -> None:
        while events := self.cursor.read():
            self.events += events
            self.assembler.apply(events)

    def root(self, request: str) -> ReadableSpan:
        return self.traces[request].spans[0]

    def children(self, request: str, parent: ReadableSpan | None = None) -> list[ReadableSpan]:
        above = (parent or self.root(request)).get_span_context()
        assert above is not None
        found = [s for s in self.traces[request].spans if s.parent and s.parent.span_id == above.span_id]
        return sorted(found, key=lambda span: span.start_time or 0)


def of(
    request: str, prompt: Sequence[int], origin: RequestOrigin | None = None, **sampling: object
) -> GenerationRequest:
    made = make_request(request, prompt, **sampling)
    return GenerationRequest(
        request_id=request,
        prompt_token_ids=made.prompt_token_ids,
        sampling=made.sampling,
        origin=origin or RequestOrigin(operation="chat"),
    )


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def pressed(**more: object) -> Traced:
    """Two requests that need more blocks than there are."""
    traced = Traced(num_blocks=7, max_batch_tokens=16, enable_prefix_cache=False, **more)  # type: ignore[arg-type]
    traced.add(of("old", range(8), max_tokens=16))
    traced.add(of("young", range(20, 28), max_tokens=16))
    traced.run()
    assert any(isinstance(event, RequestPreempted) for event in traced.events)
    return traced
