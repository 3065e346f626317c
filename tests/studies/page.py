"""Puts a study's tables into its page under docs/studies, between marks; the words around them are written by hand."""

import re
from collections.abc import Sequence
from pathlib import Path

from spread import Spread, shown

Cell = str | float | Spread
Row = Sequence[Cell]
"""Cells of one line of a table."""

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "studies"


def put_table(page: str, name: str, head: Sequence[str], rows: Sequence[Row], note: str = "") -> None:
    """Replace the table `name` of a page, and print it.

    Args:
        page: file under docs/studies without its ending.
        name: what its mark says.
        head: names of the columns.
        rows: the lines.
        note: under the table: how it was measured.

    Raises:
        ValueError: the page has no place for it.
    """
    lines = [head, ["---"] * len(head), *[[_shown(cell) for cell in row] for row in rows]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if note:
        table += f"\n\n{note}"
    print(f"{page}, {name}:\n{table}\n", flush=True)
    path = FOLDER / f"{page}.md"
    marked = f"<!-- {name} -->\n{table}\n<!-- end -->"
    text, count = re.subn(rf"<!-- {re.escape(name)} -->.*?<!-- end -->", lambda _: marked, path.read_text(), flags=re.S)
    if count != 1:
        raise ValueError(f"{path} has {count} places for the table {name!r}; it needs one")
    path.write_text(text)


def _shown(cell: Cell) -> str:
    return shown(cell) if isinstance(cell, float) else str(cell)
