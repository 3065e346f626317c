"""`make observatory` as a person runs it: one command, addresses that answer, and nothing left after Ctrl-C."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_stage import needs_alertmanager, needs_prometheus, wait_for
from tiny_models import make_tiny_model

from kvwatch_dashboards.alerts import ALERTS
from kvwatch_dashboards.prometheus_api import PrometheusApi
from kvwatch_dashboards.recording import RECORDINGS

pytestmark = [needs_prometheus, needs_alertmanager]
COMMAND = [sys.executable, "-m", "kvwatch_dashboards.local"]


def start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def addresses(process: "subprocess.Popen[str]", last: str = "Ctrl-C ends all three") -> dict[str, str]:
    """Return what it prints until everything runs: name -> address."""
    assert process.stdout is not None
    found: dict[str, str] = {}
    for line in process.stdout:
        if line.strip() == last:
            return found
        name, _, address = line.strip().partition("  ")
        found[name] = address.strip()
    raise AssertionError(f"it ended with {process.wait(10)} after {found}")


def is_listened_to(url: str) -> bool:
    host, _, port = urlsplit(url).netloc.partition(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(port))) == 0


@pytest.mark.timeout(240)
def test_everything_runs_knows_each_other_and_ends_with_one_ctrl_c(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=2048)
    flags = ("--model", str(model), "--num-blocks", "60", "--flight-dir", "off")
    process = start("--data", str(tmp_path / "data"), *flags)
    try:
        said = addresses(process)
        api = PrometheusApi(said["Prometheus"])
        try:
            # Prometheus looks at every rule once, within a scrape interval or two.
            wait_for(lambda: all(rule.health == "ok" for rule in api.rules()), 60, api.rules)
            names = {each.name for each in ALERTS} | {each.name for each in RECORDINGS}
            assert {rule.name for rule in api.rules()} == names
            assert [each.points[0][1] for each in api.instant('up{job="kvwatch"}')] == [1]
        finally:
            api.close()
        managers = httpx.get(f"{said['Prometheus']}/api/v1/alertmanagers", timeout=30).json()["data"]
        assert [each["url"] for each in managers["activeAlertmanagers"]] == [f"{said['Alertmanager']}/api/v2/alerts"]
        assert httpx.get(f"{said['Alertmanager']}/api/v2/status", timeout=30).status_code == 200
        assert httpx.get(f"{said['admin API']}/pool", timeout=30).status_code == 200
        assert is_listened_to(f"grpc://{said['event stream']}")

        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 0, out
    assert out.splitlines()[-1] == "all ended"
    assert not [url for url in said.values() if url.startswith("http") and is_listened_to(url)]
    assert (tmp_path / "data" / "prometheus.yml").is_file(), "a folder that was named stays"


@pytest.mark.timeout(120)
def test_an_engine_that_does_not_start_is_told_with_its_own_words_and_ends_all(tmp_path: Path) -> None:
    process = start("--data", str(tmp_path), "--model", str(tmp_path / "no such model"))
    out, _ = process.communicate(timeout=90)

    assert process.returncode == 1
    assert "the engine ended with status" in out
    assert "no such model" in out


@pytest.mark.timeout(120)
def test_ctrl_c_while_the_engine_starts_ends_at_once(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=2048)
    process = start("--data", str(tmp_path / "data"), "--model", str(model))
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("starting an engine")
        time.sleep(0.5)  # anywhere in its start
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 0, out
    assert "Prometheus" not in out
