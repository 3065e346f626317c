"""Runs tests in a copy of the tree, with and without a fault. The checkout itself is never touched."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mutate.fault import Fault

TRIAL_SECONDS = 600
PACKAGES = {
    "kvwatch": "",
    "kvwatch_engine": "engine",
    "kvwatch_kernels": "kernels",
    "kvwatch_dashboards": "dashboards",
}
"""Package -> the folder of the tree that holds it."""

_FAILED = re.compile(r"^(FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)


class Verdict(Enum):
    """What became of a fault."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"
    """The tests could not be run, which shows nothing: an import failed, a test does not exist, it took too long."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of some tests ended."""

    verdict: Verdict
    by: str
    """The test that failed, or what went wrong."""
    reason: str
    """What the test said."""
    seconds: float


def copy_tree(root: Path, target: Path) -> None:
    """Copy the tree without environments, version control, caches of tools, and links out of it."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if name.startswith(".") or (Path(folder) / name).is_symlink()}

    shutil.copytree(root, target, ignore=left_out)


def check_imports(root: Path) -> None:
    """Make sure that tests in a copy import the copy's packages, not the checkout's.

    Raises:
        RuntimeError: they do not.
    """
    code = (
        "import importlib.util as u; print(*(u.find_spec(n).origin for n in " + repr(tuple(PACKAGES)) + "), sep='\\n')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=_environment(root), capture_output=True, text=True, check=True
    ).stdout.split()
    for name, place in zip(PACKAGES, found, strict=True):
        if not Path(place).resolve().is_relative_to((root / PACKAGES[name] / name).resolve()):
            raise RuntimeError(f"{name} would be imported from {place}, not from the copy {root}")


def run_tests(root: Path, tests: Sequence[str], seconds: float = TRIAL_SECONDS) -> Outcome:
    """Run tests in a copy until the first one fails; the verdict is that on a fault which they were to notice."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=short", "--color=no"]
    command += ["-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=root,
        env=_environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # servers that a test starts end with it
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Outcome(Verdict.BROKEN, f"not done after {seconds:.0f} s", "", time.monotonic() - started)
    verdict, by, reason = _read(process.returncode, output)
    return Outcome(verdict, by, reason, time.monotonic() - started)


def try_fault(root: Path, fault: Fault) -> Outcome:
    """Put a fault into a copy, run its tests, and take it out again.

    Raises:
        PatchError: the patch does not fit.
    """
    path = root / fault.file
    before = path.read_text(encoding="utf-8")
    path.write_text(fault.patched(root), encoding="utf-8")
    try:
        return run_tests(root, fault.tests)
    finally:
        path.write_text(before, encoding="utf-8")


def _read(status: int, output: str) -> tuple[Verdict, str, str]:
    """Return the verdict on pytest's exit status and output, which test failed, and what it said."""
    tail = output.strip().splitlines()[-1] if output.strip() else "no output"
    found = _FAILED.findall(output)
    failures = [(test, reason) for kind, test, reason in found if kind == "FAILED"]
    if status == 0:
        return (Verdict.SURVIVED, "", "") if " passed" in tail else (Verdict.BROKEN, "no test ran", tail)
    if status < 0:
        return Verdict.KILLED, f"the process died of {signal.Signals(-status).name}", ""
    if status == 1 and failures:
        return Verdict.KILLED, *failures[0]
    errors = [line.removeprefix("E ").strip() for line in output.splitlines() if line.startswith("E ")]
    return Verdict.BROKEN, f"pytest ended with {status}", errors[-1] if errors else tail


def _environment(root: Path) -> dict[str, str]:
    folders = [root, *(root / folder for folder in PACKAGES.values() if folder)]
    # Before the folders of an editable install. Without bytecode files: a patch of the same length within the same
    # second would not be noticed by them.
    own = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | own | {"COLUMNS": "500"}  # pytest cuts what a test said to the terminal's width
