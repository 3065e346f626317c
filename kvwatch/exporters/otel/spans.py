"""A finished request as spans: one SERVER span in the words of the GenAI conventions, its phases below it.

    chat <model>                     SERVER, continues the caller's trace; events: copies, preemptions, live changes
    ├── queue
    ├── prefill
    │   ├── prefill chunk            one for each step that computed a part of the prompt
    │   └── prefill chunk
    ├── decode
    ├── preempted                    away, waiting to come back
    └── decode
        └── recompute chunk          what the preemption had dropped

The conventions (semantic-conventions 1.41, status Development) have no server span and no word for blocks: names are
theirs where they have one, else `kvwatch.*`. Knows neither the log nor the collector.

Spans are built after the fact, with the ids and times that they had. The SDK's `Tracer` can do that too, but takes
eight times as long for each of them, on a thread that shares the interpreter with the engine.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from kvwatch import __version__
from kvwatch.exporters.otel.request_trace import (
    PHASES,
    Chunk,
    Happening,
    Phase,
    RefusedTrace,
    RequestTrace,
    new_span_id,
)
from kvwatch.exporters.otel.text import clean
from kvwatch.telemetry import metrics
from kvwatch.telemetry.events import RequestFinished, RequestQueued
from kvwatch.telemetry.schema import Metric
from kvwatch.telemetry.trace_context import TraceContext

PROVIDER = "kvwatch"
"""`gen_ai.provider.name`: who runs the model."""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
SCOPE = InstrumentationScope("kvwatch", __version__, SCHEMA_URL)

MAX_STATE = 512
"""Longest `tracestate` that is passed on."""

_INT64 = 1 << 63
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NO_STATE = TraceState()

Attributes = dict[str, AttributeValue]


class FinishedTrace(msgspec.Struct, frozen=True):
    """What goes to the collector for one request, and what exemplars may be made of it."""

    spans: tuple[ReadableSpan, ...]
    trace_id: str
    span_id: str
    unix_seconds: float
    """When it ended."""
    observations: tuple[tuple[Metric, float], ...]
    """Latencies of the request in seconds, under the histograms that observed them."""


class SpanBuilder:
    """Builds spans. Any thread.

    Args:
        resource: Who sends them.
        model_name: Model that is served.
        server: `server.address` and `server.port`, as far as they are known.
    """

    def __init__(self, resource: Resource, model_name: str, server: Mapping[str, AttributeValue]) -> None:
        self._resource = resource
        self._model_name = clean(model_name)
        self._server = dict(server)

    def build(self, trace: RequestTrace, wall_minus_monotonic_ns: int) -> FinishedTrace:
        """Return the spans of a request that has ended; the SERVER span comes first."""
        finished, queued = trace.finished, trace.queued
        assert finished is not None, "only what has ended has spans"
        family = _Family(self._resource, trace.context, _state(trace), trace.span_id, wall_minus_monotonic_ns)
        operation = operation_of(trace)
        is_failed = finished.reason in ("error", "deadline")
        attributes: Attributes = {
            **self._subject(operation),
            "gen_ai.response.model": self._model_name,
            **(_parameters(queued) if queued is not None else {}),
            **_outcome(trace, finished),
            **_kv(trace, finished),
        }
        root = ReadableSpan(
            f"{operation} {self._model_name}",
            family.context(trace.span_id),
            _caller(trace.context),
            self._resource,
            attributes,
            [family.event(happening) for happening in trace.happenings],
            _links(trace.happenings),
            SpanKind.SERVER,
            status=Status(StatusCode.ERROR, clean(finished.error) or None) if is_failed else Status(),
            start_time=trace.queued_ns + family.offset_ns,
            end_time=finished.time_ns + family.offset_ns,
            instrumentation_scope=SCOPE,
        )
        children = [span for phase in trace.phases for span in family.phase(phase)]
        return FinishedTrace(
            spans=(root, *children),
            trace_id=trace.context.trace_id,
            span_id=trace.span_id,
            unix_seconds=(finished.time_ns + family.offset_ns) / 1e9,
            observations=tuple(_observations(trace, finished)),
        )

    def build_refused(self, trace: RefusedTrace, wall_minus_monotonic_ns: int) -> FinishedTrace:
        """Return the one span of a request that was refused: it had no phases."""
        event, context = trace.rejected, trace.context
        span_id = new_span_id()
        state = read_state(event.trace_state) if context.parent_id else _NO_STATE
        family = _Family(self._resource, context, state, span_id, wall_minus_monotonic_ns)
        attributes: Attributes = {
            **self._subject(event.operation),
            "kvwatch.request.id": clean(event.request),
            "kvwatch.sampling.reason": trace.chosen,
            "error.type": event.reason,
        }
        if event.tenant:
            attributes["kvwatch.tenant"] = clean(event.tenant)
        refused_ns = event.refused_ns or event.time_ns
        root = ReadableSpan(
            f"{event.operation} {self._model_name}",
            family.context(span_id),
            _caller(context),
            self._resource,
            attributes,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, "refused"),
            start_time=(event.arrived_ns or refused_ns) + family.offset_ns,
            end_time=refused_ns + family.offset_ns,
            instrumentation_scope=SCOPE,
        )
        return FinishedTrace((root,), context.trace_id, span_id, (refused_ns + family.offset_ns) / 1e9, ())

    def _subject(self, operation: str) -> Attributes:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model_name,
            **self._server,
        }


def operation_of(trace: RequestTrace) -> str:
    """Return `gen_ai.operation.name`; that of a request whose beginning was missed is the plainer one."""
    return trace.queued.operation if trace.queued is not None else "text_completion"


def error_type_of(finished: RequestFinished) -> str | None:
    """Return `error.type` of a request that did not end by itself, else None."""
    if finished.reason in ("error", "deadline"):
        return clean(finished.error) or "engine_error"
    return "aborted" if finished.reason == "abort" else None


class _Family:
    """What the spans of one request have in common."""

    def __init__(
        self, resource: Resource, context: TraceContext, state: TraceState, span_id: str, offset_ns: int
    ) -> None:
        self._resource = resource
        self._trace_id = int(context.trace_id, 16)
        self._state = state
        self._root = self.context(span_id)
        self.offset_ns = offset_ns

    def context(self, span_id: str | None = None) -> SpanContext:
        """Return the context of a span; without an id, of a new one."""
        number = int(span_id, 16) if span_id else random.getrandbits(64) or 1
        return SpanContext(self._trace_id, number, is_remote=False, trace_flags=_SAMPLED, trace_state=self._state)

    def phase(self, phase: Phase) -> Iterator[ReadableSpan]:
        """Give the span of a phase and those of its chunks."""
        context = self.context()
        yield self._span(phase.name, context, self._root, (phase.begin_ns, phase.end_ns), {})
        for chunk in phase.chunks:
            name = "recompute chunk" if chunk.is_recompute else "prefill chunk"
            yield self._span(name, self.context(), context, (chunk.begin_ns, chunk.end_ns), _chunk(chunk))

    def event(self, happening: Happening) -> SpanEvent:
        """Return a happening as an event of the SERVER span."""
        attributes: Attributes = {
            name: clean(value) if isinstance(value, str) else value for name, value in happening.change.items()
        }
        if not attributes:
            attributes["kvwatch.kv.blocks"] = happening.num_blocks
        if happening.name == "preempted":
            attributes["kvwatch.kv.tokens_at_risk"] = happening.tokens_at_risk
            attributes["kvwatch.beneficiary.request.id"] = clean(happening.beneficiary)
        return SpanEvent(f"kvwatch.{happening.name}", attributes, happening.time_ns + self.offset_ns)

    def _span(
        self, name: str, context: SpanContext, parent: SpanContext, times_ns: tuple[int, int], attributes: Attributes
    ) -> ReadableSpan:
        begin_ns, end_ns = times_ns
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            start_time=begin_ns + self.offset_ns,
            end_time=end_ns + self.offset_ns,
            instrumentation_scope=SCOPE,
        )


def _caller(caller: TraceContext) -> SpanContext | None:
    if not caller.parent_id:
        return None
    flags = _SAMPLED if caller.is_sampled else TraceFlags(TraceFlags.DEFAULT)
    return SpanContext(int(caller.trace_id, 16), int(caller.parent_id, 16), is_remote=True, trace_flags=flags)


def _state(trace: RequestTrace) -> TraceState:
    text = trace.queued.trace_state if trace.queued is not None and trace.context.parent_id else ""
    return read_state(text)


def read_state(text: str) -> TraceState:
    """Return a `tracestate`; an empty one if there is none, or too much of it."""
    return TraceState.from_header([text]) if 0 < len(text) <= MAX_STATE else _NO_STATE


def _links(happenings: Sequence[Happening]) -> list[Link]:
    """Link each preemption to the request in whose favour it was, when that has a span or is sure to get one."""
    links = []
    for happening in happenings:
        favoured = happening.favoured
        if favoured is not None and favoured.chosen is not None:
            trace_id, span_id = int(favoured.context.trace_id, 16), int(favoured.span_id, 16)
            context = SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
            links.append(Link(context, {"kvwatch.link": "preempted in favour of"}))
    return links


def _chunk(chunk: Chunk) -> Attributes:
    attributes: Attributes = {"kvwatch.tokens": chunk.num_tokens, "kvwatch.step": chunk.step}
    if chunk.num_steps > 1:
        attributes["kvwatch.steps"] = chunk.num_steps
    return attributes


def _parameters(queued: RequestQueued) -> Attributes:
    attributes: Attributes = {
        "gen_ai.request.max_tokens": queued.max_tokens,
        "gen_ai.request.temperature": queued.temperature,
        "gen_ai.request.top_p": queued.top_p,
        "gen_ai.request.stream": queued.is_stream,
    }
    if queued.top_k > 0:
        attributes["gen_ai.request.top_k"] = queued.top_k
    if queued.seed is not None and -_INT64 <= queued.seed < _INT64:  # protobuf takes no other
        attributes["gen_ai.request.seed"] = queued.seed
    if queued.num_sequences != 1:
        attributes["gen_ai.request.choice.count"] = queued.num_sequences
    if queued.beam_width:
        attributes["kvwatch.request.beam_width"] = queued.beam_width
    for name, text in (("kvwatch.tenant", queued.tenant), ("kvwatch.adapter", queued.adapter)):
        if text:
            attributes[name] = clean(text)
    return attributes


def _outcome(trace: RequestTrace, finished: RequestFinished) -> Attributes:
    attributes: Attributes = {
        "gen_ai.response.id": clean(finished.request),
        "gen_ai.response.finish_reasons": tuple(finished.reasons) or (finished.reason,),
        "gen_ai.usage.input_tokens": finished.prompt_tokens,
        "gen_ai.usage.output_tokens": finished.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": finished.cached_tokens,
        "kvwatch.request.id": clean(finished.request),
        "kvwatch.sampling.reason": trace.chosen or "",
    }
    if trace.ttft_ns is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = trace.ttft_ns / 1e9
    error_type = error_type_of(finished)
    if error_type is not None:
        attributes["error.type"] = error_type
    for phase in PHASES:
        attributes[f"kvwatch.{phase}.seconds"] = trace.sums_ns[phase] / 1e9
    return attributes


def _kv(trace: RequestTrace, finished: RequestFinished) -> Attributes:
    attributes: Attributes = {
        "kvwatch.kv.preemptions": trace.num_preemptions,
        "kvwatch.kv.recomputed_tokens": finished.recomputed_tokens,
        "kvwatch.kv.reused_blocks": trace.num_reused_blocks,
        "kvwatch.kv.shared_blocks": trace.num_shared_blocks,
        "kvwatch.kv.copied_blocks": trace.num_copied_blocks,
        "kvwatch.kv.evicted_blocks": trace.num_evicted_blocks,
    }
    if finished.draft_tokens:
        attributes["kvwatch.drafts.proposed_tokens"] = finished.draft_tokens
        attributes["kvwatch.drafts.accepted_tokens"] = finished.accepted_draft_tokens
    if finished.peak_blocks is not None:
        attributes["kvwatch.kv.peak_blocks"] = finished.peak_blocks
    for tier, tokens in trace.hit_tokens.items():
        attributes[f"kvwatch.kv.hit_tokens.{tier}"] = tokens
    if trace.is_partial:
        attributes["kvwatch.telemetry.is_partial"] = True
    left_out = {
        "kvwatch.telemetry.phases_left_out": trace.num_phases - len(trace.phases),
        "kvwatch.telemetry.events_left_out": trace.num_happenings - len(trace.happenings),
    }
    return attributes | {name: count for name, count in left_out.items() if count > 0}


def _observations(trace: RequestTrace, finished: RequestFinished) -> Iterator[tuple[Metric, float]]:
    """Give the latencies of the request exactly as the ledger has observed them."""
    if trace.ttft_ns is not None:
        yield metrics.TIME_TO_FIRST_TOKEN, trace.ttft_ns / 1e9
    if finished.end_to_end_ns is not None:
        yield metrics.END_TO_END, finished.end_to_end_ns / 1e9
    for gap_ns in {trace.last_gap_ns, trace.max_gap_ns} - {0}:
        yield metrics.INTER_TOKEN_LATENCY, gap_ns / 1e9
