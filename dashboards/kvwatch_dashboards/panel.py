"""What a panel, a row and a dashboard are, before Grafana's format: data, and the sentences that the registry gives.

A panel that shows single metrics need not explain them: its description is what their declarations say, and what to do.
Knows nothing of Grafana's JSON; see grafana.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvwatch.derive.metrics import full_name
from kvwatch.sources.knowledge import NOT_AVAILABLE, SOURCES, knowledge
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric

Kind = Literal["lines", "stack", "number", "table"]
Colour = Literal["green", "yellow", "red"]

ENGINE = "{{engine}}/{{dp_rank}}"
"""Legend of a series that is one engine's."""

WIDTH = 24
"""Columns of Grafana's grid."""

_SERIES = re.compile(r"\bkvwatch_\w+")
_BY_NAME: dict[str, Metric] = {
    full_name(metric) + part: metric for metric in CATALOGUE for part in ("", "_bucket", "_count", "_sum")
}
_UNTOLD: dict[Metric, tuple[str, ...]] = {
    each.metric: tuple(name for name, cell in zip(SOURCES, each.cells, strict=True) if cell.startswith(NOT_AVAILABLE))
    for each in knowledge()
}


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    expr: str
    legend: str = ENGINE
    column: str = ""
    """Of a table: the column's name."""
    unit: str = ""
    """Of a table: the column's unit, if it is not the panel's."""
    has_levels: bool = True
    """Of a table: whether the panel's levels colour the column."""


@dataclass(frozen=True, slots=True)
class Level:
    """From this value on the panel has this colour."""

    value: float
    colour: Colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel."""

    title: str
    unit: str
    """Grafana's id of the unit."""
    queries: tuple[Query, ...]
    about: str = ""
    """What it shows and what to do; what the registry says of its metrics if it is empty."""
    levels: tuple[Level, ...] = ()
    kind: Kind = "lines"
    span: int = 8
    has_exemplars: bool = False
    """Whether dots lead to traces."""

    @property
    def metrics(self) -> list[Metric]:
        """Metrics that its queries read, in their order."""
        names = [name for query in self.queries for name in _SERIES.findall(query.expr)]
        return list(dict.fromkeys(_BY_NAME[name] for name in names if name in _BY_NAME))

    @property
    def description(self) -> str:
        """What it shows, and what to do about it."""
        if self.about:
            return self.about
        return "\n\n".join(f"{metric.brief} {metric.action}" for metric in self.metrics)

    @property
    def when_empty(self) -> str:
        """What is shown instead of `No data`."""
        untold = [name for name in SOURCES if any(name in _UNTOLD[metric] for metric in self.metrics)]
        told = f"not told by {' or '.join(untold)}" if untold else "nothing of that yet"
        return f"{told}; is the selection above empty?"


@dataclass(frozen=True, slots=True)
class Row:
    """A heading, and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A panel of words."""

    title: str
    markdown: str
    span: int = WIDTH
    height: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    about: str
    rows: Sequence[Row] = ()
    words: dict[str, Text] = field(default_factory=dict)
    """Title of a row -> what is said at its beginning."""
    hours: int = 3
    """Time that is shown at first."""
