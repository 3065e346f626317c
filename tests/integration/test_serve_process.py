"""The whole server as one process: from the command line to the metrics, and down again."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httpx
import pytest
from server_process import NO_FURTHER_PORTS, ServerProcess, serve_process
from tiny_models import make_tiny_model

MODEL = "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serve_process(folder, "--served-model-name", MODEL, "--num-blocks", "200") as running:
        yield running


class LongRequest(threading.Thread):
    """A streaming request that has begun to answer when the constructor returns."""

    def __init__(self, server: ServerProcess, max_tokens: int) -> None:
        super().__init__()
        self.num_chunks = 0
        self.finish_reason: str | None = None
        self._server = server
        self._max_tokens = max_tokens
        self._has_begun = threading.Event()
        self.start()
        assert self._has_begun.wait(20)

    def run(self) -> None:
        with contextlib.suppress(Exception), self._server.openai() as client:  # the server may go away
            stream = client.completions.create(
                model=MODEL, prompt="go on", max_tokens=self._max_tokens, stream=True, extra_body={"ignore_eos": True}
            )
            for chunk in stream:
                self.num_chunks += 1
                # The client's type says that it is never none; in a stream it is, until the last chunk.
                self.finish_reason = cast("str | None", chunk.choices[0].finish_reason)
                if self.finish_reason is not None:
                    break
                self._has_begun.set()


def chat(server: ServerProcess, text: str, **more: object) -> str:
    with server.openai() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, **more  # type: ignore[call-overload]
        )  # fmt: skip
    return str(answer.choices[0].message.content)


def test_a_chat_request_is_answered_and_every_block_is_accounted_for(server: ServerProcess) -> None:
    before = server.metrics()

    first = chat(server, "what is a block? " * 4, max_tokens=20, extra_body={"ignore_eos": True})
    second = chat(server, "what is a block? " * 4, max_tokens=20, extra_body={"ignore_eos": True})

    assert first == second
    after = server.metrics()

    def gained(name: str) -> float:
        return after[name] - before[name]

    assert gained('kvwatch_requests_finished_total{lora="",reason="length",tenant=""}') == 2
    assert gained("kvwatch_generated_tokens_total") == 40
    assert gained('kvwatch_prefix_cache_hit_tokens_total{tier="device"}') > 16
    allocated = sum(
        gained(f'kvwatch_kv_block_allocations_total{{reason="{r}",tier="device"}}') for r in ("prefill", "decode")
    )
    assert allocated > 4
    assert after["kvwatch_ledger_violations_total"] == 0
    assert after['kvwatch_kv_blocks{group="0",state="used",tier="device"}'] == 0
    cached = after['kvwatch_kv_blocks{group="0",state="cached",tier="device"}']
    empty = after['kvwatch_kv_blocks{group="",state="empty",tier="device"}']  # empty blocks belong to no group
    assert cached + empty == after['kvwatch_kv_block_capacity{tier="device"}'] == 199
    assert cached > 0


def test_the_page_of_a_server_with_default_settings_has_at_most_750_series(folder: Path, tmp_path: Path) -> None:
    """What is added to the engine's own metrics counts too: settings and their drift, listeners, the recorder."""
    with serve_process(folder, "--served-model-name", MODEL, "--flight-dir", str(tmp_path)) as server:
        chat(server, "what is a block?", max_tokens=2)
        page = server.metrics()

    come_later = {
        "kvwatch_kv_free_blocks_min",
        "kvwatch_kv_usage_ratio_max",
        "kvwatch_oldest_waiting_timestamp_seconds",
    }
    assert len(page) > 400
    assert len([series for series in page if series.partition("{")[0] not in come_later]) + len(come_later) <= 750


def test_the_api_port_shows_the_same_metrics_and_health(server: ServerProcess) -> None:
    root = server.api.removesuffix("/v1")
    assert httpx.get(f"{root}/health").status_code == 200
    assert httpx.get(f"{root}/ready").status_code == 200
    assert "kvwatch_kv_blocks{" in httpx.get(f"{root}/metrics").text
    listener = server.metrics_url.removesuffix("/metrics")
    assert httpx.get(f"{listener}/health").status_code == 200
    assert httpx.get(f"{listener}/v1/models").status_code == 404
    assert httpx.post(server.metrics_url).status_code == 405


def test_no_prompt_text_is_logged(server: ServerProcess) -> None:
    chat(server, "xyzzy-secret-words", max_tokens=3)
    line = server.wait_for("request", 60)

    assert line["request_id"]
    assert "xyzzy" not in str(server.lines)


def test_sigterm_lets_a_running_request_finish_and_refuses_new_ones(folder: Path) -> None:
    with serve_process(folder, "--served-model-name", MODEL, "--drain-seconds", "30") as server:
        request = LongRequest(server, max_tokens=1000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining", 60)

        root = server.api.removesuffix("/v1")
        refused = httpx.post(
            f"{server.api}/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "late"}]}
        )

        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(f"{root}/ready").status_code == 503
        assert httpx.get(f"{root}/health").status_code == 200
        request.join(30)
        assert request.num_chunks > 500
        assert request.finish_reason == "length"
        assert server.process.wait(15) == 0


def test_what_still_runs_after_the_grace_time_is_aborted(folder: Path) -> None:
    with serve_process(folder, "--served-model-name", MODEL, "--drain-seconds", "0.2") as server:
        request = LongRequest(server, max_tokens=7000)

        begin = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - begin < 10
        request.join(10)


def test_a_second_sigterm_exits_at_once(folder: Path) -> None:
    with serve_process(folder, "--served-model-name", MODEL, "--drain-seconds", "60") as server:
        request = LongRequest(server, max_tokens=7000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining", 60)

        server.process.send_signal(signal.SIGTERM)

        assert server.process.wait(3) == 128 + signal.SIGTERM
        request.join(10)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--block-size", "0"], "--block-size"),
        (["--num-blocks", "5", "--kv-memory", "1GiB"], "give one of them"),
        (["--kv-memory", "lots"], "write for instance 4GiB"),
        (["--kv-memory", "900TiB"], "are free"),
        (["--watermark", "1.5"], "write for instance 0.02"),
        (["--max-model-len", "100000"], "that the model was made for"),
        (["--max-num-seqs", "64", "--max-batch-tokens", "8"], "raise one or lower the other"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--dtype", "float8"], "float32"),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_to_do(folder: Path, flags: list[str], words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "kvwatch",
        "serve",
        "--model",
        str(folder),
        "--port",
        "0",
        *NO_FURTHER_PORTS,
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-blocks", "5", "--kv-memory", "1GiB"],
        ["--max-num-seqs", "64", "--max-batch-tokens", "8"],
        ["--prompt-lookup-min", "8", "--prompt-lookup-max", "4"],
    ],
)
def test_whoever_contradicts_himself_does_not_wait_for_a_model(folder: Path, flags: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "kvwatch",
        "serve",
        "--model",
        str(folder),
        "--port",
        "0",
        *NO_FURTHER_PORTS,
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert flags[0] in done.stderr
    assert "loading" not in done.stderr


def test_a_taken_port_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        kv_events = ["--kv-events", f"tcp://127.0.0.1:{port}", "--kv-events-socket", "bind"]
        quiet = ["--port", "0", "--flight-dir", "off"]
        for flags in (["--port", port], ["--port", "0", "--metrics-listen", f"127.0.0.1:{port}"], quiet + kv_events):
            command = [sys.executable, "-m", "kvwatch", "serve", "--model", str(folder), *NO_FURTHER_PORTS, *flags]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 2
            assert port in done.stderr
            assert "Traceback" not in done.stderr
            assert "loading" not in done.stderr, "whoever mistyped a port does not wait for a model"


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvwatch", "serve", "--model", str(tmp_path / "nothing"), "--port", "0"]
    done = subprocess.run([*command, *NO_FURTHER_PORTS], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_does_not_wait_for_a_request_that_is_still_arriving(folder: Path) -> None:
    with serve_process(folder, "--served-model-name", MODEL, "--drain-seconds", "20") as server:
        host, port = server.api.removesuffix("/v1").removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as stalled:
            stalled.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            time.sleep(0.3)
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)

            assert b" 503 " in stalled.recv(4096).split(b"\r\n")[0]
            assert server.process.wait(15) == 0
            assert time.monotonic() - begin < 10
        assert "Traceback" not in str(server.drain_log())


def test_the_cache_folder_can_be_set_by_flag_and_by_environment(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "KVWATCH_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "kvwatch", "config", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    shown = [line.split() for line in done.stdout.splitlines()]
    assert ["cache_dir", str(tmp_path), "environment", "KVWATCH_CACHE_DIR"] in shown

    with serve_process(folder, "--cache-dir", str(tmp_path), "--served-model-name", MODEL) as server:
        assert chat(server, "hello", max_tokens=2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[" * 3000),
        ("config.json", '{"architectures": 5}'),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[1]"),
        ("generation_config.json", '{"temperature": NaN}'),
        ("generation_config.json", '{"top_k": Infinity}'),
        ("generation_config.json", '{"repetition_penalty": 0}'),
        ("model.safetensors", "not weights"),
    ],
)
def test_a_damaged_model_folder_is_one_line(folder: Path, tmp_path: Path, name: str, content: str) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / name).write_text(content)
    command = [sys.executable, "-m", "kvwatch", "serve", "--model", str(damaged), "--port", "0"]
    done = subprocess.run([*command, *NO_FURTHER_PORTS], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("kvwatch: ")


def test_refusals_are_counted_whoever_refuses(server: ServerProcess) -> None:
    before = server.metrics()
    bodies: list[dict[str, object]] = [
        {"prompt": "x", "temperature": 3},  # refused while parameters are read
        {"prompt": "x", "max_tokens": 9000},  # can never fit
        {"prompt": [1] * 9000},  # longer than the model allows
    ]
    for body in bodies:
        answer = httpx.post(f"{server.api}/completions", json={"model": MODEL, **body}, timeout=30)
        assert answer.status_code == 400, answer.text

    after = server.metrics()

    gained = {
        reason: after[name] - before[name]
        for reason in ("invalid", "too_long", "queue_full", "draining")
        for name in [f'kvwatch_requests_rejected_total{{reason="{reason}"}}']
    }
    assert gained == {"invalid": 1, "too_long": 2, "queue_full": 0, "draining": 0}
