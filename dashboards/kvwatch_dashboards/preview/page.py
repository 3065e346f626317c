"""All pictures on one HTML page, with what each panel says. Knows nothing of Prometheus."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from kvwatch_dashboards.preview.sheet import Sheet

_STYLE = (
    "body{font:15px/1.45 sans-serif;max-width:1120px;margin:2em auto;padding:0 1em;color:#24292e}"
    "img{width:100%;border:1px solid #e6e9ec}dt{font-weight:bold;margin-top:.6em}dd{margin:0;white-space:pre-line}"
    "nav a{margin-right:1em}summary{cursor:pointer}"
)


def write_page(path: Path, sheets: Sequence[Sheet], about: str) -> None:
    """Write the page beside the pictures.

    Args:
        path: The file.
        sheets: Dashboards.
        about: Where the data is from.
    """
    path.write_text("\n".join(_page(sheets, about)) + "\n", encoding="utf-8")


def _page(sheets: Sequence[Sheet], about: str) -> Iterator[str]:
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kvwatch dashboards</title><style>{_STYLE}</style>'
    yield f"<h1>kvwatch dashboards</h1><p>{escape(about)}</p>"
    yield "<nav>" + "".join(f'<a href="#{each.board.uid}">{escape(each.board.title)}</a>' for each in sheets) + "</nav>"
    for sheet in sheets:
        yield f'<h2 id="{sheet.board.uid}">{escape(sheet.board.title)}</h2><p>{escape(sheet.board.about)}</p>'
        yield f'<img src="{sheet.picture.name}" alt="{escape(sheet.board.title)}">'
        yield "<details><summary>What each panel says</summary><dl>"
        yield from _described(sheet)
        yield "</dl></details>"
    yield "</html>"


def _described(sheet: Sheet) -> Iterable[str]:
    for reading in sheet.readings:
        yield f"<dt>{escape(reading.panel.title)}</dt><dd>{escape(reading.panel.description)}</dd>"
