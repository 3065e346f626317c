"""The `gen_ai.server.*` histograms, with the conventions' names, attributes and buckets.

Counted from finished requests in whole ns, so that an observation on a bound falls into that bucket. Written by the
observatory's thread, read by any.
"""

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint, Metric
from opentelemetry.util.types import AttributeValue

from kvwatch.exporters.otel.request_trace import RequestTrace
from kvwatch.exporters.otel.spans import PROVIDER, error_type_of, operation_of
from kvwatch.exporters.otel.text import clean

REQUEST_DURATION_SECONDS = tuple(0.01 * 2**i for i in range(14))
TIME_TO_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

Labels = tuple[tuple[str, AttributeValue], ...]


@dataclass(slots=True)
class _Cell:
    counts: list[int]
    total_ns: int = 0
    min_ns: int | None = None
    max_ns: int = 0

    def observe(self, bounds_ns: list[int], value_ns: int) -> None:
        self.counts[bisect_left(bounds_ns, value_ns)] += 1
        self.total_ns += value_ns
        self.min_ns = value_ns if self.min_ns is None else min(self.min_ns, value_ns)
        self.max_ns = max(self.max_ns, value_ns)


@dataclass(slots=True)
class _Family:
    name: str
    brief: str
    bounds: tuple[float, ...]
    cells: dict[Labels, _Cell] = field(default_factory=dict)

    def observe(self, labels: Labels, value_ns: int) -> None:
        bounds_ns = [round(bound * 1e9) for bound in self.bounds]
        cell = self.cells.setdefault(labels, _Cell([0] * (len(self.bounds) + 1)))
        cell.observe(bounds_ns, value_ns)

    def to_metric(self, begin_unix_ns: int, now_unix_ns: int) -> Metric:
        points = [
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=begin_unix_ns,
                time_unix_nano=now_unix_ns,
                count=sum(cell.counts),
                sum=cell.total_ns / 1e9,
                bucket_counts=list(cell.counts),
                explicit_bounds=self.bounds,
                min=(cell.min_ns or 0) / 1e9,
                max=cell.max_ns / 1e9,
            )
            for labels, cell in self.cells.items()
        ]
        return Metric(self.name, self.brief, "s", Histogram(points, AggregationTemporality.CUMULATIVE))


class GenAiHistograms:
    """Counts finished requests.

    Args:
        model_name: Model that is served.
        server: `server.address` and `server.port`, as far as they are known.
    """

    def __init__(self, model_name: str, server: Mapping[str, AttributeValue]) -> None:
        self._fixed: Labels = (
            ("gen_ai.provider.name", PROVIDER),
            ("gen_ai.request.model", clean(model_name)),
            ("gen_ai.response.model", clean(model_name)),
            *server.items(),
        )
        self._lock = threading.Lock()
        self._duration = _Family(
            "gen_ai.server.request.duration", "Time from a request's arrival to its end.", REQUEST_DURATION_SECONDS
        )
        self._first_token = _Family(
            "gen_ai.server.time_to_first_token",
            "Time from a request's arrival to its first token; successful requests only.",
            TIME_TO_FIRST_TOKEN_SECONDS,
        )
        self._per_token = _Family(
            "gen_ai.server.time_per_output_token",
            "Time per token after the first one, of each of a request's sequences; successful requests only.",
            TIME_PER_OUTPUT_TOKEN_SECONDS,
        )

    def count(self, trace: RequestTrace) -> None:
        """Count a request that has ended."""
        finished = trace.finished
        assert finished is not None, "only what has ended is counted"
        labels: Labels = (("gen_ai.operation.name", operation_of(trace)), *self._fixed)
        error_type = error_type_of(finished)
        duration_ns = finished.time_ns - trace.queued_ns
        num_sequences = trace.queued.num_sequences if trace.queued is not None else 1
        num_later = finished.generated_tokens // num_sequences - 1
        with self._lock:
            if error_type is not None:
                self._duration.observe((*labels, ("error.type", error_type)), duration_ns)
                return
            self._duration.observe(labels, duration_ns)
            if trace.ttft_ns is None:
                return
            self._first_token.observe(labels, trace.ttft_ns)
            if num_later > 0:
                self._per_token.observe(labels, (duration_ns - trace.ttft_ns) // num_later)

    def to_metrics(self, begin_unix_ns: int, now_unix_ns: int) -> list[Metric]:
        """Return the histograms as they are now; those without an observation are left out."""
        with self._lock:
            families = (self._duration, self._first_token, self._per_token)
            return [family.to_metric(begin_unix_ns, now_unix_ns) for family in families if family.cells]
