"""The examples of deploy/kustomize with a real vLLM: the flags of its manifest, processes in place of containers."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from deploy_tools import DEPLOY, Document, kustomized, pod_specs
from openai_server import wait_until
from prometheus_stage import needs_prometheus, prometheus
from server_process import ServerProcess
from vllm_server import PYTHON, VLLM, free_port, running_vllm

from kvwatch.derive.metrics import full_name
from kvwatch_dashboards.boards import BOARDS
from kvwatch_dashboards.preview.reading import Reading, Span, read_board
from kvwatch_dashboards.settings import SIDECAR_JOBS
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.sources import default_cache_dir

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with vLLM: run `make test-vllm`"
    ),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket, in place of the pod's emptyDir."""
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        yield Path(name)


def on_this_machine(words: Sequence[str], container: Document, places: dict[str, str]) -> list[str]:
    """Return a container's words with its variables, and with what of the pod is elsewhere here."""
    variables = {each["name"]: each.get("value", "chat") for each in container.get("env", ())}
    variables |= {"ENGINE_PORT": places["8000"], "ENGINE_RANKS": "1", "ENGINE_OPTIONS": ""}
    found = list(words)
    for name, value in variables.items():
        found = [word.replace(f"$({name})", value) for word in found]
    for there, here in places.items():
        if not there.isdigit():
            found = [word.replace(there, here) for word in found]
    return found


@contextmanager
def sidecar(words: Sequence[str]) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "kvwatch", *words, "--admin-listen=off", "--grpc-listen=off", "--flight-dir=off"]
    environment = {name: value for name, value in os.environ.items() if name != PYTHON}  # no setting of the sidecar
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment)
    running = ServerProcess(process)
    try:
        running.metrics_url = str(running.wait_for("ready", 60)["metrics"])
        yield running
    finally:
        process.kill()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()


def told(running: ServerProcess) -> dict[str, float]:
    """Return what the sidecar says, summed over the labels that are not the engine's."""
    found: dict[str, float] = {}
    for series, value in running.metrics().items():
        name = series.partition("{")[0]
        found[name] = found.get(name, 0) + value
    return found


@contextmanager
def running_example(example: str, folder: Path, tmp_path: Path) -> Iterator[tuple[ServerProcess, VLLM]]:
    """Run the pod of an example: the sidecar first, as its manifest wants it, then the engine."""
    (spec,) = pod_specs(kustomized(DEPLOY / "kustomize" / "examples" / example))
    (container,), (engine,) = spec["initContainers"], spec["containers"]
    api, events, replay = (str(free_port()) for _ in range(3))
    places = {"8000": api, "127.0.0.1:5557": f"127.0.0.1:{events}", "127.0.0.1:5657": f"127.0.0.1:{replay}"}
    places |= {"0.0.0.0:9400": "127.0.0.1:0", "/run/kvwatch": str(folder), "/var/cache/kvwatch": str(tmp_path)}
    words = on_this_machine(engine["args"], engine, places)
    config = json.loads(words[words.index("--kv-events-config") + 1])
    load_model("embedded")
    (model, *_) = sorted(path.parent for path in (default_cache_dir() / "models").glob("SmolLM2*/config.json"))
    with sidecar(on_this_machine(container["args"], container, places)) as watching:
        endpoints = (config["endpoint"], config["replay_endpoint"])
        with running_vllm(model, tmp_path / "log", endpoints, port=int(api)) as server:
            yield watching, server


@pytest.mark.parametrize("example", ["vllm", "vllm-ranks"])
def test_a_vllm_with_the_flags_of_an_example_is_seen_by_its_sidecar(example: str, folder: Path, tmp_path: Path) -> None:
    with running_example(example, folder, tmp_path) as (watching, server):
        for number in range(4):
            server.complete([1000 + number, *range(2000, 2160)], 40)
        wait_until(lambda: told(watching).get("kvwatch_kv_indexed_blocks", 0) >= 4, 120)
        seen = told(watching)

    assert seen["kvwatch_source_up"] == 1
    assert seen["kvwatch_source_complete"] == 1
    assert seen["kvwatch_kv_block_stores_total"] >= seen["kvwatch_kv_indexed_blocks"]
    assert seen["kvwatch_source_decode_errors_total"] == 0
    assert seen["kvwatch_source_drift_blocks"] == 0
    assert seen["kvwatch_generated_tokens_total"] >= 4 * 40


@needs_prometheus
def test_the_dashboards_fill_beside_a_vllm(folder: Path, tmp_path: Path) -> None:
    with (
        running_example("vllm", folder, tmp_path) as (watching, server),
        prometheus(tmp_path, {SIDECAR_JOBS: [watching.metrics_url]}) as api,
    ):
        started = time.time()
        for number in range(24):  # half of them find what the others have left
            server.complete([1000 + number % 12, *range(2000, 2160)], 40)
        wait_until(lambda: told(watching).get("kvwatch_generated_tokens_total", 0) >= 24 * 40, 120)
        page = httpx.get(watching.metrics_url, timeout=30).text
        time.sleep(5)  # a few scrapes more: what was counted last is in a rate
        span = Span(started, time.time(), 1.0)
        readings = {board.uid: read_board(board, api, span) for board in BOARDS}
        on_the_page = {line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE ")}
        told_panels = {uid: [each for each in found if is_told(each, on_the_page)] for uid, found in readings.items()}

    filled = {uid: f"{sum(bool(each.shown) for each in found)} of {len(found)}" for uid, found in told_panels.items()}
    print("panels with data, of those that a vLLM can fill:", filled)
    assert {each.panel.title for found in told_panels.values() for each in found if not each.shown} == set()
    assert {uid for uid, found in told_panels.items() if len(found) < 2} <= {"kvwatch-pressure"}


def is_told(reading: Reading, on_the_page: set[str]) -> bool:
    """Return whether the source tells all that a panel shows."""
    names = {full_name(metric).removesuffix("_total") for metric in reading.panel.metrics}
    return bool(names) and not names - {each.removesuffix("_total") for each in on_the_page}
