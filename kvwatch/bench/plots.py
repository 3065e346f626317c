"""Small plots as SVG text: lines and bars over two linear axes. Colours are the page's CSS classes c0, c1, ..."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

NUM_COLOURS = 12
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 40
_MAX_STEPS = 400
"""Steps of one distribution: more cannot be told apart, and would make the file large."""
_MAX_POINTS = 1000
"""Points of one line, likewise."""
_SMALLEST = 1e-9
"""An axis that would end below this ends at 1: everything on it is 0."""

Point = tuple[float, float]


class Line(NamedTuple):
    """One line of a plot."""

    name: str
    points: Sequence[Point]
    colour: int
    is_thick: bool = False


class Bar(NamedTuple):
    """One horizontal bar: pieces from left to right, each up to an x and in a colour's shade."""

    start: float
    pieces: Sequence[tuple[float, str]]
    """(end x, CSS class)."""
    title: str


class Axes:
    """Turns values into places, and draws the frame."""

    def __init__(self, x_max: float, y_max: float, x_label: str, y_label: str) -> None:
        self._x_max = x_max if x_max > _SMALLEST else 1.0
        self._y_max = y_max if y_max > _SMALLEST else 1.0
        self._labels = (x_label, y_label)

    def x(self, value: float) -> float:
        """Return a value's horizontal place."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, value / self._x_max))

    def y(self, value: float) -> float:
        """Return a value's vertical place."""
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(1.0, max(0.0, value / self._y_max))

    def frame(self, *, has_y_ticks: bool = True) -> str:
        """Return grid, ticks and labels."""
        parts: list[str] = []
        for tick in ticks(self._x_max):
            place = f"{self.x(tick):.1f}"
            parts.append(f'<line class="grid" x1="{place}" x2="{place}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
            parts.append(f'<text x="{place}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{tick:g}</text>')
        for tick in ticks(self._y_max) if has_y_ticks else ():
            place = f"{self.y(tick):.1f}"
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{place}" y2="{place}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{place}" dy="4" text-anchor="end">{tick:g}</text>')
        x_label, y_label = (escape(label) for label in self._labels)
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{x_label}</text>')
        parts.append(f'<text transform="translate(13 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y_label}</text>')
        return "".join(parts)


def ticks(most: float, wanted: int = 6) -> list[float]:
    """Return round values from 0 up to `most`, about as many as wanted."""
    raw = most / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [round(step * number, 12) for number in range(int(most / step * 1.0001) + 1)]


def line_plot(title: str, x_label: str, y_label: str, lines: Sequence[Line], x_most: float = math.inf) -> str:
    """Return a plot of lines with its legend, as far as `x_most`; nothing where no line has a point."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    x_max = min(x_most, max(x for line in drawn for x, _ in line.points))
    y_max = max(y for line in drawn for _, y in line.points)
    axes = Axes(x_max, y_max, x_label, y_label)
    paths = "".join(_path(line, axes) for line in drawn)
    legend = "".join(f'<li class="c{line.colour % NUM_COLOURS}">{escape(line.name)}</li>' for line in drawn)
    return _figure(title, axes.frame() + paths, legend)


def bar_plot(title: str, x_label: str, y_label: str, bars: Sequence[Bar], legend: Sequence[tuple[str, str]]) -> str:
    """Return bars below each other, the first on top; `legend` is (CSS class, words)."""
    if not bars:
        return ""
    axes = Axes(max(end for bar in bars for end, _ in bar.pieces), len(bars), x_label, y_label)
    height = max(0.6, (_HEIGHT - _TOP - _BOTTOM) / len(bars))
    drawn = "".join(_bar(bar, axes, axes.y(len(bars) - place), height) for place, bar in enumerate(bars))
    entries = "".join(f'<li class="{css}">{escape(words)}</li>' for css, words in legend)
    return _figure(title, axes.frame(has_y_ticks=False) + drawn, entries)


def cumulative(values: Sequence[float]) -> list[Point]:
    """Return a distribution as steps: (value, share of the values that are at most so large), thinned out."""
    found = sorted(values)
    count = len(found)
    points: list[Point] = []
    share = 0.0
    for place in sorted({round(step * (count - 1) / _MAX_STEPS) for step in range(_MAX_STEPS + 1)}) if found else ():
        points.append((found[place], share))
        share = (place + 1) / count
        points.append((found[place], share))
    return points


def _path(line: Line, axes: Axes) -> str:
    step = max(1, len(line.points) // _MAX_POINTS)
    shown = [*line.points[::step], line.points[-1]]
    places = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in shown)
    thick = " thick" if line.is_thick else ""
    css = f"line c{line.colour % NUM_COLOURS}{thick}"
    return f'<polyline class="{css}" points="{places}"><title>{escape(line.name)}</title></polyline>'


def _bar(bar: Bar, axes: Axes, top: float, height: float) -> str:
    parts: list[str] = []
    left = axes.x(bar.start)
    for end, css in bar.pieces:
        right = axes.x(end)
        size = f'x="{left:.1f}" y="{top:.1f}" width="{max(0.3, right - left):.1f}" height="{height:.2f}"'
        parts.append(f'<rect class="bar {css}" {size}/>')
        left = right
    return f"<g><title>{escape(bar.title)}</title>{''.join(parts)}</g>"


def _figure(title: str, drawing: str, legend: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{drawing}</svg><ul class="legend">{legend}</ul></figure>\n'
    )
