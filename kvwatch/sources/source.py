"""The seam between a sidecar and what it reads.

    engine ──bytes──► Source ──events──► EventLog of one rank ──► ledger, exporters, recorder, stream ...

A source reads one engine, given as NAME=URL, which may have several data-parallel ranks. For each rank it fills an
event log of its own, exactly as an engine in this process would, and answers for it as its `EngineControl`. Everything
behind the log is the observatory's and knows nothing of sources.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvwatch.control import EngineControl
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Metric
from kvwatch.wire.control import CallReply, CallRequest

FOREIGN_FEEDS: frozenset[Metric] = frozenset({m.KV_BLOCK_STORES, m.KV_BLOCK_EVICTIONS, m.KV_BLOCK_LIFETIME})
"""What the events of a vLLM or an SGLang can feed."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One data-parallel rank of a source: where its events go, and who answers for its state."""

    dp_rank: int
    log: EventLog
    control: EngineControl
    """Its snapshots continue the log. It answers at once and on any thread: nothing goes out to the engine."""
    samples: Callable[[], Iterable[Sample | HistogramSample]]
    """The rank's metrics that no event feeds: health of the source, what its `/metrics` says. Any thread."""
    is_up: Callable[[], bool]
    """Whether the rank is reached now; while it is not, gauges of its state are absent. Any thread."""
    feeds: frozenset[Metric] | None = None
    """Metrics that its events can feed, the others are absent; none for all, as of an engine of ours."""
    forward: Callable[[CallRequest], CallReply] | None = None
    """Has the engine's own admin API answer; raises `ControlError`. None if it has none, or may not be asked. Any
    thread."""
    why_not: str = "it tells its KV events and nothing else; kvwatch's own engine can"
    """Why it may not be asked, if it may not."""
    block_size: Callable[[], int] = lambda: 0
    """Tokens of a block of a foreign engine, as it last said; 0 while it said nothing. Any thread."""


class Source(Protocol):
    """One engine that is watched from outside.

    Lives on the observatory's event loop: nothing in it may block, nothing that it reads may make it raise.
    """

    @property
    def name(self) -> str:
        """Stable name of the engine, the label `engine`."""
        ...

    @property
    def model_name(self) -> str:
        """Name of the model, the label `model_name`; empty while it is not known."""
        ...

    @property
    def is_up(self) -> bool:
        """Whether the engine is reached now."""
        ...

    async def run(self, stop: asyncio.Event, on_rank: Callable[[Rank], None]) -> None:
        """Read until `stop` is set, through restarts of the engine, and tell each rank once when it is first known."""
        ...
