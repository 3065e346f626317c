"""`kvwatch bench` against a real vLLM: one command, nothing told but the address."""

import json
import os
import re
from pathlib import Path

import pytest
from bench_runs import bench_process
from tiny_models import embedded_model_folder
from vllm_server import PYTHON, running_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with vLLM: run `make test-vllm`"
    ),
]
NUM_REQUESTS = 60


def test_the_mixed_load_is_served_and_reported_with_vllms_own_numbers(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    with running_vllm(embedded_model_folder(), tmp_path / "log") as server:
        process = bench_process(
            "--url", server.url, "--scenario", "mixed", "--num-requests", str(NUM_REQUESTS), "--concurrency", "12",
            "--seed", "7", "--request-timeout", "1200", "--json", "--html", str(page), "--assert", "errors==0",
        )  # fmt: skip
        output, errors = process.communicate()
    assert process.returncode == 0, (output, errors)
    report = json.loads(output)
    print({key: report[key] for key in ("target", "requests", "throughput", "server", "reservation", "latency")})

    assert report["target"]["kind"] == "vllm"
    assert report["requests"]["ok"] + report["requests"]["hung_up"] == NUM_REQUESTS
    assert not report["target"]["is_limit_assumed"]
    seen = report["server"]
    for name in ("preemptions", "hit_ratio", "min_free_blocks", "used_blocks_after"):
        assert seen[name] is not None, name
    assert seen["used_blocks_after"] == 0
    assert seen["num_recomputed_tokens"] is None, "vLLM does not tell it"
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe|object)\b|\b(src|href|srcset)=|@import|url\(", text)
    assert text.count("<svg") >= 5
