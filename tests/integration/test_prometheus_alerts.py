"""Alerts on their whole way: a real engine, Prometheus, Alertmanager, a webhook. All times of the rules are a 60th.

One engine whose pool is far too small for its load pages somebody, and says so when it is over. Another one whose pool
is always full while nobody waits long pages nobody, for twice as long as the slowest alert needs.
"""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_stage import (
    QUICK,
    Webhook,
    alertmanager,
    needs_alertmanager,
    needs_prometheus,
    prometheus,
    seconds_of,
    wait_for,
    webhook,
)
from server_process import ServerProcess, serve_process
from tiny_models import make_tiny_model

from kvwatch_dashboards.alerts import ALERTS, PAGES
from kvwatch_dashboards.prometheus_api import PrometheusApi

pytestmark = [needs_prometheus, needs_alertmanager, pytest.mark.slow, pytest.mark.timeout(900)]

FACTOR = 60
STALLED = "KVWatchRequestsStalledForBlocks"
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


class Clients:
    """Clients that ask without a pause, each for half of the pool."""

    def __init__(self, server: ServerProcess, number: int, max_tokens: int) -> None:
        self._server = server
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(number)]
        for thread in self._threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        choices = random.Random(seed)
        with httpx.Client(base_url=self._server.api, timeout=300) as client:
            while not self._stop.is_set():
                words = " ".join(str(choices.random()) for _ in range(8))
                body = {"model": "tiny", "prompt": words, "max_tokens": self._max_tokens, "ignore_eos": True}
                client.post("/completions", json=body).raise_for_status()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)


@contextlib.contextmanager
def clients(server: ServerProcess, number: int, max_tokens: int) -> Iterator[None]:
    running = Clients(server, number, max_tokens)
    try:
        yield
    finally:
        running.end()


@contextlib.contextmanager
def watched(folder: Path, model: Path) -> Iterator[tuple[ServerProcess, PrometheusApi, Webhook]]:
    """Run an engine with few blocks, and everything behind it."""
    flags = ("--served-model-name", "tiny", "--num-blocks", str(NUM_BLOCKS), "--dtype", "float32")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_process(model, *flags, ready_seconds=400))
        receiver = stack.enter_context(webhook())
        address = stack.enter_context(alertmanager(folder, receiver, QUICK))
        jobs = {"kvwatch": [server.metrics_url]}
        api = stack.enter_context(prometheus(folder, jobs, factor=FACTOR, alertmanagers=[address]))
        yield server, api, receiver


def test_the_stall_alert_reaches_somebody_and_is_taken_back_after_the_load(model: Path, tmp_path: Path) -> None:
    with watched(tmp_path, model) as (server, api, receiver):
        with clients(server, 24, max_tokens=150):
            wait_for(
                lambda: "firing" in receiver.statuses(STALLED), 240,
                lambda: [(each.name, each.state) for each in api.rules() if each.state not in {"", "inactive"}],
            )  # fmt: skip
        told = next(alert for alert in receiver.alerts if alert.labels["alertname"] == STALLED)
        assert told.labels["severity"] == "page"
        assert (told.labels["engine"], told.labels["dp_rank"]) == ("kvwatch", "0")
        assert told.annotations["summary"].startswith("kvwatch rank 0: requests wait for KV blocks")
        assert told.annotations["runbook_url"].endswith(f"#{STALLED.lower()}")
        assert "%" in told.annotations["description"]
        wait_for(lambda: receiver.statuses(STALLED)[-1] == "resolved", 120, lambda: receiver.statuses(STALLED))
        assert "KVWatchLedgerViolation" not in receiver.pages()


def test_an_engine_that_is_always_full_while_nobody_waits_long_pages_nobody(model: Path, tmp_path: Path) -> None:
    longest = max(seconds_of(alert.lasts) for alert in ALERTS) / FACTOR
    with watched(tmp_path, model) as (server, api, receiver), clients(server, 4, max_tokens=40):
        time.sleep(2 * longest)
        (usage,) = api.instant('max_over_time(kvwatch_kv_usage_ratio{tier="device"}[1m])')
        (stall,) = api.instant("rate(kvwatch_kv_stall_seconds_total[1m])")
        rules = {rule.name: rule for rule in api.rules()}
        sent = receiver.pages()
    assert usage.points[0][1] > 0.7, "it was not full: half of its blocks is what one request needs"
    assert stall.points[0][1] > 0.2, "nobody waited for blocks"
    assert {name for name, rule in rules.items() if rule.type == "alerting" and rule.health != "ok"} == set()
    assert {page.name for page in PAGES if rules[page.name].state == "firing"} == set()
    assert sent == set()
