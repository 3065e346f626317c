"""`make dashboards-preview`: let everything happen on real servers with the embedded model, and draw all dashboards.

Exit status 1 if a panel that could show something does not.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from observed_run import EMBEDDED, observed_run

from kvwatch_dashboards.preview.__main__ import draw
from kvwatch_dashboards.preview.missing import OCCASIONAL

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
ABOUT = (
    "Two engines of SmolLM2-135M-Instruct with small pools on a CPU and a sidecar, under kvwatch bench's mixed load."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="DIR")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvwatch-") as folder,
        observed_run(Path(folder), "embedded", EMBEDDED) as (api, span),
    ):
        empty = [name for name in draw(api, span, options.out, ABOUT) if name.split(": ")[1] not in OCCASIONAL]
    for name in empty:
        print(f"without data: {name}")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
