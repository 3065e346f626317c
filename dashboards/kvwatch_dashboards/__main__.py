"""`python -m kvwatch_dashboards [--check]`: write dashboards/generated, or say what is out of date there."""

import argparse
import sys

from kvwatch_dashboards.generated import FOLDER, differences, write


def main(argv: list[str] | None = None) -> int:
    """Write, or check; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvwatch_dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of date")
    if not parser.parse_args(argv).check:
        write()
        return 0
    found = differences()
    for each in found:
        sys.stderr.write(f"{FOLDER.name}/{each}; run `make derive`\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
