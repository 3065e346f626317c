"""One plot as an SVG file of its own: lines over named places on the x axis. No library, readable on light and dark."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 34, 48
COLOURS = ("#3b6fb6", "#c8553d", "#4d9078", "#8d6cab", "#b08a2e", "#5b6770")
NUM_TICKS = 5


def write_plot(
    path: Path, title: str, axes: tuple[str, str], places: Sequence[str], lines: Mapping[str, Sequence[float | None]]
) -> None:
    """Write a plot.

    Args:
        path: the file.
        title: what it shows.
        axes: names of the x and of the y axis.
        places: names along the x axis, at equal distances.
        lines: name of each line -> its value at each place; none where there is none.
    """
    highest = max(value for line in lines.values() for value in line if value is not None) or 1.0
    step = _round_up(highest / NUM_TICKS)
    top = step * -(-highest // step)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 18, title, weight="bold"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, axes[0], anchor="middle"),
        f'<g transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">'
        + _text(14, (TOP + HEIGHT - BOTTOM) / 2, axes[1], anchor="middle")
        + "</g>",
    ]
    tick = 0.0
    while tick <= top * 1.0001:
        y = _y(tick, top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#d8dde2"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
        tick = round(tick + step, 12)
    for index, place in enumerate(places):
        parts.append(_text(_x(index, len(places)), HEIGHT - BOTTOM + 18, place, anchor="middle"))
    for number, (name, line) in enumerate(lines.items()):
        parts += _line(name, line, len(places), top, number)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _line(name: str, line: Sequence[float | None], num_places: int, top: float, number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    points = [(_x(index, num_places), _y(value, top)) for index, value in enumerate(line) if value is not None]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    y = TOP + 10 + 18 * number
    parts.append(f'<path d="M{WIDTH - RIGHT + 10} {y}h16" stroke="{colour}" stroke-width="2"/>')
    parts.append(_text(WIDTH - RIGHT + 31, y + 4, name))
    return parts


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="#26303a">'
        f"{escape(words)}</text>"
    )


def _x(index: int, num_places: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / num_places


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _round_up(step: float) -> float:
    """Return the next number of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** len(str(int(step))) / 10 if step >= 1 else 1.0
    while power > step:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.9999)
