"""A run in which everything happens that dashboards show, on real servers under a real Prometheus.

Two engines of one model and a sidecar. The first engine has a small pool, tiers on host and disk, and a mixed load; its
settings are changed and its pool is enlarged meanwhile. The second has little to do, is configured apart, and is
started anew. The sidecar follows the second by its events, and reads the first as if that were a vLLM.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from admin_stage import TOKEN_FILE, TOKENS
from bench_runs import bench_process
from prometheus_stage import prometheus, wait_for
from server_process import ServerProcess, serve_process
from sidecar_process import sidecar_process

from kvwatch_dashboards.local.configuration import Timing
from kvwatch_dashboards.local.process import free_address
from kvwatch_dashboards.preview.reading import Span
from kvwatch_dashboards.prometheus_api import PrometheusApi

MODEL = "observed"
SCRAPE_SECONDS = 2.0
TENANTS = ("blue", "green")
_MIX = "short=4,long=1,early-stop=2,shared-prefix=3,distinct=2,parallel=2,cold=1,warm=1,pressure=6,hang-up=1"
"""The bench's mixed load with more of what fills the pool: preemptions are to be seen."""
_TOPIC = "kv-events"
_READY_SECONDS = 400.0
"""The first start compiles kernels."""
_WINDOW_SECONDS = 62.0
"""Extremes are known once the engine has been up for their window."""


@dataclass(frozen=True)
class Sizes:
    """How large a run is."""

    num_blocks: int
    """Of the first engine; the second has as many."""
    limit_tokens: int
    """Of the longest request."""
    num_requests: int
    """Of each of the three loads on the first engine, one after the other."""
    host_memory: str
    disk_bytes: str


SMALL = Sizes(num_blocks=60, limit_tokens=600, num_requests=100, host_memory="1MiB", disk_bytes="2MiB")
"""For a tiny model: two minutes."""
EMBEDDED = Sizes(num_blocks=100, limit_tokens=480, num_requests=36, host_memory="64MiB", disk_bytes="128MiB")
"""For the embedded model on a few cores: some minutes."""


@dataclass(frozen=True)
class _Plan:
    """Flags of the engines, and what the sidecar watches."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    of_second: str
    """The second engine's stream, as a sidecar names it."""
    kv_events: str
    """Options of the sidecar for the first engine's KV events."""


def _plan(folder: Path, sizes: Sizes) -> _Plan:
    tokens, disk = folder / "tokens", folder / "disk"
    tokens.write_text(TOKEN_FILE, encoding="utf-8")
    (disk / "incoming").mkdir(parents=True)
    (disk / "incoming" / "notes.txt").write_text("a file that something else left here", encoding="utf-8")
    live, replay, grpc, metrics = (free_address() for _ in range(4))
    common = ("--served-model-name", MODEL, "--num-blocks", str(sizes.num_blocks), "--admin-token-file", str(tokens))
    first = (
        "--engine-name", "first", *common, "--preemption-mode", "recompute", "--watermark", "0",
        "--max-queued-requests", "10",
        "--host-memory", sizes.host_memory, "--disk-dir", str(disk), "--disk-bytes", sizes.disk_bytes,
        "--kv-events", f"tcp://{live}", "--kv-events-socket", "bind", "--kv-events-replay", f"tcp://{replay}",
        "--kv-events-topic", _TOPIC, "--metrics-tenants", ",".join(TENANTS), "--vllm-aliases",
    )  # fmt: skip
    second = (
        "--engine-name", "second", *common, "--max-num-seqs", "32", "--grpc-listen", grpc, "--metrics-listen", metrics,
    )  # fmt: skip
    options = f"kv_events=tcp://{live}&replay=tcp://{replay}&topic={_TOPIC}"
    return _Plan(first, second, f"second-from-outside=grpc://{grpc}", options)


@contextlib.contextmanager
def observed_run(folder: Path, model: Path | str, sizes: Sizes) -> Iterator[tuple[PrometheusApi, Span]]:
    """Let everything happen; yields the Prometheus that saw it and the time in which it did. Load goes on meanwhile."""
    plan = _plan(folder, sizes)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serve_process(model, *plan.first, ready_seconds=_READY_SECONDS))
        second = stack.enter_context(contextlib.ExitStack())
        engine = second.enter_context(serve_process(model, *plan.second, ready_seconds=_READY_SECONDS))
        as_vllm = f"as-vllm=vllm+{first.api.removesuffix('/v1')}?{plan.kv_events}"
        sidecar = stack.enter_context(sidecar_process(plan.of_second, as_vllm))
        jobs = {"kvwatch": [first.metrics_url, engine.metrics_url], "kvwatch-sidecar": [sidecar.metrics_url]}
        timing = Timing(scrape=f"{SCRAPE_SECONDS:g}s")
        api = stack.enter_context(prometheus(folder, jobs, timing=timing))
        start = _now(api)
        with _callers(first, engine):
            _loads(first, sizes)
        engine.terminate(60)
        second.close()
        engine = second.enter_context(serve_process(model, *plan.second, ready_seconds=_READY_SECONDS))
        scraped = [urlsplit(each.metrics_url).netloc for each in (first, engine, sidecar)]
        wait_for(lambda: api.is_scraped(scraped), 60)
        with _callers(first, engine), _load_until_the_end(first, sizes):
            _wait_until(api, max(_now(api) + 40, start + _WINDOW_SECONDS + 60))
            yield api, Span(start, _now(api), SCRAPE_SECONDS)


def _loads(server: ServerProcess, sizes: Sizes) -> None:
    """Put three loads on an engine, and change it between them as people do."""
    words = ("--url", server.api, "--num-requests", str(sizes.num_requests), "--concurrency", "14")
    for seed, changes in enumerate((_prefer_swap, _enlarge, None)):
        process = bench_process(
            *words, "--scenario", _MIX, "--limit-tokens", str(sizes.limit_tokens), "--seed", str(seed), "--json"
        )
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err + out
        if changes is not None:
            changes(server)


@contextlib.contextmanager
def _load_until_the_end(server: ServerProcess, sizes: Sizes) -> Iterator[None]:
    """Keep an engine busy while somebody looks: tables show what is now."""
    words = ("--url", server.api, "--limit-tokens", str(sizes.limit_tokens), "--num-requests", "100000")
    process = bench_process(*words, "--concurrency", "14", "--seed", "99", "--no-reset", "--json")
    try:
        yield
    finally:
        process.kill()
        process.communicate(timeout=60)


def _prefer_swap(server: ServerProcess) -> None:
    with _admin(server) as client:
        _change(client, {"preemption_mode": "swap", "watermark": "0.05"})
        client.post("/pins", json={"reason": "asked for all day", "text": _prefix("blue")}).raise_for_status()
    with _admin(server, "wrong token, as a script has it that nobody updated") as client:
        for _ in range(5):
            client.post("/prefix-cache/reset", json={"reason": "no"})


def _enlarge(server: ServerProcess) -> None:
    with _admin(server) as client:
        (tier,) = [each for each in client.get("/pool").json()["tiers"] if each["tier"] == "device"]
        for pin in client.get("/pins").json()["pins"]:
            client.post(f"/pins/{pin['pin']}/unpin", json={"reason": "over"}).raise_for_status()
        _change(client, {"num_blocks": tier["capacity"] * 5 // 4})


def _admin(server: ServerProcess, token: str = TOKENS["operate"]) -> httpx.Client:
    ready = next(line for line in server.lines if line.get("event") == "ready")
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=str(ready["admin"]), headers=headers, timeout=120, trust_env=False)


def _change(client: httpx.Client, changes: dict[str, object]) -> None:
    tag = client.get("/config").headers["etag"]
    body = {"changes": changes, "reason": "the pictures are to show it"}
    client.patch("/config", json=body, headers={"If-Match": tag}).raise_for_status()


@contextlib.contextmanager
def _callers(*servers: ServerProcess) -> Iterator[None]:
    """Let two tenants ask each server now and then."""
    stop = threading.Event()
    threads = [threading.Thread(target=_ask, args=(server, who, stop)) for server in servers for who in TENANTS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def _prefix(tenant: str) -> str:
    return f"You work for the department called {tenant}. Answer in short sentences, and say what you do not know. " * 4


def _ask(server: ServerProcess, tenant: str, stop: threading.Event) -> None:
    choices = random.Random(tenant)
    headers = {"x-kvwatch-tenant": tenant}
    with httpx.Client(base_url=server.api, headers=headers, timeout=120, trust_env=False) as client:
        while not stop.wait(choices.uniform(0.2, 1.5)):
            body = {"model": MODEL, "prompt": _prefix(tenant) + str(choices.random()), "max_tokens": 16}
            with contextlib.suppress(httpx.HTTPError):  # refused when the queue is full: that is to be seen too
                client.post("/completions", json=body)


def _now(api: PrometheusApi) -> float:
    (answer,) = api.instant("vector(time())")
    return answer.points[0][1]


def _wait_until(api: PrometheusApi, moment: float) -> None:
    wait_for(lambda: _now(api) >= moment, 300)
