"""What panels show, read from a running Prometheus as Grafana reads it. Knows nothing of pictures.

Variables stand at `All`. A picture's step follows from its width and the interval between scrapes, and
`$__rate_interval` from both, as Grafana computes it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvwatch_dashboards.panel import Board, Panel, Query
from kvwatch_dashboards.prometheus_api import Labels, PrometheusApi, Series

_VARIABLE = re.compile(r"\$(job|model|engine|dp_rank|tier|group)\b")
_PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_MAX_POINTS = 240
_SCRAPES_OF_A_RATE = 4
_HIDDEN = {"__name__"}


@dataclass(frozen=True, slots=True)
class Span:
    """The time that a picture shows."""

    start: float
    """Unix seconds."""
    end: float
    scrape_seconds: float
    """Between two scrapes."""

    @property
    def step_seconds(self) -> float:
        """Between two points: no closer than scrapes, and no more points than a picture has columns."""
        return max(self.scrape_seconds, (self.end - self.start) / _MAX_POINTS)

    @property
    def rate_interval(self) -> str:
        """What stands for `$__rate_interval`: at least four scrapes, so that a rate never falls between them."""
        seconds = max(self.step_seconds + self.scrape_seconds, _SCRAPES_OF_A_RATE * self.scrape_seconds)
        return f"{round(1000 * seconds)}ms"

    @property
    def whole(self) -> str:
        """What stands for `$__range`."""
        return f"{round(1000 * (self.end - self.start))}ms"

    def asked(self, expr: str) -> str:
        """Return a query as it is asked for this time."""
        return asked(expr, self.rate_interval, self.whole)


@dataclass(frozen=True, slots=True)
class Shown:
    """A line, or a cell of a table."""

    name: str
    """Its legend."""
    labels: Labels
    points: tuple[tuple[float, float], ...]
    """(Unix seconds, value)."""
    query: Query


@dataclass(frozen=True, slots=True)
class Reading:
    """A panel and what it shows."""

    panel: Panel
    shown: tuple[Shown, ...]

    @property
    def silent(self) -> tuple[Query, ...]:
        """Queries that brought nothing."""
        spoke = {each.query for each in self.shown}
        return tuple(query for query in self.panel.queries if query not in spoke)


def asked(expr: str, rate_interval: str, whole: str) -> str:
    """Return a query of a panel as Grafana sends it when every variable stands at `All`.

    Args:
        expr: The query.
        rate_interval: What stands for `$__rate_interval`.
        whole: What stands for `$__range`, the time that the picture shows.
    """
    return _VARIABLE.sub(".*", expr.replace("$__rate_interval", rate_interval).replace("$__range", whole))


def legend(text: str, labels: Labels) -> str:
    """Return a line's name: the legend with labels put in."""
    return _PLACE.sub(lambda place: labels.get(place.group(1), ""), text).strip()


def legend_labels(query: Query) -> list[str]:
    """Return the labels that a query's legend needs."""
    return _PLACE.findall(query.legend)


def read_panel(panel: Panel, api: PrometheusApi, span: Span) -> Reading:
    """Return what a panel shows: lines over the span; of a table the values at its end.

    Raises:
        PrometheusError: a query is refused.
    """
    return Reading(panel, tuple(shown for query in panel.queries for shown in _read(query, panel, api, span)))


def read_board(board: Board, api: PrometheusApi, span: Span) -> Iterator[Reading]:
    """Yield what each panel of a dashboard shows, in their order."""
    for row in board.rows:
        for panel in row.panels:
            yield read_panel(panel, api, span)


def _read(query: Query, panel: Panel, api: PrometheusApi, span: Span) -> Iterator[Shown]:
    expr = span.asked(query.expr)
    for series in _series(panel, expr, api, span):
        points = tuple((at, value) for at, value in series.points if value == value)  # NaN: nothing was observed
        if points:
            labels = {name: value for name, value in series.labels.items() if name not in _HIDDEN}
            yield Shown(legend(query.legend, labels), labels, points, query)


def _series(panel: Panel, expr: str, api: PrometheusApi, span: Span) -> Iterable[Series]:
    if panel.kind == "table":
        return api.instant(expr, span.end)
    return api.range(expr, span.start, span.end, span.step_seconds)
