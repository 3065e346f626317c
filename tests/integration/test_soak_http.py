"""Many requests over HTTP, whose clients hang up at every stage; at the end nothing is held."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, serve_process
from tiny_models import make_tiny_model

MODEL = "tiny"
WORDS = (
    *("block", "table", "slot", "token", "cache", "evict", "share", "copy"),
    *("queue", "step", "prefill", "decode", "hash", "tail", "head"),
)
CONCURRENCY = 48


class Soak:
    """Clients that behave at random."""

    def __init__(self, api: str, seed: int) -> None:
        self.api = api
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def run(self, num_requests: int) -> None:
        semaphore = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=CONCURRENCY)) as client:

            async def one() -> None:
                async with semaphore:
                    self.outcomes[await self.request(client)] += 1

            await asyncio.gather(*(one() for _ in range(num_requests)))

    def body(self) -> dict[str, object]:
        rng = self.random
        # A third of the prompts begin alike, so that blocks are shared and evicted while clients hang up.
        start = " ".join(WORDS) if rng.random() < 0.33 else ""
        prompt = start + " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        return {
            "model": MODEL, "prompt": prompt, "max_tokens": rng.randint(1, 40), "n": rng.choice([1, 1, 1, 3]),
            "temperature": rng.choice([0, 1]), "ignore_eos": rng.random() < 0.5,
        }  # fmt: skip

    async def request(self, client: httpx.AsyncClient) -> str:
        kind = self.random.choice(["plain", "plain", "stream", "leave at once", "leave soon", "leave in stream"])
        body = self.body()
        if kind in {"leave at once", "leave soon"}:
            seconds = self.random.uniform(0, 0.01) if kind == "leave at once" else self.random.uniform(0.01, 0.3)
            try:
                await asyncio.wait_for(client.post(f"{self.api}/completions", json=body), seconds)
            except TimeoutError:
                return "left"
            return "answered"
        if kind == "plain":
            answer = await client.post(f"{self.api}/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == body["n"]
            return "answered"
        return await self.stream(client, body, leave=kind == "leave in stream")

    async def stream(self, client: httpx.AsyncClient, body: dict[str, object], *, leave: bool) -> str:
        patience = self.random.randint(0, 10) if leave else 1_000_000
        async with client.stream("POST", f"{self.api}/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            finished = 0
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    assert finished == body["n"]
                    return "answered"
                if line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    finished += sum(1 for choice in chunk["choices"] if choice["finish_reason"])
                    patience -= 1
                if patience < 0:
                    return "left"
        raise AssertionError("the stream ended without [DONE]")


def soak(folder: Path, num_requests: int, seed: int) -> None:
    # A pool far too small for the load: preemption and eviction all the time.
    flags = ["--served-model-name", MODEL, "--num-blocks", "70", "--max-num-seqs", "16", "--max-batch-tokens", "128"]
    with serve_process(folder, *flags) as server:
        clients = Soak(server.api, seed)

        asyncio.run(clients.run(num_requests))

        assert clients.outcomes["left"] > num_requests / 10
        assert clients.outcomes["answered"] > num_requests / 4
        metrics = wait_until_idle(server)
        assert metrics['kvwatch_kv_blocks{group="0",state="used",tier="device"}'] == 0
        cached = metrics['kvwatch_kv_blocks{group="0",state="cached",tier="device"}']
        empty = metrics['kvwatch_kv_blocks{group="",state="empty",tier="device"}']
        assert cached + empty == metrics['kvwatch_kv_block_capacity{tier="device"}'] == 69
        assert metrics['kvwatch_kv_orphaned_blocks{tier="device"}'] == 0
        assert metrics["kvwatch_ledger_violations_total"] == 0
        assert metrics["kvwatch_step_errors_total"] == 0
        assert metrics['kvwatch_preemptions_total{mode="recompute",reason="blocks"}'] > 0
        assert metrics['kvwatch_kv_block_evictions_total{reason="pressure",tier="device"}'] > 0
        assert metrics['kvwatch_requests_finished_total{lora="",reason="abort",tenant=""}'] > 0
        assert server.terminate() == 0


def wait_until_idle(server: ServerProcess) -> dict[str, float]:
    """A client that hangs up frees its blocks within a second; scraping takes another."""
    for _ in range(3):
        metrics = server.metrics()
        if metrics['kvwatch_requests{state="running"}'] + metrics['kvwatch_requests{state="waiting"}'] == 0:
            break
    return metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.timeout(900)
def test_2000_requests_leave_nothing_behind(folder: Path) -> None:
    """vllm#27073, vllm-ascend#16662: usage stuck near 100 % after clients had gone."""
    soak(folder, 2000, seed=2)
