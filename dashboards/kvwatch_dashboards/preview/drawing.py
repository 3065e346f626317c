"""One panel on its axes: lines, stacks, numbers and tables, with unit, thresholds and legend as Grafana shows them.

Knows nothing of queries; gets what was read.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from matplotlib.transforms import Bbox

from kvwatch_dashboards.panel import Level, Panel
from kvwatch_dashboards.preview.reading import Reading, Shown, Span
from kvwatch_dashboards.preview.units import written

INK, FAINT, GRID = "#24292e", "#6a737d", "#e6e9ec"
LINES = ("#3274d9", "#e0752d", "#37872d", "#8f3bb8", "#c4162a", "#0f8b8d", "#b58900", "#7f5539", "#5b6770", "#e377c2")
LEVELS = {"green": "#37872d", "yellow": "#e0b400", "red": "#c4162a"}
LEGEND_ROWS = 3
_LEGEND_COLUMNS, _LEGEND_CHARACTERS = 4, 72
_SMALL, _TEXT = 6.5, 7.5
_MAX_ROWS = 9
_LABELS = ("engine", "dp_rank", "model_name", "job")
_TICKS = (5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
_MAX_TICKS = 6


def draw(axes: Axes, reading: Reading, span: Span, marks: Sequence[tuple[float, str]]) -> None:
    """Draw what a panel shows.

    Args:
        axes: Where.
        reading: The panel and its lines.
        span: The time axis.
        marks: (Unix seconds, colour) of vertical lines.
    """
    axes.set_title(reading.panel.title, loc="left", fontsize=8.5, color=INK, fontweight="bold", pad=5)
    if not reading.shown:
        _words(axes, reading.panel.when_empty)
    elif reading.panel.kind == "table":
        _table(axes, reading)
    elif reading.panel.kind == "number":
        _number(axes, reading, span)
    else:
        _graph(axes, reading, span, marks)


def _graph(axes: Axes, reading: Reading, span: Span, marks: Sequence[tuple[float, str]]) -> None:
    panel = reading.panel
    if panel.kind == "stack":
        _stack(axes, reading.shown)
    else:
        for number, shown in enumerate(reading.shown):
            colour = LINES[number % len(LINES)]
            times, values = _columns(_with_gaps(shown.points, span.step_seconds))
            axes.plot(times, values, color=colour, linewidth=1.1, label=shown.name or "(no label)")
    _scale(axes, panel)
    for level in panel.levels:
        axes.axhline(level.value, color=LEVELS[level.colour], linestyle=(0, (4, 3)), linewidth=0.9)
    for at, colour in marks:
        axes.axvline(at, color=colour, linewidth=0.8, alpha=0.55)
    _time_axis(axes, span)
    _legend(axes)


def _stack(axes: Axes, shown: Sequence[Shown]) -> None:
    """Draw one above the other; what has no value at a moment counts as nothing there."""
    times = sorted({at for each in shown for at, _ in each.points})
    below = [0.0] * len(times)
    for number, each in enumerate(shown):
        known = dict(each.points)
        above = [low + known.get(at, 0.0) for low, at in zip(below, times, strict=True)]
        colour = LINES[number % len(LINES)]
        axes.fill_between(times, below, above, color=colour, alpha=0.3, linewidth=0)
        axes.plot(times, above, color=colour, linewidth=0.9, label=each.name or "(no label)")
        below = above


def _scale(axes: Axes, panel: Panel) -> None:
    """Begin at 0 and, for ratios, reach 1, unless values lie beyond; thresholds do not move the scale."""
    low, high = axes.get_ylim()
    data_low, data_high = axes.dataLim.y0, axes.dataLim.y1
    if data_low >= 0:
        low = 0.0
    if panel.unit == "percentunit" and data_high <= 1:
        high = 1.03
    elif data_high <= 0:
        high = 1.0
    axes.set_ylim(low, high)
    axes.set_autoscale_on(False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=_is_integral(axes, panel)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, panel.unit)))


def _is_integral(axes: Axes, panel: Panel) -> bool:
    return panel.unit == "short" and axes.get_ylim()[1] >= 4


def _time_axis(axes: Axes, span: Span) -> None:
    axes.set_xlim(span.start, span.end)
    length = span.end - span.start
    between = next((each for each in _TICKS if length / each <= _MAX_TICKS), _TICKS[-1])
    written_as = "%H:%M:%S" if between < 60 else "%H:%M" if between < 86_400 else "%m-%d"
    axes.xaxis.set_major_locator(MultipleLocator(between))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: datetime.fromtimestamp(at, tz=UTC).strftime(written_as)))
    axes.tick_params(labelsize=_SMALL, length=0, colors=FAINT)
    axes.grid(visible=True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _legend(axes: Axes) -> None:
    lines, names = axes.get_legend_handles_labels()
    columns = _columns_of_legend(names)
    room = LEGEND_ROWS * columns
    if len(lines) > room:
        more = f"{names[room - 1]}, and {len(lines) - room} more"
        lines, names = lines[:room], [*names[: room - 1], more]
    axes.legend(
        lines, names, loc="upper left", bbox_to_anchor=(-0.02, -0.11), ncols=columns,
        fontsize=_SMALL, frameon=False, labelcolor=FAINT, handlelength=1.0, columnspacing=0.9, handletextpad=0.4,
        labelspacing=0.25,
    )  # fmt: skip


def _columns_of_legend(names: Sequence[str]) -> int:
    """Return as many columns as short names leave room for, and one or two for long ones."""
    widest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), _LEGEND_CHARACTERS // (widest + 4), _LEGEND_COLUMNS))


def _number(axes: Axes, reading: Reading, span: Span) -> None:
    shown = reading.shown[0]
    times, values = _columns(shown.points)
    axes.fill_between(times, values, color=LINES[0], alpha=0.15, linewidth=0)
    axes.set_xlim(span.start, span.end)
    axes.set_ylim(0, max(max(values) * 1.6, 1e-9))
    axes.set_axis_off()
    last = written(values[-1], reading.panel.unit)
    colour = _colour(values[-1], reading.panel.levels)
    axes.text(0.5, 0.5, last, transform=axes.transAxes, ha="center", va="center", fontsize=26, color=colour)


def _table(axes: Axes, reading: Reading) -> None:
    """Draw a row for each set of labels and a column for each query, sorted by the first query."""
    axes.set_axis_off()
    columns = [query.column for query in reading.panel.queries]
    rows: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for each in reading.shown:
        rows.setdefault(tuple(sorted(each.labels.items())), {})[each.query.column] = each.points[-1][1]
    ordered = sorted(rows.items(), key=lambda row: -row[1].get(columns[0], 0.0))
    jobs = {dict(labels).get("job") for labels in rows}
    hidden = {"instance"} | ({"job"} if len(jobs) == 1 else set())
    found = dict.fromkeys(name for labels in rows for name, _ in labels if name not in hidden)
    names = sorted(found, key=lambda name: _LABELS.index(name) if name in _LABELS else len(_LABELS))
    units = {query.column: query.unit or reading.panel.unit for query in reading.panel.queries}
    coloured = {query.column for query in reading.panel.queries if query.has_levels and reading.panel.levels}
    texts, colours = [], []
    for labels, values in ordered[:_MAX_ROWS]:
        known = dict(labels)
        texts.append([*(known.get(name, "") for name in names), *(_cell(values, column, units) for column in columns)])
        colours.append(
            ["white"] * len(names) + [_shade(values, each, coloured, reading.panel.levels) for each in columns]
        )
    _grid(axes, [*names, *columns], texts, colours)


def _cell(values: dict[str, float], column: str, units: dict[str, str]) -> str:
    return written(values[column], units[column]) if column in values else ""


def _shade(values: dict[str, float], column: str, coloured: set[str], levels: Sequence[Level]) -> str:
    if column not in values or column not in coloured:
        return "white"
    return _colour(values[column], levels) + "40"


def _grid(axes: Axes, head: Sequence[str], texts: list[list[str]], colours: list[list[str]]) -> None:
    height = min(0.16, 1.0 / (len(texts) + 1))
    made = axes.table(
        cellText=texts, cellColours=colours, colLabels=list(head), cellLoc="left", colLoc="left",
        bbox=Bbox.from_bounds(0.0, 1.0 - height * (len(texts) + 1), 1.0, height * (len(texts) + 1)),
    )  # fmt: skip
    made.auto_set_font_size(False)
    made.set_fontsize(_SMALL)
    made.auto_set_column_width(list(range(len(head))))
    for (row, _), cell in made.get_celld().items():
        cell.set_edgecolor(GRID)
        cell.get_text().set_color(FAINT if row == 0 else INK)


def draw_words(axes: Axes, title: str, markdown: str) -> None:
    """Draw a panel of words, which is a table in Markdown."""
    axes.set_title(title, loc="left", fontsize=8.5, color=INK, fontweight="bold", pad=5)
    axes.set_axis_off()
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in markdown.strip().splitlines()]
    head, rows = lines[0], lines[2:]
    _grid(axes, head, rows, [["white"] * len(head) for _ in rows])


def _words(axes: Axes, words: str) -> None:
    axes.set_axis_off()
    axes.text(
        0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", fontsize=_TEXT, color=FAINT, wrap=True
    )


def _colour(value: float, levels: Sequence[Level]) -> str:
    reached = [level.colour for level in levels if value >= level.value]
    return LEVELS[reached[-1] if reached else "green"]


def _with_gaps(points: Sequence[tuple[float, float]], step_seconds: float) -> list[tuple[float, float]]:
    """Return the points with a break wherever some are missing: no line is drawn over what nobody knows."""
    broken: list[tuple[float, float]] = []
    for at, value in points:
        if broken and at - broken[-1][0] > 1.5 * step_seconds:
            broken.append((at - step_seconds, math.nan))
        broken.append((at, value))
    return broken


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [at for at, _ in points], [value for _, value in points]
