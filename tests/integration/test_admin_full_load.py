"""`kvwatch serve` under full load, changed through its admin API: no request fails, no text differs, all is told.

At each change at least 8 requests decode, one is in prefill and one is preempted: the server's own events say so.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from admin_stage import TOKEN_FILE, TOKENS
from event_states import EventReader
from openai_server import wait_until
from otlp_receiver import Collected, attributes, http_collector
from server_process import ServerProcess, serve_process
from tiny_models import make_tiny_model

NEAR_TIE = 1e-4
NUM_SHORT, SHORT_TOKENS = 90, 60
NUM_LONG, LONG_TOKENS = 2, 300
CHANGES: list[tuple[str, Any]] = [
    ("block_size", 32), ("block_size", 8), ("block_size", 16), ("num_blocks", 80), ("num_blocks", 300),
    ("watermark", "0.05"), ("preemption_mode", "swap"),
]  # fmt: skip
MAX_TRIES = 30
"""Times that a change is made again since the load was not full at its moment."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def prompt(number: int) -> list[int]:
    """Return the tokens of one of the load's prompts; short ones begin alike."""
    if number < NUM_SHORT:
        return [*((17 * i + 5) % 500 for i in range(21)), *((7 * number + 3 * i) % 500 for i in range(number % 6 + 1))]
    return [(13 * number + 11 * i + 1) % 500 for i in range(LONG_TOKENS)]


def ask(server: ServerProcess, number: int, **more: Any) -> Any:
    """Ask for the text of one prompt."""
    is_short = number < NUM_SHORT
    body = {
        "model": "model", "prompt": prompt(number), "max_tokens": SHORT_TOKENS if is_short else 2, "temperature": 0,
        "ignore_eos": True, "priority": int(is_short), **more,
    }  # fmt: skip
    answer = httpx.post(f"{server.api}/completions", json=body, timeout=600, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


class Load:
    """Clients in a closed loop, each with a prompt of its own."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.texts: dict[int, set[str]] = {number: set() for number in range(NUM_SHORT + NUM_LONG)}
        self.num_answers = 0
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in self.texts]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let what was asked end."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(600)

    def once(self) -> None:
        """Ask each prompt once."""
        self._is_over.set()
        self.start()
        self.stop()

    def _run(self, number: int) -> None:
        try:
            while True:
                choice = ask(self._server, number)
                assert choice["finish_reason"] == "length"
                self.texts[number].add(choice["text"])
                self.num_answers += 1
                if self._is_over.is_set():
                    return
        except BaseException as error:
            self.errors.append(error)


class Operator:
    """Whoever changes the server."""

    def __init__(self, server: ServerProcess) -> None:
        ready = next(line for line in server.lines if line.get("event") == "ready")
        self.api = str(ready["admin"])
        headers = {"Authorization": f"Bearer {TOKENS['operate']}"}
        self.client = httpx.Client(base_url=self.api, headers=headers, timeout=120, trust_env=False)
        self.events = EventReader(self.api)

    def change(self, key: str, value: Any) -> Any:
        """Change one setting."""
        tag = self.client.get("/config").headers["etag"]
        body = {"changes": {key: value}, "reason": f"full load: {key}", "expires_in": 86_400}
        answer = self.client.patch("/config", json=body, headers={"If-Match": tag})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def change_under_full_load(self, key: str, value: Any) -> Any:
        """Change a setting at a moment of full load; take it back and try again if the moment was gone."""
        before = next(each["value"] for each in self.client.get("/config").json()["settings"] if each["key"] == key)
        for _ in range(MAX_TRIES):
            wait_until(self._is_full, 300)
            num_changes = len(self.events.changes(key))
            answer = self.change(key, value)
            wait_until(lambda seen=num_changes: len(self.events.changes(key)) > seen, 60)  # type: ignore[misc]
            decoding, prefilling, preempted = self.events.changes(key)[-1]
            if decoding >= 8 and prefilling and preempted:
                print(f"{key} {before} -> {value}: {decoding} decode, {prefilling} in prefill, {preempted} preempted")
                return answer
            self.change(key, before)
        raise AssertionError(f"the load was never full when {key} changed")

    def _is_full(self) -> bool:
        decoding, prefilling, preempted = self.events.now.numbers
        return decoding >= 9 and prefilling >= 1 and preempted >= 1


@contextmanager
def server_to_change(model: Path | str, folder: Path, endpoint: str) -> Iterator[tuple[ServerProcess, Operator]]:
    (folder / "tokens").write_text(TOKEN_FILE, encoding="utf-8")
    flags = (
        "--num-blocks", "200", "--allow-rebuild", "--rebuild-cooldown", "0", "--preemption-mode", "recompute",
        "--watermark", "0", "--host-memory", "64MiB", "--max-num-seqs", "128", "--max-prefill-chunk", "2",
        "--no-reserve-prompt", "--admin-token-file", str(folder / "tokens"), "--admin-audit-file",
        str(folder / "audit"), "--otlp-endpoint", endpoint, "--trace-ratio", "1",
    )  # fmt: skip
    with serve_process(model, *SERVE, *flags) as server:
        operator = Operator(server)
        with operator.client:
            yield server, operator


SERVE = ("--dtype", "float32", "--served-model-name", "model", "--block-size", "16")


@pytest.fixture(params=["tiny", pytest.param("embedded", marks=pytest.mark.model)])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return "embedded" if request.param == "embedded" else make_tiny_model("qwen3", tmp_path / "model")


def test_a_server_under_full_load_is_changed_and_every_text_stays(model: Path | str, tmp_path: Path) -> None:
    with serve_process(model, *SERVE, "--num-blocks", "1200", "--max-num-seqs", "128") as undisturbed:
        reference = Load(undisturbed)
        reference.once()
        assert reference.errors == []
        with http_collector() as collected:
            with server_to_change(model, tmp_path, collected.endpoint) as (server, operator):
                load = Load(server)
                load.start()
                answers = [operator.change_under_full_load(key, value) for key, value in CHANGES]
                load.stop()
                check_page(server)
                assert server.terminate() == 0
            operator.events.join()
        assert load.errors == []
        assert load.num_answers > NUM_SHORT
        check_texts(undisturbed, reference, load)
    check_record(operator, answers, tmp_path / "audit")
    check_spans(collected)


def check_page(server: ServerProcess) -> None:
    """The ledger agrees with the engine, nothing is held any more, and the page tells what was changed."""
    page = server.metrics()
    assert page["kvwatch_ledger_violations_total"] == 0
    assert page['kvwatch_kv_orphaned_blocks{tier="device"}'] == 0
    assert page['kvwatch_kv_usage_ratio{tier="device"}'] == 0
    assert page['kvwatch_kv_block_capacity{tier="device"}'] == 299
    assert page["kvwatch_kv_block_size_tokens"] == 16
    assert page['kvwatch_pool_rebuilds_total{outcome="rebuilt"}'] >= 3
    assert page['kvwatch_pool_rebuilds_total{outcome="resized"}'] >= 2
    for key in ("num_blocks", "watermark", "preemption_mode"):
        assert page[f'kvwatch_config_drift{{key="{key}"}}'] == 1
        assert page[f'kvwatch_config_changes_total{{key="{key}"}}'] >= 1
    assert page['kvwatch_config_changes_total{key="block_size"}'] >= 3
    assert page['kvwatch_config_drift{key="block_size"}'] == 0
    assert page['kvwatch_requests_finished_total{lora="",reason="error",tenant=""}'] == 0


def check_texts(undisturbed: ServerProcess, reference: Load, load: Load) -> None:
    """All texts of a prompt are the undisturbed one, or part from it where the two best tokens are nearly tied."""
    num_excused = 0
    for number, (text,) in reference.texts.items():
        for other in load.texts[number] - {text}:
            same = next(at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
            assert gap_of_the_best(undisturbed, number, same) < NEAR_TIE, (number, text, other)
            num_excused += 1
    print(f"{load.num_answers} answers, {num_excused} of them excused by a near tie")


def gap_of_the_best(server: ServerProcess, number: int, character: int) -> float:
    """Return by how much the best token is more likely than the second where a text reaches this character."""
    logprobs, length = ask(server, number, logprobs=2)["logprobs"], 0
    for token, best in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        length += len(token)
        if length > character:
            first, second = sorted(best.values(), reverse=True)[:2]
            return float(first - second)
    raise AssertionError(f"the text has no character {character}")


def check_record(operator: Operator, answers: list[Any], audit: Path) -> None:
    """Each change is an event and two lines of the audit."""
    lines = [json.loads(line) for line in audit.read_text(encoding="utf-8").splitlines()]
    events = [event for event, _ in operator.events.control if event["event"] == "control.config_changed"]
    for (key, value), answer in zip(CHANGES, answers, strict=True):
        outcomes = [line["outcome"] for line in lines if line["id"] == answer["audit"]["id"]]
        assert outcomes == ["begun", "done"]
        assert {"key": key, "new": str(value), "actor": "operate", "reason": f"full load: {key}"}.items() <= next(
            event.items() for event in events if (event["key"], event["new"]) == (key, str(value))
        )


def check_spans(collected: Collected) -> None:
    """Requests that lived through a change have it on their span."""
    told = [event for span in collected.spans for event in span.events]
    keys = {attributes(each.attributes)["kvwatch.config.key"] for each in told if each.name == "kvwatch.config_changed"}
    assert keys >= {key for key, _ in CHANGES}
    assert "kvwatch.pool_rebuilt" in {each.name for each in told}
