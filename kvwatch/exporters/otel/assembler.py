"""Follows the log and puts together what happened to each request.

A follower of the observatory: one thread, nothing in the step loop. Holds one trace for each live request and hands it
over, whole, when the request has ended. A step costs it nothing for requests that only decode.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvwatch.exporters.otel.request_trace import Happening, RefusedTrace, RequestTrace
from kvwatch.exporters.otel.sampling import Sampler
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch.telemetry.trace_context import begin_trace, read_trace_parent


class TraceAssembler:
    """Turns events into finished traces. Observatory thread only.

    Args:
        sampler: Decides which traces are exported.
        finish: Is given every request that has ended, exported or not (`chosen` says so).
        refuse: Is given every request that was refused and whose trace is to be exported.
    """

    def __init__(
        self,
        sampler: Sampler,
        finish: Callable[[RequestTrace], None],
        refuse: Callable[[RefusedTrace], None] = lambda _: None,
    ) -> None:
        self._sampler = sampler
        self._finish = finish
        self._refuse = refuse
        self._live: dict[str, RequestTrace] = {}
        self._computing: dict[str, RequestTrace] = {}
        """Requests with pending tokens: their next step has a chunk worth a span."""
        self._in_step: list[RequestTrace] = []
        """Requests with a chunk in the step under way."""
        self._lead = ""
        self._lead_before = ""
        """First request of the step under way, and of the last one if that brought it a token."""
        self._token_ns = 0
        self._handlers = self._make_handlers()

    @property
    def live(self) -> Sequence[RequestTrace]:
        """Requests that have not ended, oldest first."""
        return list(self._live.values())

    # ------------------------------------------------------------ Follower

    def load(self, snapshot: EngineSnapshot) -> None:
        """Go on from a snapshot: keep what is still live, but admit that something was missed."""
        known, self._live = self._live, {}
        for state in snapshot.requests:
            trace = known.get(state.request)
            if trace is None:
                context = begin_trace()
                trace = RequestTrace(state.request, state.queued_ns, context, self._sampler.first(context))
            trace.lose_track()
            self._live[state.request] = trace
        self._computing.clear()
        self._in_step.clear()
        self._lead = self._lead_before = ""

    def apply(self, events: Sequence[Event]) -> None:
        """Take events in order."""
        handlers = self._handlers
        for event in events:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)

    def settle(self) -> None:
        """Do nothing: a trace is handed over the moment it ends."""

    def publish(self) -> None:
        """Do nothing, for the same reason: what is still live has no end to show."""

    # ------------------------------------------------------------ events of requests

    def _make_handlers(self) -> dict[type[Event], Callable[[Any], None]]:
        return {
            ev.RequestQueued: self._queued,
            ev.RequestRejected: self._rejected,
            ev.RequestAdmitted: self._admitted,
            ev.FirstToken: self._first_token,
            ev.RequestPreempted: self._preempted,
            ev.RequestResumed: self._resumed,
            ev.RequestFinished: self._finished,
            ev.StepScheduled: self._scheduled,
            ev.StepCompleted: self._completed,
            ev.StepFailed: self._failed,
            ev.BlocksReused: self._reused,
            ev.BlocksCopied: self._copied,
            ev.BlocksEvicted: self._evicted,
            ev.SequenceForked: self._forked,
            ev.ConfigChanged: self._changed,
            ev.PoolRebuilt: self._rebuilt,
        }

    def _queued(self, event: ev.RequestQueued) -> None:
        context = read_trace_parent(event.trace_parent, may_begin=True) or begin_trace()
        trace = RequestTrace(event.request, event.queued_ns, context, self._sampler.first(context))
        trace.queued = event
        trace.enter("queue", event.queued_ns)
        self._live[event.request] = trace

    def _rejected(self, event: ev.RequestRejected) -> None:
        # Not kept for having failed: an overload refuses thousands, and would push out the traces that explain it.
        context = read_trace_parent(event.trace_parent, may_begin=True) or begin_trace()
        chosen = self._sampler.first(context)
        if chosen is not None:
            self._refuse(RefusedTrace(event, context, chosen))

    def _admitted(self, event: ev.RequestAdmitted) -> None:
        trace = self._live.get(event.request)
        if trace is not None:
            trace.hit_tokens[event.tier] += event.hit_tokens
            further = {"host": event.host_hit_tokens, "disk": event.disk_hit_tokens}
            trace.hit_tokens.update({tier: num_tokens for tier, num_tokens in further.items() if num_tokens})
            trace.enter("prefill", event.time_ns)
            self._compute(trace, event.prompt_tokens - event.hit_tokens - sum(further.values()))

    def _first_token(self, event: ev.FirstToken) -> None:
        trace = self._live.get(event.request)
        if trace is not None:
            trace.has_first_token, trace.ttft_ns = True, event.ttft_ns
            trace.enter("decode", event.time_ns)

    def _preempted(self, event: ev.RequestPreempted) -> None:
        trace = self._live.get(event.request)
        if trace is None:
            return
        self._computing.pop(event.request, None)
        trace.num_preemptions += 1
        trace.enter("preempted", event.time_ns)
        favoured = None if event.beneficiary == event.request else self._live.get(event.beneficiary)
        trace.happen(
            Happening("preempted", event.time_ns, event.num_blocks, event.tokens_at_risk, event.beneficiary, favoured)
        )

    def _resumed(self, event: ev.RequestResumed) -> None:
        trace = self._live.get(event.request)
        if trace is None:
            return
        trace.recompute_tokens += event.recompute_tokens
        if trace.has_first_token:
            trace.enter("decode", event.time_ns)
            self._compute(trace, event.recompute_tokens + 1)  # the newest token was never computed
            return
        trace.enter("prefill", event.time_ns)
        if event.mode == "swap":
            self._compute(trace, trace.pending_tokens)  # it goes on where it was
        elif trace.queued is not None:
            self._compute(trace, trace.queued.prompt_tokens - event.hit_tokens)

    def _finished(self, event: ev.RequestFinished) -> None:
        trace = self._live.pop(event.request, None)
        if trace is None:
            return
        self._computing.pop(event.request, None)
        trace.leave(event.time_ns)
        trace.finished = event
        trace.num_preemptions = max(trace.num_preemptions, event.num_preemptions)
        trace.chosen = trace.chosen or self._sampler.last(
            num_preemptions=trace.num_preemptions,
            is_failed=event.reason in ("error", "deadline"),
            duration_ns=event.time_ns - trace.queued_ns,
        )
        self._finish(trace)
        trace.happenings.clear()  # else a chain of preemptions would keep every trace of the chain alive

    def _compute(self, trace: RequestTrace, num_tokens: int) -> None:
        trace.pending_tokens = num_tokens
        if num_tokens > 0:
            self._computing[trace.request] = trace

    # ------------------------------------------------------------ events of steps

    def _scheduled(self, event: ev.StepScheduled) -> None:
        self._lead = event.requests[0] if event.requests else ""
        if not self._computing:
            return
        for name, num_tokens in zip(event.requests, event.num_tokens, strict=True):
            trace = self._computing.get(name)
            if trace is None:
                continue
            trace.begin_chunk(event.time_ns, num_tokens, event.step)
            self._in_step.append(trace)
            if trace.pending_tokens <= 0:
                del self._computing[name]

    def _completed(self, event: ev.StepCompleted) -> None:
        self._end_chunks(event.time_ns)
        lead = self._live.get(self._lead)
        if lead is not None and self._lead == self._lead_before:
            lead.note_gap(event.time_ns - self._token_ns)
        has_token = lead is not None and lead.phase == "decode" and self._lead not in self._computing
        self._lead_before = self._lead if has_token else ""
        self._token_ns = event.time_ns

    def _failed(self, event: ev.StepFailed) -> None:
        self._end_chunks(event.time_ns)
        self._lead_before = ""

    def _end_chunks(self, now_ns: int) -> None:
        for trace in self._in_step:
            trace.end_chunk(now_ns)
        self._in_step.clear()

    # ------------------------------------------------------------ events of blocks

    def _reused(self, event: ev.BlocksReused) -> None:
        trace = self._live.get(event.request)
        if trace is not None:
            trace.num_reused_blocks += len(event.block_ids)

    def _copied(self, event: ev.BlocksCopied) -> None:
        trace = self._live.get(event.request)
        if trace is not None:
            trace.num_copied_blocks += len(event.sources)
            trace.happen(Happening("copy_on_write", event.time_ns, len(event.sources)))

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        trace = self._live.get(event.request)
        if trace is not None:
            trace.num_evicted_blocks += len(event.block_ids)

    def _forked(self, event: ev.SequenceForked) -> None:
        trace = self._live.get(event.request)
        if trace is not None:
            trace.num_shared_blocks += event.num_blocks

    # ------------------------------------------------------------ events of operators

    def _changed(self, event: ev.ConfigChanged) -> None:
        change = {"key": event.key, "old": event.old, "new": event.new, "actor": event.actor}
        self._happen_to_all(Happening("config_changed", event.time_ns, change=_named("config", change)))

    def _rebuilt(self, event: ev.PoolRebuilt) -> None:
        if event.duration_ns is None:
            return  # it was refused, and nobody noticed
        change: dict[str, str | int | float] = {
            "outcome": event.outcome,
            "old_blocks": event.old_num_blocks,
            "new_blocks": event.new_num_blocks,
            "pause_seconds": event.duration_ns / 1e9,
        }
        self._happen_to_all(Happening("pool_rebuilt", event.time_ns, change=_named("pool", change)))

    def _happen_to_all(self, happening: Happening) -> None:
        for trace in self._live.values():
            trace.happen(happening)


def _named(prefix: str, change: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    return {f"kvwatch.{prefix}.{name}": value for name, value in change.items()}
