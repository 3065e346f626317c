"""What a gRPC subscriber that stops reading does to the engine: nothing, it should turn out. Prints JSON.

    python tests/perf/bench_stream_stall.py [--seconds 60]

The embedded model decodes 16 sequences on the engine's own thread. A subscriber reads for a minute, stops for a minute,
and reads for a minute again; its connection has small buffers and the log is short, so that it is overtaken and must be
healed. Compared are the output tokens of windows of two seconds while it stops with those of both other minutes, which
lets the machine's drift cancel, and the process's memory; in the end the subscriber's ledger must equal the engine.
"""

import argparse
import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from embedded_engine import load_embedded, random_prompts
from paired import estimate, ratio

sys.path.insert(0, str(Path(__file__).parents[1]))

from stream_stage import LedgerMirror

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.observatory import Observatory
from kvwatch.stream.access import StreamOptions
from kvwatch.stream.client import TelemetryClient
from kvwatch.stream.codec import StreamError
from kvwatch.stream.contract import SubscribeRequest
from kvwatch.stream.server import StreamServer
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import GenerationRequest, SequenceOutput
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.engine import Engine
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.model.runner import ModelRunner

BATCH = 16
WINDOW_SECONDS = 2.0
LOG_CAPACITY = 512
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
"""With both, a minute is far more than the log and all buffers of the connection hold."""
BUDGET_LOSS = 0.05
BUDGET_GROWTH_BYTES = 32 * 2**20


class Load:
    """An engine that always decodes `BATCH` sequences."""

    def __init__(self) -> None:
        model = load_embedded()
        settings = EngineSettings(
            num_blocks=512, max_model_len=model.info.max_position, max_num_seqs=BATCH, max_batch_tokens=256,
            weights_fingerprint=model.info.weights_fingerprint, eos_token_ids=model.info.eos_token_ids,
            vocab_size=model.info.vocab_size,
        )  # fmt: skip
        runner = ModelRunner(model, KVCache(model.cache_spec(settings.block_size), settings.num_blocks))
        runner.warm_up(settings.max_batch_tokens)
        self.num_tokens = 0
        self.num_requests = 0
        self.is_over = False
        self.log = EventLog(LOG_CAPACITY)
        self.engine = Engine(settings, runner, self.log, self._count)
        self.engine.start()
        for _ in range(BATCH):
            self._submit()

    def _count(self, outputs: Sequence[SequenceOutput]) -> None:
        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        for output in outputs:
            if output.finish_reason is not None and not self.is_over:
                self._submit()

    def _submit(self) -> None:
        self.num_requests += 1
        (prompt,) = random_prompts(1, 64, self.num_requests)
        sampling = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
        request = GenerationRequest(request_id=f"r{self.num_requests}", prompt_token_ids=prompt, sampling=sampling)
        self.engine.submit(request)

    def rest(self) -> None:
        """Submit nothing more and come to an end."""
        self.is_over = True
        while self.engine.num_live_requests:
            time.sleep(0.05)


def windows(load: Load, seconds: float) -> list[float]:
    """Return output tokens/s of each window."""
    found: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        begun, before = time.perf_counter(), load.num_tokens
        time.sleep(WINDOW_SECONDS)
        found.append((load.num_tokens - before) / (time.perf_counter() - begun))
    return found


class Subscriber:
    """Follows the stream with a ledger while it may."""

    def __init__(self, client: TelemetryClient) -> None:
        self.mirror = LedgerMirror()
        self._stream = client.subscribe(SubscribeRequest(from_snapshot=True))
        self._may_read = threading.Event()
        self._may_read.set()
        threading.Thread(target=self._follow, daemon=True).start()

    def stall(self) -> None:
        self._may_read.clear()

    def read_on(self) -> None:
        self._may_read.set()

    def wait_until_at(self, log: EventLog, seconds: float = 60) -> bool:
        """Wait until everything was read; return whether that came about."""
        deadline = time.monotonic() + seconds
        while self.mirror.ledger.next_seq != log.head and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.mirror.ledger.next_seq == log.head

    def _follow(self) -> None:
        with contextlib.suppress(StreamError):  # in the end the client is closed
            for item in self._stream:
                self.mirror.take(item)
                self._may_read.wait()


def main() -> None:
    """Print the result as JSON; exit 1 when something suffered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args().seconds
    load = Load()
    server = StreamServer(load.log, load.engine, StreamOptions(listen="127.0.0.1:0"))
    observatory = Observatory(load.log, load.engine, EngineIdentity("bench"), parts=[server])
    observatory.start()
    assert server.is_serving.wait(10)
    assert server.address is not None
    with TelemetryClient("{}:{}".format(*server.address), channel_options=SMALL_WINDOW) as client:
        subscriber = Subscriber(client)
        windows(load, 6)
        before = windows(load, seconds)
        gc.collect()
        resident = psutil.Process().memory_info().rss
        subscriber.stall()
        stalled = windows(load, seconds)
        growth = psutil.Process().memory_info().rss - resident
        subscriber.read_on()
        after = windows(load, seconds)
        load.rest()
        is_exact = subscriber.wait_until_at(load.log)
        differences = subscriber.mirror.ledger.differences(load.engine.snapshot())
    observatory.stop()
    load.engine.stop()
    reading = [(x + y) / 2 for x, y in zip(before, after, strict=False)]
    kept = ratio(stalled[: len(reading)], reading[: len(stalled)])
    result = {
        "stalled_seconds": seconds,
        "reading_output_tokens_per_second": estimate(reading).rounded(1),
        "stalled_output_tokens_per_second": estimate(stalled).rounded(1),
        "ratio_stalled_reading": kept.rounded(4),
        "budget_loss": BUDGET_LOSS,
        "memory_growth_bytes": growth,
        "budget_memory_growth_bytes": BUDGET_GROWTH_BYTES,
        "is_exact_after_healing": is_exact,
        "gaps": len(subscriber.mirror.gaps),
        "differences_after_healing": differences,
    }
    print(json.dumps(result))
    # A loss must be more than the machine's noise to count.
    is_slower = kept.high < 1 - BUDGET_LOSS
    was_overtaken = bool(subscriber.mirror.gaps)
    is_healed = is_exact and not differences
    sys.exit(is_slower or growth > BUDGET_GROWTH_BYTES or not was_overtaken or not is_healed)


if __name__ == "__main__":
    main()
