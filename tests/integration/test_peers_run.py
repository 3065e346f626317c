"""`make bench-peers` as it is called, with one side: what it writes, what it exits with, what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_models import make_shallow_model

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]
PERF = Path(__file__).parents[1] / "perf"


def command(model: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "peers.run", "--model", str(model), "--out", str(out), "--sides", "kvwatch",
        "--loads", "burst", "--even-if-busy", *more,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(PERF), os.environ.get("PYTHONPATH", "")])}


def run(model: Path, out: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(model, out, *more), env=environment(), capture_output=True, text=True, timeout=800, check=False
    )


def report(out: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / "report.json").read_text())["loads"]["burst"]["sides"]["kvwatch"]
    return found


def test_short_runs_add_up_to_one_report(tmp_path: Path) -> None:
    model, out = make_shallow_model(tmp_path / "model"), tmp_path / "out"

    first = run(model, out, "--rounds", "1")
    assert first.returncode == 0, first.stderr
    assert report(out)["rounds"] == 1

    second = run(model, out, "--rounds", "1", "--add")
    assert second.returncode == 0, second.stderr
    assert report(out)["rounds"] == 2
    assert "burst: 64 x 32 tokens in, 32 out, 64 at a time" in second.stdout

    again = run(model, out, "--report")
    assert (again.returncode, again.stdout) == (0, second.stdout)


def test_a_report_needs_trials(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path / "out", "--report")

    assert done.returncode == 3
    assert "holds no trials" in done.stderr


def test_its_servers_end_with_it(tmp_path: Path) -> None:
    model, out = make_shallow_model(tmp_path / "model"), tmp_path / "out"
    process = subprocess.Popen(command(model, out, "--rounds", "500"), env=environment(), stderr=subprocess.PIPE)
    trials, deadline = out / "trials.json", time.monotonic() + 800
    while not trials.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    servers = psutil.Process(process.pid).children(recursive=True)
    assert any("serve" in server.cmdline() for server in servers)

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)

    _, alive = psutil.wait_procs(servers, timeout=60)
    assert not alive
