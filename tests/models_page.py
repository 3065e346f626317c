"""Tries every family of `model_families.py`, and writes what came out to docs/models.md, between its marks.

python tests/models_page.py             tries and writes
python tests/models_page.py --check     tries, and fails if the page says something else
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from model_families import FAMILIES, Family
from model_trial import Trial, try_family
from transformers.utils import logging

from kvwatch_engine.contracts.cache import KVGroup

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
_HEAD = (
    "family",
    "architecture",
    "layers computed by",
    "layers of each KV group",
    "heads (query / KV x size)",
    "bytes a token",
    "text",
)
_BLOCK = re.compile(r"<!-- models -->.*?<!-- end -->", re.DOTALL)


def table(trials: Sequence[tuple[Family, Trial]]) -> str:
    """Return the table of trials in Markdown."""
    lines = [_HEAD, ("---",) * len(_HEAD), *(_row(family, trial) for family, trial in trials)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(page: str, rows: str) -> str:
    """Return the page with its table replaced."""
    found, count = _BLOCK.subn(lambda _: f"<!-- models -->\n{rows}\n<!-- end -->", page)
    assert count == 1, f"{PAGE} has {count} places for the table"
    return found


def _row(family: Family, trial: Trial) -> tuple[str, ...]:
    info = trial.info
    near_ties = f", {trial.num_excused} near ties" if trial.num_excused else ""
    return (
        family.title,
        f"`{info.architecture}`",
        "lean decoder" if info.implementation == "lean" else "transformers",
        _groups(info.groups),
        f"{info.num_heads} / {info.num_kv_heads} x {info.head_dim}",
        f"{trial.bytes_per_token:,}",
        f"equal{near_ties}",
    )


def _groups(groups: Sequence[KVGroup]) -> str:
    return ", ".join(
        f"{len(group.layers)} {'full' if group.window is None else f'window {group.window}'}" for group in groups
    )


def main() -> int:
    """Try all families; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page differs")
    is_check = parser.parse_args().check
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    trials = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            trials.append((family, try_family(family, Path(folder))))
        print(f"{family.title}: equal", flush=True)
    before = PAGE.read_text()
    after = with_table(before, table(trials))
    if is_check and after != before:
        print(f"{PAGE.name} says something else; write it with `make models`", file=sys.stderr)
        return 1
    if not is_check:
        PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
