"""The text of a metrics page to samples in kvwatch's names, engine by engine. Pure.

A page of kvwatch may show many engines (a sidecar's) and metrics that this version does not know, which are left out.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from kvwatch.derive.metrics import PREFIX, full_name
from kvwatch.errors import KVWatchError
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.scrape.page import PageError, read_page
from kvwatch.sources.scrape.rules import Dialect
from kvwatch.sources.scrape.sglang import SGLANG
from kvwatch.sources.scrape.vllm import VLLM
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric, MetricKind

MAX_LINES = 200_000
"""A page with more lines is refused."""

_OURS: Mapping[str, Metric] = {full_name(metric): metric for metric in CATALOGUE}
_FOREIGN: tuple[Dialect, ...] = (VLLM, SGLANG)
_BUCKET, _SUM = "_bucket", "_sum"


class UnreadablePageError(KVWatchError):
    """What came is no page of metrics, or one that says nothing of an engine that is known."""


class EngineKey(NamedTuple):
    """The common labels of one engine's series."""

    engine: str
    dp_rank: int
    model_name: str


Engines = dict[EngineKey, list[Sample | HistogramSample]]


def read_engines(text: str) -> Engines:
    """Return what a page says of each engine.

    Raises:
        UnreadablePageError: it says nothing of an engine of a known kind, or is too long.
    """
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise UnreadablePageError(f"the page has {len(lines)} lines; at most {MAX_LINES} are read")
    try:
        ours = [line for line in lines if line.startswith(PREFIX)]
        engines = _kvwatch(ours) if ours else _foreign(text)
    except (ValueError, KeyError, IndexError, PageError) as error:
        raise UnreadablePageError(f"the page is no Prometheus text format ({error})") from error
    if not engines:
        raise UnreadablePageError(
            "the page says nothing of an engine: its lines begin with none of kvwatch_, vllm:, sglang:"
        )
    return engines


def _foreign(text: str) -> Engines:
    for dialect in _FOREIGN:
        if any(line.startswith(dialect.prefix) for line in text.splitlines()):
            page, kind = read_page(text, dialect), dialect.prefix.rstrip(":")
            return {EngineKey(kind, rank, page.model_name): found for rank, found in page.ranks.items()}
    return {}


def _key_of(labels: Mapping[str, str]) -> EngineKey:
    """Return whose row it is; a row that names no rank is of the first one."""
    return EngineKey(labels.get("engine", ""), int(labels.get("dp_rank") or 0), labels.get("model_name", ""))


class _Buckets:
    """A histogram while its rows are read."""

    def __init__(self) -> None:
        self.heights: dict[float, float] = {}
        self.total = 0.0


def _kvwatch(lines: Iterable[str]) -> Engines:
    engines: Engines = defaultdict(list)
    histograms: dict[tuple[EngineKey, Metric, tuple[str, ...]], _Buckets] = defaultdict(_Buckets)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for row in family.samples:
            metric, part = _metric_of(row.name)
            if metric is None or not math.isfinite(row.value):
                continue
            key = _key_of(row.labels)
            labels = tuple(row.labels.get(name, "") for name in metric.labels)
            if metric.kind is not MetricKind.HISTOGRAM:
                engines[key].append(Sample(metric, labels, row.value))
            elif part == _BUCKET:
                histograms[key, metric, labels].heights[float(row.labels["le"])] = row.value
            elif part == _SUM:
                histograms[key, metric, labels].total = row.value
    for (key, metric, labels), buckets in histograms.items():
        engines[key].append(_histogram(metric, labels, buckets))
    # What concerns no engine, such as the process of a sidecar, has no labels.
    return {key: samples for key, samples in engines.items() if key.engine}


def _metric_of(name: str) -> tuple[Metric | None, str]:
    for part in (_BUCKET, _SUM):
        metric = _OURS.get(name.removesuffix(part)) if name.endswith(part) else None
        if metric is not None and metric.kind is MetricKind.HISTOGRAM:
            return metric, part
    return _OURS.get(name), ""


def _histogram(metric: Metric, labels: tuple[str, ...], buckets: _Buckets) -> HistogramSample:
    bounds = sorted(buckets.heights)
    heights = [buckets.heights[bound] for bound in bounds]
    counts = tuple(max(0, round(b - a)) for a, b in zip([0.0, *heights], heights, strict=False))
    return HistogramSample(metric, labels, counts, buckets.total, tuple(bounds[:-1]))
