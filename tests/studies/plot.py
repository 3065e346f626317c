"""Plots side by side as one SVG file: lines over named places on the x axis. No library, readable on light and dark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from pathlib import Path

from spread import Spread

PANEL_WIDTH, HEIGHT = 330, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 34, 74
COLOURS = ("#3b6fb6", "#c8553d", "#4d9078", "#8d6cab", "#b08a2e", "#5b6770")
NUM_TICKS = 5


@dataclass(frozen=True)
class Panel:
    """One plot; a value that is a spread has a bar from its lowest to its highest."""

    title: str
    axes: tuple[str, str]
    """Names of the x and of the y axis."""
    places: Sequence[str]
    """Names along the x axis, at equal distances."""
    lines: Mapping[str, Sequence[Spread | None]]
    """Name of each line -> its value at each place; none where there is none."""
    is_log: bool = False
    """Whether the y axis is logarithmic, from a power of ten to another; else it begins at 0."""
    are_connected: bool = True
    """Whether places have an order, so that lines between them mean something."""


def write_plot(path: Path, panels: Sequence[Panel]) -> None:
    """Write panels side by side to a file."""
    width = PANEL_WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * PANEL_WIDTH} 0)">', *_panel(panel), "</g>"]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(panel: Panel) -> list[str]:
    scale = _Scale.of(panel)
    middle = (LEFT + PANEL_WIDTH - RIGHT) / 2
    parts = [
        _text(LEFT, 18, panel.title, weight="bold"),
        _text(middle, HEIGHT - BOTTOM + 34, panel.axes[0], anchor="middle"),
        f'<g transform="rotate(-90 12 {(TOP + HEIGHT - BOTTOM) / 2})">'
        + _text(12, (TOP + HEIGHT - BOTTOM) / 2, panel.axes[1], anchor="middle")
        + "</g>",
    ]
    for tick in scale.ticks:
        y = scale.y(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{PANEL_WIDTH - RIGHT}" stroke="#d8dde2"/>')
        parts.append(_text(LEFT - 5, y + 4, f"{tick:,.10g}", anchor="end"))
    for index, place in enumerate(panel.places):
        parts.append(_text(_x(index, len(panel.places)), HEIGHT - BOTTOM + 16, place, anchor="middle"))
    x_name, y_name = float(LEFT), HEIGHT - 24
    for number, (name, line) in enumerate(panel.lines.items()):
        shift = (number - (len(panel.lines) - 1) / 2) * (3 if panel.are_connected else 14)
        parts += _line(line, scale, shift, COLOURS[number % len(COLOURS)], panel)
        if len(panel.lines) > 1:
            width = 34 + 6.4 * len(name)
            if x_name + width > PANEL_WIDTH:
                x_name, y_name = float(LEFT), y_name + 16
            parts += _legend(name, (x_name, y_name), COLOURS[number % len(COLOURS)])
            x_name += width
    return parts


def _line(line: Sequence[Spread | None], scale: "_Scale", shift: float, colour: str, panel: Panel) -> list[str]:
    places = [(_x(index, len(line)) + shift, value) for index, value in enumerate(line) if value is not None]
    parts = []
    if panel.are_connected:
        path = "L".join(f"{x:.1f} {scale.y(value.median):.1f}" for x, value in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for x, value in places:
        low, high = scale.y(value.low), scale.y(value.high)
        if low - high > 1:
            parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6" '
                         f'stroke="{colour}"/>')  # fmt: skip
        parts.append(f'<circle cx="{x:.1f}" cy="{scale.y(value.median):.1f}" r="3" fill="{colour}"/>')
    return parts


def _legend(name: str, place: tuple[float, float], colour: str) -> list[str]:
    x, y = place
    return [
        f'<path d="M{x:.1f} {y - 4}h14" stroke="{colour}" stroke-width="3"/>',
        _text(x + 18, y, name),
    ]


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="#26303a">'
        f"{escape(words)}</text>"
    )


def _x(index: int, num_places: int) -> float:
    return LEFT + (PANEL_WIDTH - LEFT - RIGHT) * (index + 0.5) / num_places


@dataclass(frozen=True)
class _Scale:
    ticks: tuple[float, ...]
    is_log: bool

    @classmethod
    def of(cls, panel: Panel) -> "_Scale":
        values = [value for line in panel.lines.values() for value in line if value is not None]
        highest = max(value.high for value in values) or 1.0
        if panel.is_log:
            first, last = floor(log10(min(value.low for value in values))), -floor(-log10(highest))
            return cls(tuple(10.0**power for power in range(first, max(last, first + 1) + 1)), is_log=True)
        step = _round_up(highest / NUM_TICKS)
        return cls(tuple(round(step * tick, 12) for tick in range(int(-(-highest // step)) + 1)), is_log=False)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        share = log10(value / low) / log10(high / low) if self.is_log else value / high
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def _round_up(step: float) -> float:
    """Return the next number of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.9999)
