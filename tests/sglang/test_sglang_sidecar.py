"""A sidecar beside SGLang's own tree, publisher and metrics; see `sglang_without_model`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from rogue_engine import free_ports_in_a_row, indexed, value
from sidecar_stage import Series, SidecarStage, of_engine, sidecar_stage, wait_until

from kvwatch.sources.scrape.sglang import SGLANG

PATH = "KVWATCH_SGLANG_PATH"
NUM_RANKS, PAGE_SIZE, NUM_PAGES = 2, 16, 160
PATIENCE_SECONDS = 240.0

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PATH not in os.environ, reason=f"{PATH} names no folder with SGLang: run `make test-sglang`"),
]


class SGLangWithoutModel:
    """The process. `start`, `kill` and `start` again as often as wanted; ports stay."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = (free_ports_in_a_row(1), free_ports_in_a_row(NUM_RANKS), free_ports_in_a_row(NUM_RANKS))
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self._client = httpx.Client(base_url=self.url, timeout=60)

    def start(self) -> None:
        script = Path(__file__).parent.parent / "sglang_without_model.py"
        environment = os.environ | {"PYTHONPATH": os.environ[PATH], "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *map(str, self._ports)], stdout=log, stderr=log, env=environment
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(30)

    def steps(self, number: int) -> None:
        self._client.post(f"/steps/{number}").raise_for_status()

    def clear(self) -> None:
        self._client.post("/clear").raise_for_status()

    def truth(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._client.get("/truth").raise_for_status().json()
        return found

    def page(self) -> str:
        return self._client.get("/metrics").raise_for_status().text

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return self._client.get("/server_info").is_success
        return False


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SGLangWithoutModel]:
    made = SGLangWithoutModel(tmp_path / "log")
    try:
        made.start()
        yield made
    finally:
        made.kill()


@contextmanager
def watched(engine: SGLangWithoutModel) -> Iterator[SidecarStage]:
    with sidecar_stage(f"a=sglang+{engine.url}") as stage:
        stage.wait_until_watched(NUM_RANKS, PATIENCE_SECONDS)
        yield stage


def resident(stage: SidecarStage, rank: int) -> set[bytes]:
    (watch,) = (each for each in stage.sidecar.fleet.watches if each.identity().dp_rank == rank)
    return {content for index in watch.control.snapshot().indexed for content in index.hashes}


def check(stage: SidecarStage, engine: SGLangWithoutModel) -> Series:
    """Wait until the sidecar shows what the trees hold, and nothing else differs; return the page."""
    truth = engine.truth()
    page = wait_until(
        stage.page, lambda page: all(shows(page, r, truth[r]) for r in range(NUM_RANKS)), PATIENCE_SECONDS
    )
    hashes = [{number.to_bytes(8, "big", signed=True) for number in rank["hashes"]} for rank in truth]
    assert [resident(stage, rank) for rank in range(NUM_RANKS)] == hashes
    for rank in range(NUM_RANKS):
        health = [value(page, f"source_{name}", rank=rank) for name in ("complete", "drift_blocks", "gaps_total")]
        assert health == [1, 0, 0]
    skipped = {key for key, number in of_engine(page, "a").items() if key[0].endswith("decode_errors_total") and number}
    assert skipped == set()
    return page


def shows(page: Series, rank: int, truth: dict[str, Any]) -> bool:
    """Whether a page says of a rank what its tree and its pool say."""
    found = {
        "hashes": indexed(page, rank=rank),
        "used": value(page, "kv_blocks", rank=rank, tier="device", group="0", state="used"),
        "cached": value(page, "kv_blocks", rank=rank, tier="device", group="0", state="cached"),
        "empty": value(page, "kv_blocks", rank=rank, tier="device", state="empty"),
        "free": value(page, "kv_free_blocks", rank=rank, tier="device"),
        "capacity": value(page, "kv_block_capacity", rank=rank, tier="device"),
        "size": value(page, "kv_block_size_tokens", rank=rank),
        "waiting": value(page, "requests", rank=rank, state="waiting"),
    }
    return found == {
        "hashes": len(truth["hashes"]), "used": 0, "cached": truth["num_pages"], "empty": truth["num_free_pages"],
        "free": NUM_PAGES, "capacity": NUM_PAGES, "size": PAGE_SIZE,
        "waiting": 5,  # of which each priority is a part
    }  # fmt: skip


def test_what_the_trees_hold_is_what_is_shown_through_pressure_clears_and_a_crash(engine: SGLangWithoutModel) -> None:
    with watched(engine) as stage:
        engine.steps(150)
        check(stage, engine)
        assert all(rank["num_evicted_pages"] > 100 for rank in engine.truth())
        engine.steps(150)
        page, truth = check(stage, engine), engine.truth()
        assert value(page, "prefix_cache_hit_tokens_total", tier="device") == sum(each["hit_tokens"] for each in truth)
        assert value(page, "prompt_tokens_total") == sum(each["prompt_tokens"] for each in truth)
        for rank in range(NUM_RANKS):
            stores = value(page, "kv_block_stores_total", rank=rank, tier="device") or 0
            gone = value(page, "kv_block_evictions_total", rank=rank, tier="device", reason="removed") or 0
            assert stores - gone == indexed(page, rank=rank)
            assert gone > 100

        engine.clear()
        engine.steps(20)
        check(stage, engine)

        engine.kill()
        wait_until(stage.page, lambda page: value(page, "source_up") == value(page, "source_up", rank=1) == 0)
        engine.start()
        engine.steps(100)
        page = check(stage, engine)
        assert [value(page, "source_resets_total", rank=rank) for rank in range(NUM_RANKS)] == [1, 1]


def test_a_sidecar_that_comes_late_has_the_rest_replayed(engine: SGLangWithoutModel) -> None:
    engine.steps(200)
    with watched(engine) as stage:
        check(stage, engine)
        engine.steps(50)
        check(stage, engine)


def test_every_metric_that_is_read_of_an_sglang_is_one_of_its_own(engine: SGLangWithoutModel) -> None:
    declared = {line.split()[2] for line in engine.page().splitlines() if line.startswith("# TYPE ")}

    missing = {rule.names[0] for rule in SGLANG.rules} - declared
    assert missing == set()
