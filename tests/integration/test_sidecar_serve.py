"""A real `kvwatch serve` and a real `kvwatch sidecar` that joins it in the middle of a load.

From then on every series that the sidecar exports moves by the same amount as the engine's own; at idle all gauges are
equal. The engine is killed and started anew, beside another that is never there; the sidecar stays, and is ready.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from math import isclose
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, serve_process
from sidecar_process import sidecar_process
from sidecar_stage import OF_A_SIDECAR, Series, of_engine, parse_page, wait_until
from tiny_models import make_tiny_model

from kvwatch.sockets import bind

MODEL = "tiny"
OF_AN_OBSERVATORY = (
    "kvwatch_admin_",
    "kvwatch_telemetry_",
    "kvwatch_source_",
    "kvwatch_build_info",
    "kvwatch_ledger_update",
    *OF_A_SIDECAR,
)
MOVING = ("_total", "_bucket", "_sum", "_count")
WINDOWED = ("kvwatch_kv_free_blocks_min", "kvwatch_kv_usage_ratio_max")
"""Known only when a whole minute was seen, and the sidecar came later than the engine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@contextlib.contextmanager
def engine(folder: Path, grpc: str) -> Iterator[ServerProcess]:
    """Serve a small model with few blocks, so that requests wait and are preempted."""
    with serve_process(folder, "--served-model-name", MODEL, "--num-blocks", "40", "--grpc-listen", grpc) as server:
        yield server


class Load:
    """Clients that ask without a pause until told to stop, some of whom hang up."""

    def __init__(self, server: ServerProcess, num_clients: int = 8) -> None:
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, seed: int) -> None:
        choices = random.Random(seed)
        with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=self._server.api, timeout=60) as client:
            while not self._stop.is_set():
                body = {
                    "model": MODEL, "prompt": "a shared beginning " * choices.randint(1, 6) + str(choices.random()),
                    "max_tokens": choices.randint(1, 60), "n": choices.choice([1, 1, 2]), "ignore_eos": True,
                }  # fmt: skip
                patience = choices.choice([60, 60, 60, 0.15])
                with contextlib.suppress(httpx.TimeoutException):
                    client.post("/completions", json=body, timeout=patience)


def shown(url: str, name: str) -> Series:
    """Scrape; return what concerns the engine, under whatever name."""
    time.sleep(1.05)  # for as long pages are shared
    page = of_engine(parse_page(httpx.get(url, timeout=10).text), name)
    return {key: value for key, value in page.items() if not key[0].startswith(OF_AN_OBSERVATORY)}


def idle(server: ServerProcess, sidecar: ServerProcess) -> tuple[Series, Series]:
    """Wait until both have shown the same for a while: nothing runs, nothing is on its way."""
    deadline = time.monotonic() + 60
    before = shown(server.metrics_url, "kvwatch"), shown(sidecar.metrics_url, "near")
    while True:
        now = shown(server.metrics_url, "kvwatch"), shown(sidecar.metrics_url, "near")
        running = [value for (name, labels), value in now[0].items() if name == "kvwatch_requests"]
        if now == before and not any(running):
            return now
        assert time.monotonic() < deadline, sorted(set(now[0].items()) ^ set(before[0].items()))
        before = now


def is_up(name: str, value: float = 1) -> Callable[[Series], bool]:
    return lambda page: of_engine(page, name).get(("kvwatch_source_up", (("dp_rank", "0"),))) == value


def page_of(sidecar: ServerProcess) -> Callable[[], Series]:
    def read() -> Series:
        time.sleep(1.05)
        return parse_page(httpx.get(sidecar.metrics_url, timeout=10).text)

    return read


def check_gauges(theirs: Series, mine: Series) -> None:
    is_gauge = {key for key in theirs | mine if not key[0].endswith(MOVING) and not key[0].startswith(WINDOWED)}
    differing = {
        key: (mine.get(key), theirs.get(key))
        for key in is_gauge
        if key not in mine or key not in theirs or abs(mine[key] - theirs[key]) > (0.1 if "timestamp" in key[0] else 0)
    }
    assert differing == {}
    assert len(is_gauge) > 30


def check_moves(before: tuple[Series, Series], after: tuple[Series, Series]) -> None:
    theirs, mine = (
        {key: value - before[side].get(key, 0) for key, value in after[side].items() if key[0].endswith(MOVING)}
        for side in (0, 1)
    )
    assert mine.keys() == theirs.keys()
    assert {key: (mine[key], theirs[key]) for key in mine if not isclose(mine[key], theirs[key], abs_tol=1e-9)} == {}
    assert sum(value > 0 for value in mine.values()) > 60


@pytest.mark.timeout(300)
def test_a_sidecar_shows_what_the_engine_shows_and_outlives_it(folder: Path) -> None:
    with bind("127.0.0.1:0", "test") as free, bind("127.0.0.1:0", "test") as dead:
        grpc, nobody = (f"127.0.0.1:{each.getsockname()[1]}" for each in (free, dead))
    with contextlib.ExitStack() as stack:
        with engine(folder, grpc) as server:
            load = Load(server)
            time.sleep(2)
            sidecar = stack.enter_context(sidecar_process(f"near=grpc://{grpc}", f"nobody=grpc://{nobody}"))
            wait_until(page_of(sidecar), is_up("near"))
            time.sleep(2)
            load.end()
            before = idle(server, sidecar)
            check_gauges(*before)
            load = Load(server)
            time.sleep(6)
            load.end()
            after = idle(server, sidecar)
            check_gauges(*after)
            check_moves(before, after)
            assert after[1]["kvwatch_requests_finished_total", (("dp_rank", "0"), ("reason", "length"))] > 0
        ready = sidecar.metrics_url.replace("/metrics", "/ready")
        wait_until(page_of(sidecar), is_up("near", 0))
        assert httpx.get(ready).status_code == 200
        with engine(folder, grpc) as server:
            wait_until(page_of(sidecar), is_up("near"), 40)
            before = idle(server, sidecar)
            load = Load(server)
            time.sleep(4)
            load.end()
            after = idle(server, sidecar)
            check_gauges(*after)
            check_moves(before, after)
            assert is_up("nobody", 0)(page_of(sidecar)())
        assert sidecar.terminate() == 0
        errors = [line for line in sidecar.drain_log() if line.get("level") in {"error", "critical"}]
        assert errors == []
