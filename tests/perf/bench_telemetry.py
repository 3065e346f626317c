"""What telemetry costs the embedded model: attached and detached in turn, every 50 steps, in one process. Prints JSON.

    python tests/perf/bench_telemetry.py [--seconds 120]

Attached means the whole observatory: collector, ledger, and a scraper that reads /metrics once a second over HTTP. 16
sequences decode all the time, so that every step does the same work; windows next to each other are paired.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from embedded_engine import load_embedded, make_core, random_prompts, submit
from paired import estimate, ratio

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.observatory import Observatory
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.core import EngineCore

STEPS_PER_WINDOW = 50
BATCH = 16
BUDGET_LOSS = 0.01


class InlineControl:
    """Answers the observatory for an engine that is stepped by this script's own thread.

    A snapshot is taken between two windows, when nothing else touches the engine.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:  # noqa: ARG002 - answered at once
        return self._core.snapshot()

    def is_alive(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return True


@contextmanager
def attached(log: EventLog, core: EngineCore) -> Iterator[None]:
    """Run the observatory and a scraper for as long as the window lasts."""
    observatory = Observatory(log, InlineControl(core), EngineIdentity("bench"), metrics_listen="127.0.0.1:0")
    observatory.start()
    deadline = time.monotonic() + 5
    while not observatory.view.gauges and time.monotonic() < deadline:
        time.sleep(0.01)
    done = threading.Event()
    host, port = observatory.metrics_address or ("", 0)

    def scrape() -> None:
        while not done.wait(1.0):
            httpx.get(f"http://{host}:{port}/metrics", timeout=5).raise_for_status()

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        yield
    finally:
        done.set()
        scraper.join()
        observatory.stop()


class Load:
    """Keeps `BATCH` sequences decoding."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.round = 0
        self.refill()

    def refill(self) -> None:
        """Begin a round: all sequences anew, prefilled, so that windows compare equal contexts."""
        self.core.manager.pool.clear_cache()
        for request_id in self.core.live_request_ids():
            self.core.abort(request_id)
        self.round += 1
        submit(self.core, random_prompts(BATCH, 64, self.round), 4000, f"round{self.round}")
        while any(not request.first_token_ns for request in self.core.scheduler.lifecycle.requests()):
            self.core.step()

    def window(self) -> float:
        """Run one window; return output tokens/s."""
        started = time.perf_counter()
        num_tokens = 0
        for _ in range(STEPS_PER_WINDOW):
            num_tokens += sum(len(output.token_ids) for output in self.core.step())
        return num_tokens / (time.perf_counter() - started)


def main() -> None:
    """Print the result as JSON; exit 1 when the upper end of the interval misses the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    seconds = parser.parse_args().seconds
    log = EventLog()
    core = make_core(load_embedded(), log, max_num_seqs=BATCH, num_blocks=8192)
    load = Load(core)
    load.window()
    on: list[float] = []
    off: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        load.refill()
        is_on_first = len(on) % 2 == 0  # a window later in a round has longer contexts: take turns
        for is_on in (is_on_first, not is_on_first):
            if is_on:
                with attached(log, core):
                    on.append(load.window())
            else:
                off.append(load.window())
    loss = estimate([1 - a / b for a, b in zip(on, off, strict=True)])
    print(
        json.dumps(
            {
                "windows": len(on),
                "steps_per_window": STEPS_PER_WINDOW,
                "on_output_tokens_per_second": estimate(on).rounded(1),
                "off_output_tokens_per_second": estimate(off).rounded(1),
                "ratio_on_off": ratio(on, off).rounded(4),
                "loss": loss.rounded(4),
                "budget_loss_upper95": BUDGET_LOSS,
            }
        )
    )
    sys.exit(loss.high > BUDGET_LOSS)


if __name__ == "__main__":
    main()
