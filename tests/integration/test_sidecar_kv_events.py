"""`kvwatch serve` publishes KV events as a vLLM does; a sidecar that takes it for one must count what it holds.

The sidecar publishes them again: a reader of the wire that knows nothing of either ends with the same hashes.
"""

import contextlib
import random
import time
from pathlib import Path

import httpx
import pytest
import zmq
from kv_event_reader import TOPIC, KVEventReader, fetch_replay
from server_process import ServerProcess, serve_process
from sidecar_process import sidecar_process
from sidecar_stage import Series, of_engine, parse_page
from tiny_models import make_tiny_model

from kvwatch.sockets import bind
from kvwatch.stream.client import TelemetryClient

MODEL = "tiny"


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(bind("127.0.0.1:0", "test")).getsockname()[1] for _ in range(number)]


def value(page: Series, name: str, **labels: str) -> float | None:
    return page.get((f"kvwatch_{name}", tuple(sorted((*labels.items(), ("dp_rank", "0"))))))


def shown(url: str, engine: str) -> Series:
    time.sleep(1.05)
    return of_engine(parse_page(httpx.get(url, timeout=10).text), engine)


def ask(server: ServerProcess, seed: int, number: int) -> None:
    choices = random.Random(seed)
    with httpx.Client(base_url=server.api, timeout=60) as client:
        for _ in range(number):
            prompt = "a shared beginning " * 3 + str(choices.random()) * choices.randint(1, 8)
            answer = client.post("/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 8})
            assert answer.status_code == 200


def fetched(address: str) -> KVEventReader:
    """Read everything that can be replayed."""
    reader = KVEventReader()
    with zmq.Context() as context:
        for seq, payload in fetch_replay(context, address, 0):
            reader.skip_to(seq if reader.num_batches == 0 else 0)
            reader.take(seq, payload)
    return reader


@pytest.mark.timeout(200)
def test_resident_blocks_are_counted_streamed_and_published_again(tmp_path: Path) -> None:
    live, replay, again, again_replay = free_ports(4)
    folder = make_tiny_model("llama", tmp_path, max_position_embeddings=8192)
    publish = (
        "--num-blocks", "60", "--kv-events", f"tcp://127.0.0.1:{live}", "--kv-events-socket", "bind",
        "--kv-events-replay", f"tcp://127.0.0.1:{replay}", "--kv-events-topic", TOPIC.decode(),
    )  # fmt: skip
    publish_again = (
        "--kv-events", f"tcp://127.0.0.1:{again}", "--kv-events-socket", "bind",
        "--kv-events-replay", f"tcp://127.0.0.1:{again_replay}", "--kv-events-topic", TOPIC.decode(),
    )  # fmt: skip
    with serve_process(folder, "--served-model-name", MODEL, *publish) as server:
        ask(server, 1, 5)  # before the sidecar is there: told by a replay
        api = server.api.removesuffix("/v1")
        options = f"kv_events=tcp://127.0.0.1:{live}&replay=tcp://127.0.0.1:{replay}&topic={TOPIC.decode()}"
        with sidecar_process(f"near=vllm+{api}?{options}", flags=publish_again) as sidecar:
            _wait_until_complete(sidecar)
            engine_before, mine_before = shown(server.metrics_url, "kvwatch"), shown(sidecar.metrics_url, "near")
            ask(server, 2, 40)
            time.sleep(1)
            engine, mine = shown(server.metrics_url, "kvwatch"), shown(sidecar.metrics_url, "near")

            cached = value(engine, "kv_blocks", tier="device", group="0", state="cached")
            assert value(engine, "kv_blocks", tier="device", group="0", state="used") == 0
            assert cached == value(mine, "kv_indexed_blocks", tier="device", group="0")
            stored, stored_here = (
                (value(after, "kv_block_stores_total", tier="device") or 0)
                - (value(before, "kv_block_stores_total", tier="device") or 0)
                for before, after in ((engine_before, engine), (mine_before, mine))
            )
            assert stored == stored_here > 60
            evicted = value(engine, "kv_block_evictions_total", tier="device", reason="pressure")
            evicted_here = value(mine, "kv_block_evictions_total", tier="device", reason="removed")
            evicted_before = value(engine_before, "kv_block_evictions_total", tier="device", reason="pressure")
            assert evicted is not None
            assert evicted - (evicted_before or 0) == evicted_here
            assert (evicted_here or 0) > 20
            assert value(mine, "source_drift_blocks") == 0
            assert not [key for key in mine if key[0] == "kvwatch_kv_blocks"]

            truth = fetched(f"tcp://127.0.0.1:{replay}").hashes
            assert fetched(f"tcp://127.0.0.1:{again_replay}").hashes == truth
            with TelemetryClient(str(sidecar.lines[-1]["grpc"])) as client:
                (state,) = client.snapshot().indexed
            assert {int.from_bytes(each, "big") for each in state.hashes} == truth
            assert len(truth) == cached


def _wait_until_complete(sidecar: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while value(shown(sidecar.metrics_url, "near"), "source_complete") != 1:
        assert time.monotonic() < deadline
