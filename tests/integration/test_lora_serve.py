"""`kvwatch serve` with LoRA adapters, from the command line to the metrics."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from bench_runs import bench
from lora_adapters import make_adapter
from server_process import NO_FURTHER_PORTS, ServerProcess, serve_process
from tiny_models import make_tiny_model

MODEL = "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        make_adapter(folder, root / name, seed=seed)
    return root


@pytest.fixture(scope="module")
def server(folder: Path, adapters: Path) -> Iterator[ServerProcess]:
    flags = [
        "--served-model-name", MODEL, "--num-blocks", "200", "--dtype", "float32", "--lora-dir", str(adapters),
        "--lora", f"a={adapters / 'a'}", "--lora", f"b={adapters / 'b'}", "--metrics-loras", "gold",
    ]  # fmt: skip
    with serve_process(folder, *flags) as running:
        yield running


def complete(server: ServerProcess, model: str) -> str:
    with server.openai() as client:
        answer = client.completions.create(
            model=model, prompt="what is a block?", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
    return str(answer.choices[0].text)


def test_adapters_of_the_command_line_have_series_of_their_own_and_loaded_ones_are_others(
    server: ServerProcess,
) -> None:
    before = server.metrics()
    loaded = httpx.post(f"{server.api}/load_lora_adapter", json={"lora_name": "c", "lora_path": "c"}, timeout=60)
    assert loaded.status_code == 200

    texts = {name: complete(server, name) for name in (MODEL, "a", "b", "c")}

    after = server.metrics()
    gained = {
        lora: after[f'kvwatch_requests_finished_total{{lora="{lora}",reason="length",tenant=""}}']
        - before.get(f'kvwatch_requests_finished_total{{lora="{lora}",reason="length",tenant=""}}', 0)
        for lora in ("", "a", "b", "other", "gold")
    }
    assert gained == {"": 1, "a": 1, "b": 1, "other": 1, "gold": 0}
    assert len(set(texts.values())) == 4
    assert after["kvwatch_ledger_violations_total"] == 0
    assert str(server.wait_for("adapter loaded")["adapter"]) in "abc"


COME_LATER = {
    "kvwatch_kv_free_blocks_min", "kvwatch_kv_usage_ratio_max", "kvwatch_oldest_waiting_timestamp_seconds",
}  # fmt: skip
"""Series of a page that are there after a minute, or while somebody waits."""


def test_fifty_adapters_and_a_thousand_tenants_add_no_series_to_the_page_of_a_server(
    folder: Path, adapters: Path, tmp_path: Path
) -> None:
    """llm-d-batch-gateway#202, vllm#11117 (O70): every tenant and adapter made series of its own."""
    flags = ["--served-model-name", MODEL, "--lora-dir", str(adapters), "--max-loras", "50"]
    with serve_process(folder, *flags, "--flight-dir", str(tmp_path)) as server, httpx.Client(timeout=120) as client:
        for number in range(50):
            body = {"lora_name": f"adapter-{number}", "lora_path": "abc"[number % 3]}
            assert client.post(f"{server.api}/load_lora_adapter", json=body).status_code == 200

        def ask(number: int) -> int:
            body = {"model": f"adapter-{number % 50}", "prompt": "a", "max_tokens": 1, "ignore_eos": True}
            headers = {"x-kvwatch-tenant": f"tenant-{number}"}
            return client.post(f"{server.api}/completions", json=body, headers=headers).status_code

        def page() -> dict[str, float]:
            return {name: n for name, n in server.metrics().items() if name.partition("{")[0] not in COME_LATER}

        assert ask(1000) == 200
        before = page()
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(1000))) == {200}
        after = page()

    assert after.keys() == before.keys()
    assert 400 < len(after) <= 750 - len(COME_LATER)
    finished = {name: n for name, n in after.items() if name.startswith("kvwatch_requests_finished_total") and n}
    assert finished == {'kvwatch_requests_finished_total{lora="other",reason="length",tenant="other"}': 1001}


def test_the_load_generator_finds_no_text_of_one_adapter_in_the_answers_of_another(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = bench(
        capsys, "--url", server.api, "--scenario", "isolation", "--num-requests", "40", "--concurrency", "8",
        "--seed", "3", "--assert", "errors==0", "--assert", "isolation_mismatches==0",
    )  # fmt: skip

    assert status == 0, report["assertions"]
    assert {"model a", "model b"} <= {str(each) for each in report["isolation"]["variations"]}
    assert report["isolation"]["compared"] == 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tiers_bring_back_each_adapters_own_prefixes_and_no_older_adapters_of_its_name(
    folder: Path, adapters: Path, tmp_path: Path
) -> None:
    """The disk outlives the process, and the name `mine` may mean another adapter then."""
    prompts = [[(number * 7 + place) % 50 + 1 for place in range(90)] for number in range(3)]
    tiers = ["--host-memory", "16MiB", "--disk-dir", str(tmp_path / "disk"), "--disk-bytes", "64MiB"]
    small = [
        "--served-model-name", MODEL, "--num-blocks", "16", "--block-size", "8", "--max-model-len", "112",
        "--max-num-seqs", "4", "--dtype", "float32", "--watermark", "0",
    ]  # fmt: skip

    def answers(server: ServerProcess, model: str) -> list[str]:
        with server.openai() as client:
            return [
                client.completions.create(
                    model=model, prompt=prompt, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
                ).choices[0].text
                for prompt in prompts
            ]  # fmt: skip

    def hits(server: ServerProcess, tier: str) -> float:
        return server.metrics()[f'kvwatch_prefix_cache_hit_tokens_total{{tier="{tier}"}}']

    with serve_process(folder, *small, *tiers, "--lora", f"mine={adapters / 'a'}") as server:
        mine, base = answers(server, "mine"), answers(server, MODEL)
        before = hits(server, "host")
        assert (answers(server, "mine"), answers(server, MODEL)) == (mine, base)
        assert hits(server, "host") - before >= 4 * 80
        assert server.terminate() == 0

    with serve_process(folder, *small, *tiers, "--lora", f"mine={adapters / 'b'}") as server:
        assert answers(server, "mine") != mine
        assert (hits(server, "disk"), hits(server, "host")) == (0, 0)
        assert answers(server, MODEL) == base
        assert hits(server, "disk") + hits(server, "host") >= 2 * 80


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--lora", "a"], "--lora 'a' is not NAME=DIR"),
        (["--lora", "=x"], "is no name for an adapter"),
        (["--lora", "a="], "is not NAME=DIR"),
        (["--lora", "a/../../x y={a}"], "is no name for an adapter"),
        (["--lora", "a={a}", "--lora", "a={b}"], "'a' is given twice"),
        (["--lora", "a={a}/nowhere"], "is no folder"),
        (["--lora", "a={a}", "--lora", "b={b}", "--max-loras", "1"], "2 adapters, but --max-loras is 1"),
        (["--lora-dir", "{a}/nowhere"], "--lora-dir"),
        (["--lora", "a={a}", "--max-lora-rank", "4"], "its rank is 8, but the limit is 4; raise --max-lora-rank"),
        (["--lora", "tiny={a}"], "'tiny' is the name of a --lora as well; choose another"),
    ],
    ids=repr,
)
def test_what_is_wrong_at_start_is_said_in_one_line(
    folder: Path, adapters: Path, flags: list[str], reason: str
) -> None:
    named = [flag.format(a=adapters / "a", b=adapters / "b") for flag in flags]
    command = [
        sys.executable, "-m", "kvwatch", "serve", "--model", str(folder), "--served-model-name", MODEL, "--port", "0",
        *NO_FURTHER_PORTS, "--flight-dir", "off", "--num-blocks", "20", *named,
    ]  # fmt: skip

    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert ended.returncode != 0
    assert reason in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
