"""Families as bytes, in the text format and in OpenMetrics.

A page is almost the same each time: names and labels stay, some numbers move. So everything of a line but its value is
made once and kept, as a template that takes the values of all its lines, and so are all lines of a family that is
given again. That makes a page several times cheaper than with the reference client, whose bytes these must equal; and
cheap it must be, since the interpreter that writes a page is the one that runs the engine's steps.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal

from prometheus_client.utils import floatToGoString

from kvwatch.exporters.exemplars import Exemplar
from kvwatch.exporters.prometheus.families import Family, HistogramSeries
from kvwatch.telemetry.schema import MetricKind

Format = Literal["text", "openmetrics"]

END = "# EOF\n"
"""Last line of an OpenMetrics page."""

MAX_KEPT = 20_000
"""Histograms whose lines are kept; beyond that all are made anew. Series are bounded, so this is never reached."""

MAX_PLAIN = 1_000_000
"""Least integer that is written with an exponent."""

LabelSets = tuple[tuple[str, ...], ...]
"""Label values of each series of a family."""


class PageWriter:
    """Writes pages of one collector. One thread at a time."""

    def __init__(self) -> None:
        self._scalars: dict[str, tuple[LabelSets, str]] = {}
        self._histograms: dict[tuple[str, tuple[str, ...], tuple[float, ...]], str] = {}
        self._texts: dict[tuple[str, Format], tuple[Family, str]] = {}

    def write(self, families: Iterable[Family], form: Format) -> bytes:
        """Return the page of these families."""
        if len(self._histograms) > MAX_KEPT:
            self._histograms.clear()
        parts = [self._text(family, form) for family in families]
        if form == "openmetrics":
            parts.append(END)
        return "".join(parts).encode()

    def _text(self, family: Family, form: Format) -> str:
        """Return a family's lines: those of the last time when it is the very same family."""
        kept = self._texts.get((family.name, form))
        if kept is not None and kept[0] is family:
            return kept[1]
        if family.kind is MetricKind.HISTOGRAM:
            lines = "".join(self._histogram_lines(family, form))
        else:
            lines = self._scalar_lines(family)
        text = _head(family, form) + lines
        self._texts[family.name, form] = (family, text)
        return text

    def _scalar_lines(self, family: Family) -> str:
        label_sets = tuple(labels for labels, _ in family.series)
        kept = self._scalars.get(family.name)
        if kept is None or kept[0] != label_sets:
            name = family.name + ("_total" if family.kind is MetricKind.COUNTER else "")
            begins = [_begin(name, dict(zip(family.labels, labels, strict=True))) for labels in label_sets]
            kept = self._scalars[family.name] = (label_sets, _template(begins))
        return kept[1] % tuple([_number(value) for _, value in family.series])

    def _histogram_lines(self, family: Family, form: Format) -> Iterator[str]:
        kept = self._histograms
        for labels, value in family.series:
            assert isinstance(value, HistogramSeries)
            key = (family.name, labels, value.bounds)
            template = kept.get(key)
            if template is None:
                template = kept[key] = _template(_histogram_begins(family, labels, value.bounds))
            numbers = [*map(_number, value.counts), _number(value.counts[-1]), _number(value.sum)]
            if form == "openmetrics":
                for bucket, exemplar in value.exemplars:
                    numbers[bucket] += _mark(exemplar)
            yield template % tuple(numbers)


def _head(family: Family, form: Format) -> str:
    is_text = form == "text"
    name = family.name + ("_total" if is_text and family.kind is MetricKind.COUNTER else "")
    brief = family.brief.replace("\\", r"\\").replace("\n", r"\n")
    if not is_text:
        brief = brief.replace('"', r"\"")
    return f"# HELP {name} {brief}\n# TYPE {name} {family.kind}\n"


def _histogram_begins(family: Family, labels: tuple[str, ...], bounds: tuple[float, ...]) -> list[str]:
    """Return the beginnings of the lines of one series: buckets, then count, then sum."""
    own = dict(zip(family.labels, labels, strict=True))
    texts = [*map(floatToGoString, bounds), "+Inf"]
    buckets = [_begin(f"{family.name}_bucket", own | {"le": text}) for text in texts]
    return [*buckets, _begin(f"{family.name}_count", own), _begin(f"{family.name}_sum", own)]


def _template(begins: Iterable[str]) -> str:
    """Return lines that begin so, with a place for the value at the end of each."""
    return "".join(f"{begin.replace('%', '%%')} %s\n" for begin in begins)


def _begin(name: str, labels: dict[str, str]) -> str:
    return name + _label_set(labels) if labels else name


def _label_set(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _mark(exemplar: Exemplar) -> str:
    labels = _label_set({"trace_id": exemplar.trace_id, "span_id": exemplar.span_id})
    return f" # {labels} {_number(exemplar.value)} {exemplar.unix_seconds}"


@lru_cache(maxsize=4096)
def _number(value: float) -> str:
    if type(value) is int and 0 <= value < MAX_PLAIN:
        return f"{value}.0"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
