"""A sidecar beside a real vLLM: under load, through a crash, and through a network that loses batches."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import msgspec
import pytest
import zmq
from lossy_proxy import LossyProxy
from sidecar_stage import SidecarStage, of_engine, sidecar_stage, wait_until
from vllm_server import BLOCK_SIZE, PYTHON, VLLM, running_vllm

from kvwatch.telemetry.events import BlocksStored
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.sources import default_cache_dir

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with vLLM: run `make test-vllm`"
    ),
]
RANK = (("dp_rank", "0"),)
RECOVERY_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
"""For what a busy machine does slowly."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    load_model("embedded")  # converts it to a folder in the format that vLLM reads, once
    (model, *_) = sorted(path.parent for path in (default_cache_dir() / "models").glob("SmolLM2*/config.json"))
    with running_vllm(model, tmp_path_factory.mktemp("vllm") / "log") as running:
        yield running


class Load:
    """Prompts that share prefixes, and prompts that do not; long and short; clients that hang up."""

    def __init__(self, server: VLLM, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._stop = threading.Event()
        shared = self._random.sample(range(1000, 40_000), 8)
        self._prefixes = [[first + i for i in range(64 * (1 + n % 4))] for n, first in enumerate(shared)]
        self.num_answers = 0

    def prompt(self, rng: random.Random) -> list[int]:
        tail = [rng.randrange(1000, 40_000) for _ in range(rng.randrange(1, 200))]
        return [*rng.choice(self._prefixes), *tail] if rng.random() < 0.6 else tail

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            try:
                self._server.complete(self.prompt(rng), rng.randrange(1, 48), timeout=1 if rng.random() < 0.1 else 60)
                self.num_answers += 1
            except httpx.HTTPError:
                time.sleep(0.05)  # hung up, or the server is gone

    @contextmanager
    def running(self, num_clients: int = 12) -> Iterator["Load"]:
        with ThreadPoolExecutor(num_clients) as pool:
            for number in range(num_clients):
                pool.submit(self._client, number)
            try:
                yield self
            finally:
                self._stop.set()


def settled(stage: SidecarStage, engine: str = "a") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the engine's series when they have stopped moving."""
    last = of_engine(stage.page(), engine)
    while True:
        time.sleep(2)
        now = of_engine(stage.page(), engine)
        moving = {"kvwatch_telemetry_cpu_seconds_total"}
        if {k: v for k, v in now.items() if k[0] not in moving} == {
            k: v for k, v in last.items() if k[0] not in moving
        }:
            return now
        last = now


def load_for(seconds: float, is_enough: Callable[[], bool]) -> None:
    """Let the load run for so long, and on until it was enough."""
    began = time.monotonic()
    while time.monotonic() < began + seconds or not is_enough():
        assert time.monotonic() < began + seconds + PATIENCE_SECONDS, "the load does too little"
        time.sleep(1)


class FirstBatch:
    """Another reader of the engine's events, which only knows when the first batch came. A context manager."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> "FirstBatch":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def wait(self) -> float:
        """Return when it came."""
        assert self._socket.poll(int(PATIENCE_SECONDS * 1000))
        return time.monotonic()


def decode_errors(series: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> float:
    return sum(value for (name, _), value in series.items() if name == "kvwatch_source_decode_errors_total")


def indexed(series: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> float:
    return sum(value for (name, _), value in series.items() if name == "kvwatch_kv_indexed_blocks")


class Residents:
    """What is resident, by an own simple reading of the batches: hash -> copies."""

    def __init__(self) -> None:
        self.copies: Counter[object] = Counter()
        self.num_unknown_removals = 0

    def apply(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                self.copies.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    if self.copies[block_hash]:
                        self.copies[block_hash] -= 1
                    else:
                        self.num_unknown_removals += 1
            else:
                self.copies.clear()

    @property
    def num_hashes(self) -> int:
        return sum(count > 0 for count in self.copies.values())

    @classmethod
    def of(cls, payloads: Sequence[bytes]) -> "Residents":
        """Return what is resident after these batches."""
        residents = cls()
        for payload in payloads:
            residents.apply(payload)
        return residents


def seen(proxy: LossyProxy) -> Residents:
    """Return what can be known of what has passed."""
    return Residents.of([payload for _, payload in list(proxy.passed)])


def test_a_minute_of_load_with_a_crash_in_the_middle_then_probes(server: VLLM) -> None:
    with sidecar_stage(f"a=vllm+{server.url}?token_ids=true") as stage:
        stage.wait_until_watched(1, PATIENCE_SECONDS)
        stage.wait_for("kvwatch_source_up", 1, "a", PATIENCE_SECONDS)
        with Load(server, 1).running() as load, ThreadPoolExecutor(1) as pool:
            load_for(30, lambda: load.num_answers > 20)
            answered = load.num_answers
            server.kill()
            stage.wait_for("kvwatch_source_up", 0, "a")
            with FirstBatch(server.events_port) as reader:
                first_batch = pool.submit(reader.wait)
                server.start()
                ready = max(time.monotonic(), first_batch.result())  # before it there is nothing to be seen
            wait_until(
                stage.page,
                lambda page: (
                    (own := of_engine(page, "a")).get(("kvwatch_source_up", RANK)) == 1
                    and own.get(("kvwatch_source_complete", RANK)) == 1
                    and own.get(("kvwatch_source_resets_total", RANK)) == 1
                    and indexed(own) > 0
                ),
                PATIENCE_SECONDS,
            )
            recovery_seconds = time.monotonic() - ready
            print(f"recovered {recovery_seconds:.1f} s after the engine was ready and published again")
            load_for(30, lambda: load.num_answers > answered + 20)
        own = settled(stage)
        assert recovery_seconds <= RECOVERY_SECONDS
        assert decode_errors(own) == 0
        assert own["kvwatch_source_drift_blocks", RANK] == 0
        assert own["kvwatch_source_complete", RANK] == 1
        assert 0 < indexed(own) <= 55
        _probe(stage, server)


def _probe(stage: SidecarStage, server: VLLM) -> None:
    """Ask 50 prompts; each must hit as many tokens as the mirror says before, by the engine's own counter."""
    (watch,) = stage.sidecar.fleet.watches
    cursor = watch.log.subscribe("probe")
    cursor.position = max(0, watch.log.head - watch.log.capacity)
    known: dict[tuple[bytes | None, tuple[int, ...]], bytes] = {}
    load, rng = Load(server, 1), random.Random(99)
    num_predicted = 0
    for _ in range(50):
        prompt = load.prompt(rng)
        _learn(cursor.read(1 << 20), known)
        resident = {content for index in watch.control.snapshot().indexed for content in index.hashes}
        predicted = BLOCK_SIZE * _num_hits(prompt, known, resident)
        before = server.counter("vllm:prefix_cache_hits_total")
        server.complete(prompt, 2)
        assert server.counter("vllm:prefix_cache_hits_total") - before == predicted
        num_predicted += predicted
        _wait_until_quiet(watch.log)  # the batch of this prompt's blocks is on its way
    assert num_predicted > 0
    print(f"{num_predicted} hit tokens of 50 prompts, as predicted")


def _wait_until_quiet(log: EventLog) -> None:
    head = -1
    while head != log.head:
        head = log.head
        time.sleep(0.4)


def _learn(events: Sequence[object], known: dict[tuple[bytes | None, tuple[int, ...]], bytes]) -> None:
    for event in events:
        if isinstance(event, BlocksStored) and event.token_ids is not None:
            parent = event.parent
            for content, tokens in zip(event.hashes, event.token_ids, strict=True):
                known[parent, tuple(tokens)] = content
                parent = content


def _num_hits(
    prompt: Sequence[int], known: dict[tuple[bytes | None, tuple[int, ...]], bytes], resident: set[bytes]
) -> int:
    parent: bytes | None = None
    for number in range((len(prompt) - 1) // BLOCK_SIZE):  # the last token is always computed
        tokens = tuple(prompt[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
        content = known.get((parent, tokens))
        if content is None or content not in resident:
            return number
        parent = content
    return (len(prompt) - 1) // BLOCK_SIZE


@pytest.mark.parametrize("has_replay", [False, True], ids=["without replay", "with replay"])
def test_lost_batches_make_exactly_the_gaps_and_the_drift_that_they_caused(server: VLLM, *, has_replay: bool) -> None:
    server.kill()  # a life that is known from its beginning
    server.start()
    proxy = LossyProxy(f"tcp://127.0.0.1:{server.events_port}", loss=0.01 if has_replay else 0.03, seed=5)
    replay = f"tcp://127.0.0.1:{server.replay_port}" if has_replay else "off"
    engine = f"a=vllm+{server.url}?kv_events={proxy.endpoint}&replay={replay}"
    with proxy.running(), sidecar_stage(engine) as stage:
        stage.wait_until_watched(1, PATIENCE_SECONDS)
        stage.wait_for("kvwatch_source_up", 1, "a", PATIENCE_SECONDS)
        time.sleep(1)
        with Load(server, 2).running():
            wait_until(
                stage.page,
                lambda page: of_engine(page, "a").get(("kvwatch_source_complete", RANK)) == 1,
                PATIENCE_SECONDS,
            )
            proxy.is_lossy.set()
            load_for(45, lambda: proxy.num_gaps > 0 and (has_replay or seen(proxy).num_unknown_removals > 0))
        own = settled(stage)
        truth = Residents.of([payload for _, payload in sorted([*proxy.passed, *proxy.lost])])
        print(f"{len(proxy.lost)} of {len(proxy.lost) + len(proxy.passed)} batches lost, {proxy.num_gaps} gaps")
        assert proxy.num_gaps >= 1
        assert own["kvwatch_source_gaps_total", RANK] == proxy.num_gaps
        assert decode_errors(own) == 0
        assert truth.num_unknown_removals == 0
        if has_replay:
            assert own["kvwatch_source_drift_blocks", RANK] == 0
            assert indexed(own) == truth.num_hashes
        else:
            assert own["kvwatch_source_drift_blocks", RANK] == seen(proxy).num_unknown_removals
            assert own["kvwatch_source_complete", RANK] == 0


def test_an_engine_that_connects_its_events_is_heard_without_more_ado(server: VLLM) -> None:
    server.kill()
    server.events_host = "127.0.0.1"
    try:
        server.start()
        with sidecar_stage(f"a=vllm+{server.url}") as stage:
            stage.wait_until_watched(1, PATIENCE_SECONDS)
            stage.wait_for("kvwatch_source_up", 1, "a", PATIENCE_SECONDS)
            for first in (1000, 2000):
                server.complete(range(first, first + 3 * BLOCK_SIZE + 1))
            page = wait_until(stage.page, lambda page: indexed(of_engine(page, "a")) == 6, PATIENCE_SECONDS)
            assert of_engine(page, "a")["kvwatch_source_complete", RANK] == 1
    finally:
        server.kill()
        server.events_host = "*"
        server.start()
