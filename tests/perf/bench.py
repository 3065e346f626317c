"""Runs all benchmarks, one process after the other, and prints one JSON document; exits 1 when a budget is missed.

    make bench                      all of them
    make bench ARGS="emit ledger"   some of them

First it looks whether the machine is busy: figures taken beside other work are marked so.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

FOLDER = Path(__file__).parent
BUSY_PERCENT = 15.0


def benchmarks() -> dict[str, Path]:
    """Return the scripts by name."""
    return {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}


def run_one(path: Path) -> tuple[object, int]:
    """Run one script; return what it printed and its exit status."""
    done = subprocess.run([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1]), done.returncode
    except (IndexError, json.JSONDecodeError):
        return {"error": "printed no JSON"}, done.returncode or 1


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(benchmarks())}")
    names = parser.parse_args().names or list(benchmarks())
    unknown = set(names) - set(benchmarks())
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(benchmarks())}")
    busy = psutil.cpu_percent(interval=2.0)
    document: dict[str, object] = {
        "machine": {"cpus": os.cpu_count(), "busy_percent": busy, "is_quiet": busy < BUSY_PERCENT}
    }
    missed = []
    for name in names:
        document[name], status = run_one(benchmarks()[name])
        if status:
            missed.append(name)
    document["missed_budgets"] = missed
    print(json.dumps(document, indent=2))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
