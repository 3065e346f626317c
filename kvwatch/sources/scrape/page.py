"""The text of a page to our samples, rank by rank. Pure; milliseconds for a large page: not on an event loop."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from kvwatch.errors import KVWatchError
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.scrape.rules import Dialect, Row, Rule
from kvwatch.telemetry.schema import MetricKind

MAX_ROWS = 100_000
"""A page with more lines is refused: the largest engines have some thousand."""

MAX_RANKS = 1_024
"""Data-parallel ranks of one engine."""

MAX_BUCKETS = 256
"""Of one histogram; engines have some twenty."""

BUCKET, SUM = "_bucket", "_sum"
Rows = Mapping[str, Sequence[Row]]


class PageError(KVWatchError):
    """What came is no page of metrics."""


@dataclass(slots=True)
class Page:
    """What an engine's page says."""

    model_name: str = ""
    ranks: dict[int, list[Sample | HistogramSample]] = field(default_factory=dict)


def read_page(text: str, dialect: Dialect) -> Page:
    """Read a page in the Prometheus text format.

    Raises:
        PageError: it is something else, or has nothing of this make of engine.
    """
    ranks: dict[int, dict[str, list[Row]]] = {}
    page = Page()
    for row in _rows(text, dialect):
        rank = _rank(row, dialect)
        if rank is None:
            continue
        page.model_name = page.model_name or row.labels.get("model_name", "")
        ranks.setdefault(rank, defaultdict(list))[row.name].append(row)
    if not ranks:
        raise PageError(f"no line begins with {dialect.prefix!r}: is the address that of such an engine's metrics?")
    shared = ranks.get(0, {})
    for rank, rows in ranks.items():
        # A rank that has nothing but what the whole engine shares is none.
        page.ranks[rank] = [sample for rule in dialect.rules for sample in _apply(rule, rows, shared)]
    return page


def _rows(text: str, dialect: Dialect) -> Iterable[Row]:
    lines = [line for line in text.splitlines() if line.startswith(dialect.prefix)]
    if len(lines) > MAX_ROWS:
        raise PageError(f"the page has {len(lines)} lines of {dialect.prefix!r}; at most {MAX_ROWS} are read")
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                yield Row(sample.name, sample.labels, float(sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise PageError(f"the page is no Prometheus text format ({error})") from error


def _rank(row: Row, dialect: Dialect) -> int | None:
    """Return the rank that a row belongs to; None for rows to leave out."""
    if any(row.labels.get(label, wanted) != wanted for label, wanted in dialect.only.items()):
        return None
    text = row.labels.get(dialect.rank_label, "0") or "0"
    is_number = text.isascii() and text.isdigit() and len(text) < 6
    return int(text) if is_number and int(text) < MAX_RANKS else None


def _apply(rule: Rule, rows: Rows, shared: Rows) -> Iterable[Sample | HistogramSample]:
    if rule.metric.kind is MetricKind.HISTOGRAM:
        return _histograms(rule, rows)
    return _values(rule, rows, shared)


def _values(rule: Rule, rows: Rows, shared: Rows) -> Iterable[Sample]:
    name = next((name for name in rule.names if rows.get(name)), None)
    if name is None:
        return
    divisor = 1.0
    if rule.per:
        found = rows.get(rule.per) or shared.get(rule.per)
        divisor = found[0].value if found else 0.0
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for each in (name, *rule.plus):
        for row in rows.get(each, ()):
            if rule.total_where_empty and row.labels.get(rule.total_where_empty):
                continue
            sums[rule.labels_of(row)] += _number(row, rule)
    for labels, total in sums.items():
        value = (total - rule.minus) / divisor if divisor > 0 else math.nan
        if math.isfinite(value) and value >= 0:
            yield Sample(rule.metric, labels, value)


def _number(row: Row, rule: Rule) -> float:
    if not rule.from_label:
        return row.value
    try:
        return float(row.labels.get(rule.from_label, "nan"))
    except ValueError:
        return math.nan


def _histograms(rule: Rule, rows: Rows) -> Iterable[HistogramSample]:
    name = next((name for name in rule.names if rows.get(name + BUCKET)), None)
    if name is None:
        return
    cumulative: dict[tuple[str, ...], dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows[name + BUCKET]:
        cumulative[rule.labels_of(row)][_bound(row)] += row.value
    sums = _summed(rows.get(name + SUM, ()), rule.labels_of)
    for labels, by_bound in cumulative.items():
        if len(by_bound) > MAX_BUCKETS or not _are_numbers(by_bound):
            continue
        ordered = sorted(by_bound)
        heights = [by_bound[bound] for bound in ordered]
        counts = [round(high - low) for low, high in zip([0.0, *heights], heights, strict=False)]
        if ordered[-1] == math.inf and min(counts) >= 0 and math.isfinite(sums[labels]):
            yield HistogramSample(rule.metric, labels, tuple(counts), sums[labels], tuple(ordered[:-1]))


def _are_numbers(by_bound: Mapping[float, float]) -> bool:
    return not any(math.isnan(bound) for bound in by_bound) and all(map(math.isfinite, by_bound.values()))


def _bound(row: Row) -> float:
    try:
        return float(row.labels.get("le", "nan"))
    except ValueError:
        return math.nan


def _summed(rows: Iterable[Row], labels_of: Callable[[Row], tuple[str, ...]]) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for row in rows:
        sums[labels_of(row)] += row.value
    return sums
