"""`make mutate`: do the tests notice deliberate faults?

Faults are put into a temporary copy of the tree one by one, and the tests that should notice are run there. Without any
fault these tests must pass. Prints which test noticed what; exits with 1 when a fault survives, when a trial shows
nothing, or when a patch does not fit the tree any more.
"""

import argparse
import os
import queue
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutate.fault import Fault, PatchError
from mutate.faults_admin import ADMIN
from mutate.faults_engine import ENGINE
from mutate.faults_exporters import EXPORTERS
from mutate.faults_groups import GROUPS
from mutate.faults_guidance import GUIDED
from mutate.faults_images import IMAGES
from mutate.faults_insight import INSIGHT
from mutate.faults_isolation import ISOLATION
from mutate.faults_kernels_cpu import KERNELS_CPU
from mutate.faults_kernels_triton import KERNELS_TRITON
from mutate.faults_live import LIVE_CHANGES
from mutate.faults_lora import LORA
from mutate.faults_metrics import METRICS
from mutate.faults_models import MODELS
from mutate.faults_pace import PACE
from mutate.faults_sources import SOURCES
from mutate.faults_speculation import SPECULATION
from mutate.faults_telemetry import TELEMETRY
from mutate.trial import Outcome, Verdict, check_imports, copy_tree, run_tests, try_fault

ROOT = Path(__file__).parents[2]
AREAS: dict[str, tuple[Fault, ...]] = {
    "admin": ADMIN,
    "engine": ENGINE,
    "exporters": EXPORTERS,
    "groups": GROUPS,
    "guidance": GUIDED,
    "images": IMAGES,
    "insight": INSIGHT,
    "isolation": ISOLATION,
    "kernels-cpu": KERNELS_CPU,
    "kernels-triton": KERNELS_TRITON,
    "live": LIVE_CHANGES,
    "lora": LORA,
    "metrics": METRICS,
    "models": MODELS,
    "pace": PACE,
    "sources": SOURCES,
    "speculation": SPECULATION,
    "telemetry": TELEMETRY,
}


def run_all(root: Path, faults: Sequence[Fault], jobs: int) -> list[Outcome]:
    """Try every fault in copies of the tree.

    Args:
        root: the tree; only read.
        faults: at least one.
        jobs: trials at a time, each in a copy of its own.

    Returns:
        One outcome for each fault.

    Raises:
        PatchError: a patch does not fit.
        RuntimeError: the tests fail without any fault.
    """
    for fault in faults:
        fault.patched(root)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        first = Path(folder) / "0"
        copy_tree(root, first)
        check_imports(first)
        tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
        sane = run_tests(first, tests, seconds=1800)
        if sane.verdict is not Verdict.SURVIVED:
            raise RuntimeError(f"without any fault the tests do not pass: {sane.by}: {sane.reason}")
        print(f"without any fault: {len(tests)} selected tests pass ({sane.seconds:.0f} s)", flush=True)
        copies: queue.Queue[Path] = queue.Queue()
        copies.put(first)
        for index in range(1, min(jobs, len(faults))):
            # With what the run above has compiled: file times are kept, so Numba takes it for its own.
            copies.put(Path(shutil.copytree(first, Path(folder) / str(index))))

        def run_one(fault: Fault) -> Outcome:
            copy = copies.get()
            try:
                outcome = try_fault(copy, fault)
            finally:
                copies.put(copy)
            print(_line(fault, outcome), flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as executor:
            return list(executor.map(run_one, faults))


def _line(fault: Fault, outcome: Outcome) -> str:
    file, colons, name = outcome.by.partition("::")
    by = file.rpartition("/")[2] + colons + name
    return f"{outcome.verdict.value:9} {outcome.seconds:5.0f} s  {fault.name:40} {by}  {outcome.reason[:100]}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `make mutate`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make mutate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--area", choices=sorted(AREAS), action="append", help="only this one; may be repeated")
    parser.add_argument("--match", default="", metavar="TEXT", help="only faults whose name contains TEXT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="trials at a time")
    parser.add_argument("--list", action="store_true", help="only say what the faults are")
    options = parser.parse_args(arguments)
    faults = [fault for area in options.area or AREAS for fault in AREAS[area] if options.match in fault.name]
    if not faults:
        parser.error(f"no fault's name contains {options.match!r}")
    if options.list:
        for fault in faults:
            print(f"{fault.name:40} {fault.file}\n    {fault.stands_for}")
        return 0
    try:
        outcomes = run_all(ROOT, faults, max(options.jobs, 1))
    except (PatchError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    bad = [(f, o) for f, o in zip(faults, outcomes, strict=True) if o.verdict is not Verdict.KILLED]
    print(f"{len(faults) - len(bad)} of {len(faults)} faults were noticed")
    for fault, outcome in bad:
        print(f"{outcome.verdict.value}: {fault.name} ({fault.file}) {outcome.by} {outcome.reason}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
