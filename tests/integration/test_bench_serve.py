"""The load generator against `kvwatch serve`: what it reports is what happened."""

import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from bench_runs import bench, bench_process, run
from server_process import ServerProcess, serve_process
from tiny_models import make_tiny_model

from kvwatch.bench.assertions import assertable_names
from kvwatch.bench.report import Report
from kvwatch.bench.scenarios import SCENARIOS
from kvwatch.bench.values import report_values

MODEL = "tiny"
NUM_BLOCKS = 40
NUM_REQUESTS = 240
"""Enough for some seconds: who looks at the page once a second must meet a busy engine several times."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    flags = ("--served-model-name", MODEL, "--num-blocks", str(NUM_BLOCKS + 1), "--dtype", "float32")
    with serve_process(folder, *flags) as running:
        yield running


def counter(metrics: dict[str, float], name: str) -> float:
    return sum(value for series, value in metrics.items() if re.split(r"[{ ]", series)[0] == name)


def test_a_mixed_load_on_a_small_pool(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = server.metrics()
    words = ("--url", server.api, "--num-requests", str(NUM_REQUESTS), "--seed", "7")
    saved, page = tmp_path / "run.json", tmp_path / "report.html"

    status, crowded = bench(
        capsys, *words, "--concurrency", "12", "--save", str(saved), "--save-texts", "--html", str(page),
        "--assert", "errors==0", "--assert", "used_blocks_after==0", "--assert", "worst_wait_ratio<1000",
        "--assert", "isolation_mismatches==0", "--assert", "long.ttft_p50<60s",
    )  # fmt: skip
    after = server.metrics()

    assert status == 0, crowded["assertions"]
    assert all(each["is_met"] for each in crowded["assertions"])
    assert crowded["target"]["kind"] == "kvwatch"
    assert crowded["target"]["limit_tokens"] == NUM_BLOCKS * 16
    assert crowded["requests"]["ok"] + crowded["requests"]["hung_up"] == NUM_REQUESTS
    assert crowded["peak_concurrency"] == 12
    seen = crowded["server"]
    assert seen["preemptions"] == counter(after, "kvwatch_preemptions_total") - counter(
        before, "kvwatch_preemptions_total"
    )
    assert seen["preemptions"] > 0
    recomputed = "kvwatch_recomputed_tokens_total"
    assert seen["num_recomputed_tokens"] == counter(after, recomputed) - counter(before, recomputed)
    # Those of the preparation are in the server's counters too.
    gained = counter(after, "kvwatch_generated_tokens_total") - counter(before, "kvwatch_generated_tokens_total")
    assert 0 < crowded["throughput"]["output_tokens"] <= gained
    assert 0 < seen["hit_ratio"] < 1
    assert 0 <= seen["min_free_blocks"] <= NUM_BLOCKS  # sampled once a second: a short run may fall between two samples
    assert 0 < seen["waste_ratio"] < 1
    assert page.read_text().count("<svg") >= 5
    values = report_values(msgspec.convert(crowded, Report))
    assert set(assertable_names(SCENARIOS)) <= values.keys()
    unknown = {name for name in assertable_names([]) if values[name] is None}
    assert unknown == {"differing"}, "nothing was compared yet; everything else is known of a kvwatch"
    assert crowded["reservation"]["limit_waste_ratio"] > crowded["reservation"]["own_waste_ratio"] > 0

    # One at a time, the same requests get the same answers: no pressure, no difference.
    status, calm = bench(capsys, *words, "--concurrency", "1", "--compare", str(saved), "--assert", "differing==0")

    assert status == 0, calm["comparison"]
    assert calm["server"]["preemptions"] == 0
    num_comparable = sum(
        request["status"] == "ok" and request["temperature"] == 0
        for request in json.loads(saved.read_text())["requests"]
    )
    assert calm["comparison"]["compared"] == num_comparable > 50
    assert calm["comparison"]["not_comparable"] == NUM_REQUESTS - num_comparable


def test_what_it_asks_is_near_the_length_that_it_wants(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = bench(
        capsys, "--url", server.api, "--scenario", "long", "--num-requests", "6", "--concurrency", "2"
    )
    assert status == 0
    counts = report["scenarios"]["long"]
    total = counts["prompt_tokens"] + counts["output_tokens"]
    assert report["requests"]["ok"] == 6
    assert 0.7 * 640 < total / 6 < 0.95 * 640


def test_cold_prompts_hit_nothing_and_warm_ones_nearly_everything(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--url", server.api, "--num-requests", "5", "--concurrency", "1", "--seed", "99")
    for _ in range(2):  # also when the very same was asked before
        _, cold = bench(capsys, *words, "--scenario", "cold")
        assert cold["server"]["hit_ratio"] == 0
    # Four prompts of 192 tokens fit the pool together only if nothing else is kept.
    _, warm = bench(capsys, *words, "--scenario", "warm", "--limit-tokens", "320")
    assert warm["server"]["hit_ratio"] > 0.8


def test_shared_prefixes_hit_and_distinct_prompts_do_not(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--url", server.api, "--num-requests", "12", "--concurrency", "1", "--seed", "5", "--limit-tokens", "320")
    _, shared = bench(capsys, *words, "--scenario", "shared-prefix")
    _, distinct = bench(capsys, *words, "--scenario", "distinct")
    assert shared["server"]["hit_ratio"] > 0.3
    assert distinct["server"]["hit_ratio"] < 0.05


def test_an_assertion_that_does_not_hold_is_status_1(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--url", server.api, "--scenario", "short", "--num-requests", "4")
    status, report = bench(capsys, *words, "--assert", "ttft_p99<1ms", "--assert", "ok==4")
    assert status == 1
    assert [each["is_met"] for each in report["assertions"]] == [False, True]


def test_the_text_report_names_what_matters_and_no_bar_is_drawn_in_a_pipe(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--url", server.api, "--num-requests", "12", "--scenario", "short=2,hang-up=1"]) == 0
    printed = capsys.readouterr()
    for words in ("8 answered, 4 hung up", "first token", "between tokens", "end to end", "preemptions", "used after"):
        assert words in printed.out
    assert printed.err == ""


def test_chats_are_measured_like_completions(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--url", server.api, "--endpoint", "chat", "--scenario", "max-tokens,parallel", "--num-requests", "8")
    status, report = bench(capsys, *words)
    assert status == 0
    assert report["requests"]["ok"] == 8, report["errors"]
    assert report["latency"]["itl"]["count"] > 50


def test_poisson_arrivals_keep_their_rate(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--url", server.api, "--scenario", "short", "--num-requests", "30", "--rate", "15", "--seed", "1")
    status, report = bench(capsys, *words)
    assert status == 0
    assert report["load"]["arrival"] == "poisson"
    assert report["requests"]["ok"] == 30
    assert 0.8 < report["duration_seconds"] < 20


def test_a_trace_shares_prefixes_as_it_did(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    lines = [
        {"timestamp": 100 * place, "input_length": 1800, "output_length": 80, "hash_ids": [1, 2, 3, 10 + place]}
        for place in range(10)
    ]
    trace.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))

    words = ("--trace", str(trace), "--trace-scale", "0.2", "--trace-speed", "0.5", "--concurrency", "1")
    status, report = bench(capsys, "--url", server.api, *words)

    assert status == 0
    assert report["requests"]["ok"] == 10, report["errors"]
    assert report["load"]["num_cut"] == 0
    assert report["throughput"]["output_tokens"] == 160
    assert 1.8 <= report["duration_seconds"] < 30
    assert report["server"]["hit_ratio"] > 0.6  # 307 of 360 tokens, nine times of ten, in whole blocks


def test_a_target_that_is_killed_in_the_middle_leaves_a_report(folder: Path) -> None:
    with serve_process(folder, "--served-model-name", MODEL, "--num-blocks", "60") as server:
        process = bench_process(
            "--url", server.api, "--scenario", "pressure", "--num-requests", "400", "--concurrency", "4", "--json"
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while counter(server.metrics(), "kvwatch_requests_finished_total") < 20 and time.monotonic() < deadline:
            pass
        server.process.kill()
        out, err = process.communicate(timeout=60)
    report = json.loads(out)
    assert process.returncode == 0, err
    assert report["requests"]["ok"] >= 4
    assert report["requests"]["ok"] + report["requests"]["failed"] == 400
    assert set(report["errors"]) <= {"truncated", "refused", "connection"}
    assert report["errors"]["refused"]["count"] > 0
    assert report["server"]["preemptions"] is None
    assert report["server"]["num_failed_readings"] > 0


@pytest.mark.model
def test_the_embedded_model_in_one_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    with serve_process("embedded", "--num-blocks", "120") as server:
        words = ("--scenario", "mixed", "--num-requests", "12", "--concurrency", "6", "--limit-tokens", "256")
        status, report = bench(capsys, "--url", server.api, *words, "--html", str(page))
    assert status == 0
    assert report["requests"]["failed"] == 0
    assert report["target"]["tokens_per_word"] < 1.1  # common words are one token each in real vocabularies
    assert page.stat().st_size > 20_000
