"""What a request went through, while it is in the engine: its phases, chunks and happenings, from events' own times.

    queue ──► prefill ──► decode ──► end          every boundary is an event's time; the phases touch each other,
                │  ▲        │  ▲                  so that their sum is the request's whole time
                ▼  │        ▼  │
             preempted   preempted

Owns the bounds: whatever happens to a request, its trace has at most `MAX_PHASES` phases, `MAX_CHUNKS` chunks and
`MAX_HAPPENINGS` happenings. What does not fit is in the sums, and counted. Knows no OpenTelemetry.
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvwatch.exporters.otel.sampling import Reason
from kvwatch.telemetry.events import RequestFinished, RequestQueued, RequestRejected
from kvwatch.telemetry.trace_context import TraceContext

MAX_PHASES = 64
MAX_CHUNKS = 32
MAX_HAPPENINGS = 64

PhaseName = Literal["queue", "prefill", "decode", "preempted"]
PHASES: tuple[PhaseName, ...] = ("queue", "prefill", "decode", "preempted")


@dataclass(slots=True)
class Chunk:
    """Tokens that ran through the model in one step; the last chunk of a trace may stand for many."""

    begin_ns: int
    end_ns: int
    num_tokens: int
    step: int
    is_recompute: bool
    num_steps: int = 1


@dataclass(slots=True)
class Phase:
    """A time during which a request did one thing. All times are monotonic ns."""

    name: PhaseName
    begin_ns: int
    end_ns: int
    chunks: list[Chunk]


@dataclass(slots=True)
class Happening:
    """Something at one moment: a copy-on-write, a preemption with the one in whose favour it was, a live change."""

    name: Literal["copy_on_write", "preempted", "config_changed", "pool_rebuilt"]
    time_ns: int
    num_blocks: int = 0
    tokens_at_risk: int = 0
    beneficiary: str = ""
    favoured: "RequestTrace | None" = None
    """Trace of the beneficiary; none if that is unknown or the request itself."""
    change: Mapping[str, str | int | float] = field(default_factory=dict)
    """What somebody changed while the request was live, by the names of attributes."""


def new_span_id() -> str:
    """Return a span id that no other span has."""
    return f"{random.getrandbits(64) or 1:016x}"


@dataclass(slots=True)
class RefusedTrace:
    """A request that never got as far as the queue."""

    rejected: RequestRejected
    context: TraceContext
    chosen: Reason
    """Why it is exported."""


class RequestTrace:
    """One request. Observatory thread only."""

    __slots__ = (
        "_chunk",
        "_phase",
        "chosen",
        "context",
        "finished",
        "happenings",
        "has_first_token",
        "hit_tokens",
        "is_partial",
        "last_gap_ns",
        "max_gap_ns",
        "num_chunks",
        "num_copied_blocks",
        "num_evicted_blocks",
        "num_happenings",
        "num_phases",
        "num_preemptions",
        "num_reused_blocks",
        "num_shared_blocks",
        "pending_tokens",
        "phases",
        "queued",
        "queued_ns",
        "recompute_tokens",
        "report_ns",
        "request",
        "span_id",
        "sums_ns",
        "ttft_ns",
    )

    def __init__(self, request: str, queued_ns: int, context: TraceContext, chosen: Reason | None) -> None:
        self.request = request
        self.queued_ns = queued_ns
        self.context = context
        self.chosen = chosen
        """Why it will be exported; None while nothing speaks for it."""
        self.span_id = new_span_id()
        """Id of its SERVER span, known from the beginning so that others can link to it."""
        self.queued: RequestQueued | None = None
        self.finished: RequestFinished | None = None
        self.is_partial = False
        """Whether events of it were lost, or happened before anybody listened."""
        self.phases: list[Phase] = []
        self.num_phases = 0
        self.sums_ns: Counter[PhaseName] = Counter()
        self.happenings: list[Happening] = []
        self.num_happenings = 0
        self.num_chunks = 0
        self.pending_tokens = 0
        """Tokens that still have to run through the model before it decodes (again)."""
        self.has_first_token = False
        self.ttft_ns: int | None = None
        self.max_gap_ns = self.last_gap_ns = 0
        """Times between tokens that were seen, the longest and the last; 0 if none was looked at."""
        self.num_preemptions = 0
        self.hit_tokens: Counter[str] = Counter()
        """Prompt tokens found in the cache at first admission, by tier."""
        self.recompute_tokens = 0
        self.num_reused_blocks = self.num_shared_blocks = self.num_copied_blocks = self.num_evicted_blocks = 0
        self.report_ns = 0
        """Time of the next report that it is still running."""
        self._phase: Phase | None = None
        self._chunk: Chunk | None = None

    # ------------------------------------------------------------ phases

    @property
    def phase(self) -> PhaseName | None:
        """What it does now; None when that is not known."""
        return self._phase.name if self._phase else None

    def enter(self, name: PhaseName, now_ns: int) -> None:
        """End the phase it is in and begin another."""
        self.leave(now_ns)
        self._phase = Phase(name, now_ns, now_ns, [])
        self.num_phases += 1
        if len(self.phases) < MAX_PHASES:
            self.phases.append(self._phase)

    def leave(self, now_ns: int) -> None:
        """End the phase it is in."""
        self.end_chunk(now_ns)
        if self._phase is not None:
            self._phase.end_ns = max(now_ns, self._phase.begin_ns)
            self.sums_ns[self._phase.name] += self._phase.end_ns - self._phase.begin_ns
            self._phase = None

    def lose_track(self) -> None:
        """Forget the phase it is in, since events were lost: what is not known is not shown."""
        if self._phase is not None:
            self.num_phases -= 1
            if self.phases[-1] is self._phase:
                self.phases.pop()
        self._phase = self._chunk = None
        self.pending_tokens = 0
        self.is_partial = True

    def sums_at(self, now_ns: int) -> Counter[PhaseName]:
        """Return the time spent in each phase so far, the one it is in included."""
        sums = self.sums_ns.copy()
        if self._phase is not None:
            sums[self._phase.name] += now_ns - self._phase.begin_ns
        return sums

    # ------------------------------------------------------------ inside a phase

    def begin_chunk(self, now_ns: int, num_tokens: int, step: int) -> None:
        """Note that tokens go through the model."""
        self.pending_tokens -= num_tokens
        self.num_chunks += 1
        if self._phase is None:
            return
        if self.num_chunks <= MAX_CHUNKS:
            self._chunk = Chunk(now_ns, now_ns, num_tokens, step, self.has_first_token)
            self._phase.chunks.append(self._chunk)
        elif self._phase.chunks:
            self._chunk = self._phase.chunks[-1]
            self._chunk.num_tokens += num_tokens
            self._chunk.num_steps += 1

    def end_chunk(self, now_ns: int) -> None:
        """Note that the step is over."""
        if self._chunk is not None:
            self._chunk.end_ns = max(now_ns, self._chunk.begin_ns)
            self._chunk = None

    def happen(self, happening: Happening) -> None:
        """Note a happening."""
        self.num_happenings += 1
        if len(self.happenings) < MAX_HAPPENINGS:
            self.happenings.append(happening)

    def note_gap(self, gap_ns: int) -> None:
        """Note a time between two tokens."""
        self.last_gap_ns = gap_ns
        self.max_gap_ns = max(self.max_gap_ns, gap_ns)
