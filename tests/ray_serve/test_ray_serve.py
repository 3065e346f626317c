"""Two replicas of the embedded model behind Ray Serve: equal prefixes meet, a lost replica costs no request."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray_app import PYTHON, RayApp, ray_app

pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with Ray: run `make test-ray`"),
]

MODEL = "SmolLM2-135M-Instruct"
PARAGRAPH = "The keeper of the lighthouse wrote down the weather, the ships and the light of every single night. " * 6
NUM_CLIENTS = 8


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayApp]:
    with ray_app(tmp_path_factory.mktemp("ray"), replicas=2) as running:
        yield running


def complete(app: RayApp, prompt: str, max_tokens: int = 16) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{app.url}/v1/completions", json=body, timeout=300)


def by_engine(page: str, name: str) -> dict[str, float]:
    """Return the sum of a metric for each engine."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels["engine"]] = found.get(sample.labels["engine"], 0) + sample.value
    return found


def test_every_path_of_the_api_is_answered_by_an_engine(app: RayApp) -> None:
    assert httpx.get(f"{app.url}/v1/models", timeout=60).json()["data"][0]["id"] == MODEL
    refused = httpx.post(
        f"{app.url}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": -1}, timeout=60
    )

    assert refused.status_code == 400
    assert "max_tokens" in refused.json()["error"]["message"]


def test_one_page_shows_all_replicas_each_under_its_name(app: RayApp) -> None:
    page = app.page()

    assert by_engine(page, "kvwatch_kv_block_capacity").keys() == {"ray-0", "ray-1"}
    headers = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers))
    rows = app.replicas()
    assert [row["name"] for row in rows] == ["ray-0", "ray-1"]
    assert len({row["engine_pid"] for row in rows}) == 2


def test_equal_prefixes_meet_the_same_replica_and_others_spread(app: RayApp) -> None:
    before = by_engine(app.page(), "kvwatch_prefix_cache_hit_tokens_total")
    for number in range(6):
        assert complete(app, f"{PARAGRAPH} Night {number}.", 2).status_code == 200

    def hits() -> dict[str, float]:
        now = by_engine(app.page(), "kvwatch_prefix_cache_hit_tokens_total")
        return {name: value - before.get(name, 0) for name, value in now.items() if value > before.get(name, 0)}

    app.wait_for(lambda: sum(hits().values()) >= 5 * 96, "five hits of a paragraph")
    assert len(hits()) == 1
    for number in range(12):
        assert complete(app, f"{number} is a number that is {PARAGRAPH}", 1).status_code == 200
    app.wait_for(
        lambda: all(value > 0 for value in by_engine(app.page(), "kvwatch_prompt_tokens_total").values()),
        "both replicas had prompts",
    )


def test_a_client_that_hangs_up_is_told_to_the_engine(app: RayApp) -> None:
    def aborted() -> float:
        lines = [line for line in app.page().splitlines() if line.startswith("kvwatch_requests_finished_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'reason="abort"' in line)

    before = aborted()
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=300) as answer:
        assert next(answer.iter_lines()).startswith("data: ")

    app.wait_for(lambda: aborted() == before + 1, "the request was aborted")


@dataclass
class Outcome:
    """What clients saw."""

    whole: int = 0
    broken_off: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def keep_asking(app: RayApp, client: int, until: threading.Event, seen: Outcome) -> None:
    """Ask again and again, every other client for a stream."""
    number = 0
    while not until.is_set():
        number += 1
        prompt = f"Client {client} asks for the {number}th time: {PARAGRAPH[:80]}"
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "stream": client % 2 == 0,
            "ignore_eos": True,
        }
        try:
            answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=300)
        except httpx.HTTPError as error:
            with seen.lock:
                seen.wrong.append(repr(error))
            continue
        with seen.lock:
            judge(answer, is_stream=client % 2 == 0, seen=seen)


def judge(answer: httpx.Response, *, is_stream: bool, seen: Outcome) -> None:
    if answer.status_code != 200:
        seen.wrong.append(f"{answer.status_code} {answer.text[:200]}")
    elif not is_stream:
        if answer.json()["usage"]["completion_tokens"] == 24:
            seen.whole += 1
        else:
            seen.wrong.append(answer.text[:200])
    else:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        if events and events[-1] == "[DONE]":
            seen.whole += 1
        elif events and json.loads(events[-1]).get("error", {}).get("code") == "replica_lost":
            seen.broken_off.append(events[-1])
        else:
            seen.wrong.append(answer.text[-200:])


@pytest.mark.parametrize("victim", ["engine_pid", "pid"])
def test_a_replica_that_is_killed_under_load_costs_no_request_but_streams_in_flight(app: RayApp, victim: str) -> None:
    app.wait_for(lambda: len(app.replicas()) == 2, "two replicas")
    before = {row["name"]: row["engine_pid"] for row in app.replicas()}
    seen, until = Outcome(), threading.Event()
    clients = [
        threading.Thread(target=keep_asking, args=(app, number, until, seen), name=f"client-{number}")
        for number in range(NUM_CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        app.wait_for(lambda: seen.whole >= NUM_CLIENTS, "load")
        os.kill(int(app.replicas()[0][victim]), signal.SIGKILL)
        app.wait_for(
            lambda: (
                {row["name"]: row["engine_pid"] for row in app.replicas()}.get("ray-0") not in {None, before["ray-0"]}
            ),
            "a new replica under the old name",
        )
        then = seen.whole
        app.wait_for(lambda: seen.whole >= then + 2 * NUM_CLIENTS, "load goes on")
    finally:
        until.set()
        for client in clients:
            client.join(300)
    print(f"\n{victim} killed: {seen.whole} whole answers, {len(seen.broken_off)} streams broken off with an error")
    assert seen.wrong == []
    assert len(seen.broken_off) <= NUM_CLIENTS // 2


def tokens_per_second(app: RayApp) -> float:
    """Return what 24 requests of 48 tokens get, 12 at a time."""
    begin = time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: complete(app, f"{number}: {PARAGRAPH[:200]}", 48), range(24)))
    assert all(answer.status_code == 200 for answer in answers)
    num_tokens = sum(int(answer.json()["usage"]["completion_tokens"]) for answer in answers)
    return num_tokens / (time.monotonic() - begin)


def test_throughput_of_two_replicas_beside_one(app: RayApp, tmp_path: Path) -> None:
    two = tokens_per_second(app)
    with ray_app(tmp_path, replicas=1) as single:
        one = tokens_per_second(single)

    print(f"\n{two:.0f} tokens/s with two replicas, {one:.0f} with one, one thread each, on {os.cpu_count()} cores")
    assert two > 0
    assert one > 0
