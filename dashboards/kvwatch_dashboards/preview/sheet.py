"""A dashboard as one picture: rows of panels on Grafana's grid of 24 columns. Reads, lays out, writes a PNG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from kvwatch_dashboards.annotations import ANNOTATIONS
from kvwatch_dashboards.panel import WIDTH, Board, Text
from kvwatch_dashboards.preview.drawing import FAINT, INK, draw, draw_words
from kvwatch_dashboards.preview.reading import Reading, Span, read_panel
from kvwatch_dashboards.prometheus_api import PrometheusApi

_INCHES, _DPI = 13.0, 84
_HEAD, _ROW_TITLE, _PANEL = 0.62, 0.34, 2.25
_LEFT, _RIGHT, _BETWEEN = 0.6, 0.15, 0.6
_PLOT_TOP, _PLOT_BOTTOM = 0.28, 0.66
_COLOURS = 128


@dataclass(frozen=True, slots=True)
class Sheet:
    """A dashboard's picture and what was read for it."""

    board: Board
    picture: Path
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """Panels beside each other, or a heading."""

    heading: str = ""
    parts: tuple[Reading | Text, ...] = ()

    @property
    def inches(self) -> float:
        return _ROW_TITLE if self.heading else _PANEL


def write_sheet(board: Board, api: PrometheusApi, span: Span, folder: Path) -> Sheet:
    """Read every panel of a dashboard and write `UID.png`.

    Raises:
        PrometheusError: a query is refused.
    """
    lines = list(_lines(board, api, span))
    marks = list(_marks(api, span))
    figure = Figure(figsize=(_INCHES, _HEAD + sum(line.inches for line in lines)), facecolor="white")
    height = figure.get_figheight()
    figure.text(_LEFT / _INCHES, 1 - 0.24 / height, board.title, fontsize=13, color=INK, fontweight="bold", va="center")
    figure.text(_LEFT / _INCHES, 1 - 0.47 / height, board.about, fontsize=8, color=FAINT, va="center")
    top = _HEAD
    for line in lines:
        _put(figure, line, top, span, marks)
        top += line.inches
    picture = folder / f"{board.uid}.png"
    _save(figure, picture)
    readings = tuple(part for line in lines for part in line.parts if isinstance(part, Reading))
    return Sheet(board, picture, readings)


def _lines(board: Board, api: PrometheusApi, span: Span) -> Iterator[_Line]:
    for row in board.rows:
        yield _Line(heading=row.title)
        if row.title in board.words:
            yield _Line(parts=(board.words[row.title],))
        parts: list[Reading | Text] = []
        used = 0
        for panel in row.panels:
            if used + panel.span > WIDTH:
                yield _Line(parts=tuple(parts))
                parts, used = [], 0
            parts.append(read_panel(panel, api, span))
            used += panel.span
        yield _Line(parts=tuple(parts))


def _put(figure: Figure, line: _Line, top: float, span: Span, marks: Sequence[tuple[float, str]]) -> None:
    """Put a line at so many inches from the top."""
    height = figure.get_figheight()
    if line.heading:
        at = 1 - (top + 0.2) / height
        figure.text(_LEFT / _INCHES, at, f"▾ {line.heading}", fontsize=9.5, color=INK, va="center")
        return
    column = (_INCHES - _LEFT - _RIGHT + _BETWEEN) / WIDTH
    left = _LEFT
    for part in line.parts:
        width = (part.panel.span if isinstance(part, Reading) else part.span) * column
        box = (
            left / _INCHES,
            1 - (top + line.inches - _PLOT_BOTTOM) / height,
            (width - _BETWEEN) / _INCHES,
            (line.inches - _PLOT_TOP - _PLOT_BOTTOM) / height,
        )
        axes = figure.add_axes(box)
        if isinstance(part, Reading):
            draw(axes, part, span, marks)
        else:
            draw_words(axes, part.title, part.markdown)
        left += width


def _marks(api: PrometheusApi, span: Span) -> Iterator[tuple[float, str]]:
    """Yield where annotations begin: a moment counts once, though its window is longer."""
    for each in ANNOTATIONS:
        for series in api.range(span.asked(each.expr), span.start, span.end, span.step_seconds):
            before = 0.0
            for at, _ in series.points:
                if at - before > 2 * span.step_seconds:
                    yield at, each.colour
                before = at


def _save(figure: Figure, path: Path) -> None:
    """Write a PNG with few colours: a picture of lines needs no more, and repositories keep it for ever."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )
