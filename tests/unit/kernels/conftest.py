"""Runs the modules test_kernels_triton_* in Triton's interpreter, which must be chosen before Triton is imported.

Their tests run in one process of their own (TRITON_INTERPRET=1), which starts when the first of them is due; here each
waits for its own outcome and reports it. With TRITON_INTERPRET=1 set from outside they run in this process, where a
debugger reaches them.

bfloat16 is silently wrong in the interpreter. So these tests are in float32 and float16; bfloat16 is tested on the CPU
path, compiled ahead of time by the gate, and computed by tests/gpu on a device.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

PREFIX = "test_kernels_triton_"
REPORT_VARIABLE = "INTERPRETED_TESTS_REPORT"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class InterpretedRun:
    """The process that runs the tests, and what it has reported so far."""

    def __init__(self, root: Path, node_ids: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="interpreted-")
        folder = Path(self._folder.name)
        arguments, self._report, self._output = folder / "tests", folder / "report", folder / "output"
        arguments.write_text("\n".join(node_ids))
        self._report.touch()
        self._reader = self._report.open()
        self._rest = ""
        self._outcomes: dict[str, str] = {}
        environment = os.environ | {"TRITON_INTERPRET": "1", REPORT_VARIABLE: str(self._report)}
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", f"@{arguments}"],
                cwd=root,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def outcome(self, node_id: str) -> str:
        """Wait for a test; its failure as text, empty if it passed. Bounded by the test's own timeout."""
        while node_id not in self._outcomes:
            has_ended = self._process.poll() is not None
            self._read()
            if has_ended and node_id not in self._outcomes:
                return f"the interpreter's process ended with {self._process.returncode}:\n{self._output.read_text()}"
            time.sleep(0.01)
        return self._outcomes[node_id]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.close()
        self._folder.cleanup()

    def _read(self) -> None:
        *lines, self._rest = (self._rest + self._reader.read()).split("\n")
        for line in lines:
            node_id, failure = json.loads(line)
            self._outcomes[node_id] = failure


_run_key = pytest.StashKey[InterpretedRun]()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if IS_INTERPRETED or not pyfuncitem.path.name.startswith(PREFIX):
        return None
    config = pyfuncitem.config
    if _run_key not in config.stash:
        items = [item.nodeid for item in pyfuncitem.session.items if item.path.name.startswith(PREFIX)]
        config.stash[_run_key] = InterpretedRun(config.rootpath, items)
    failure = config.stash[_run_key].outcome(pyfuncitem.nodeid)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = session.config.stash.get(_run_key, None)
    if run is not None:
        run.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get(REPORT_VARIABLE)
    if path is None or not IS_INTERPRETED:
        return
    if report.when == "call" or not report.passed:
        failure = "" if report.passed else report.longreprtext or report.outcome
        with Path(path).open("a") as file:
            file.write(json.dumps([report.nodeid, failure]) + "\n")
