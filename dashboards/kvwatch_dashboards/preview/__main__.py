"""`python -m kvwatch_dashboards.preview`: draw all dashboards, list panels without data; exit 1 if there are any."""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvwatch.errors import KVWatchError
from kvwatch_dashboards.boards import BOARDS
from kvwatch_dashboards.preview.missing import silent
from kvwatch_dashboards.preview.page import write_page
from kvwatch_dashboards.preview.reading import Span
from kvwatch_dashboards.preview.sheet import write_sheet
from kvwatch_dashboards.prometheus_api import PrometheusApi


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, list; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvwatch_dashboards.preview", description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--out", type=Path, default=Path("pictures"), metavar="DIR", help="folder of the pictures")
    parser.add_argument("--minutes", type=float, default=30.0, help="how much of the past is shown (default: 30)")
    parser.add_argument("--scrape-seconds", type=float, default=5.0, help="interval between scrapes (default: 5)")
    options = parser.parse_args(argv)
    now = time.time()
    span = Span(now - 60 * options.minutes, now, options.scrape_seconds)
    try:
        with contextlib.closing(PrometheusApi(options.prometheus)) as api:
            empty = draw(api, span, options.out, f"Drawn from the Prometheus at {options.prometheus}.")
    except KVWatchError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for name in empty:
        sys.stderr.write(f"without data: {name}\n")
    return 1 if empty else 0


def draw(api: PrometheusApi, span: Span, folder: Path, about: str) -> list[str]:
    """Write all pictures and `index.html`; return what is without data, as `dashboard: panel: query`.

    Raises:
        PrometheusError: Prometheus is not there, or refuses a query.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sheets = [write_sheet(board, api, span, folder) for board in BOARDS]
    write_page(folder / "index.html", sheets, about)
    return [f"{sheet.board.title}: {name}" for sheet in sheets for name in silent(sheet.readings)]


if __name__ == "__main__":
    sys.exit(main())
