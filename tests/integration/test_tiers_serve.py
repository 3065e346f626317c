"""`kvwatch serve` with a host and a disk tier, as its users run it: prefixes outlive their place and their process."""

from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, serve_process
from tiny_models import make_tiny_model

PROMPTS = [[(number * 7 + place) % 50 + 1 for place in range(90)] for number in range(6)]
SMALL = (
    *("--served-model-name", "tiny", "--num-blocks", "16", "--block-size", "8", "--max-model-len", "112"),
    *("--max-num-seqs", "4", "--dtype", "float32", "--watermark", "0"),
)
HIT = 'kvwatch_prefix_cache_hit_tokens_total{{tier="{}"}}'


def answers(server: ServerProcess) -> list[str]:
    """Ask for every prompt, one after the other: each evicts most of the one before."""
    texts = []
    for prompt in PROMPTS:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{server.api}/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        texts.append(str(reply.json()["choices"][0]["text"]))
    return texts


def used(metrics: dict[str, float], tier: str) -> float:
    return metrics[f'kvwatch_kv_blocks{{group="0",state="used",tier="{tier}"}}']


@pytest.mark.timeout(300)
def test_prefixes_come_back_from_the_host_and_after_a_restart_from_the_disk(tmp_path: Path) -> None:
    folder, disk = make_tiny_model("llama", tmp_path / "model"), tmp_path / "disk"
    other = make_tiny_model("llama", tmp_path / "other", seed=1)
    tiers = ("--host-memory", "16MiB", "--disk-dir", str(disk), "--disk-bytes", "64MiB")

    with serve_process(folder, *SMALL, *tiers) as server:
        expected = answers(server)
        before = server.metrics()
        assert answers(server) == expected
        after = server.metrics()
        assert after[HIT.format("host")] - before[HIT.format("host")] >= 5 * 80
        assert after['kvwatch_swap_blocks_total{direction="restore"}'] >= 50
        assert after["kvwatch_ledger_violations_total"] == 0
        assert (used(after, "device"), used(after, "host"), used(after, "disk")) == (0, 0, 0)
        assert after['kvwatch_kv_blocks_in_transfer{tier="device"}'] == 0
        assert server.terminate() == 0

    with serve_process(folder, *SMALL, "--disk-dir", str(disk), "--disk-bytes", "64MiB") as server:
        assert answers(server) == expected
        metrics = server.metrics()
        assert metrics[HIT.format("disk")] >= 6 * 80
        assert metrics["kvwatch_ledger_violations_total"] == 0
        assert server.terminate() == 0

    with serve_process(other, *SMALL, "--disk-dir", str(disk), "--disk-bytes", "64MiB") as server:
        assert answers(server) != expected
        assert server.metrics()[HIT.format("disk")] == 0
