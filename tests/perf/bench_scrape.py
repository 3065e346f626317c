"""What a storm of scrapes does to the time between tokens: 50 a second and none in turn, on the embedded model.

    python tests/perf/bench_scrape.py [--seconds 400]

The scrapers are a process of their own with ten connections, half of them asking for OpenMetrics. It has what the
engine leaves of the processor: scrapers live on other machines, and their own work is not what is measured. The
observatory is attached all the time; windows next to each other are paired, and of each pair the 99th percentiles of
the time between two tokens are compared. The interval comes from resampling pairs. Prints JSON; exits 1 when its upper
end misses the budget.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from paired import Estimate, pseudomedian

SCRAPES_PER_SECOND = 50
CONNECTIONS = 10
BATCH = 8
PROMPT_TOKENS = 64
STEPS_PER_WINDOW = 300
BUDGET_CHANGE = 0.10

Window = list[float]
"""Times between two tokens in seconds, one for each step."""


def scrape_on_demand(host: str, port: int) -> None:
    """Be the scrapers: standard input says `on` and `off`; after each `off` the number of answers is printed."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    connections = [http.client.HTTPConnection(host, port, timeout=10) for _ in range(CONNECTIONS)]
    is_on, count = threading.Event(), [0]

    def obey() -> None:
        for line in sys.stdin:
            if line.strip() == "on":
                count[0] = 0
                is_on.set()
            else:
                is_on.clear()
                sys.stdout.write(f"{count[0]}\n")
                sys.stdout.flush()
        os._exit(0)  # whoever started it is gone

    threading.Thread(target=obey, daemon=True).start()
    due = time.monotonic()
    number = 0
    while True:
        is_on.wait()
        due = max(due, time.monotonic() - 0.1) + 1 / SCRAPES_PER_SECOND
        number += 1
        chosen = number % CONNECTIONS
        accept = "application/openmetrics-text;version=1.0.0" if chosen % 2 else "text/plain"
        connections[chosen].request("GET", "/metrics", headers={"Accept": accept})
        answer = connections[chosen].getresponse()
        answer.read()
        count[0] += answer.status == 200
        time.sleep(max(0.0, due - time.monotonic()))


class Scrapers:
    """The process of the scrapers, seen from the engine's."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self.num_scrapes = 0
        self.seconds = 0.0

    @contextmanager
    def storming(self) -> Iterator[None]:
        """Scrape for as long as the block lasts."""
        self._tell("on")
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - started
            self._tell("off")
            self.num_scrapes += int(self._output.readline())

    def _tell(self, word: str) -> None:
        self._input.write(f"{word}\n")
        self._input.flush()


def p99(times: Sequence[float]) -> float:
    """Return the 99th percentile (nearest rank)."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]


def change(pairs: Sequence[tuple[Window, Window]]) -> Estimate:
    """Return by how much the p99 of a storm is larger: pair by pair, since the machine's speed drifts."""
    return pseudomedian([p99(on) / p99(off) - 1 for on, off in pairs])


def measure(seconds: float, num_steps: int) -> tuple[list[tuple[Window, Window]], Scrapers]:
    """Run pairs of windows for so long; return (storm, none) and the scrapers."""
    from embedded_engine import SteppedControl, load_embedded, make_core, random_prompts, submit

    from kvwatch.exporters.identity import EngineIdentity
    from kvwatch.observatory import Observatory
    from kvwatch.telemetry.log import EventLog

    log = EventLog()
    core = make_core(load_embedded(), log, max_num_seqs=BATCH, num_blocks=8192)
    control = SteppedControl(core)
    observatory = Observatory(log, control, EngineIdentity("bench"), metrics_listen="127.0.0.1:0")
    observatory.start()
    while not observatory.view.gauges:
        control.answer()
        time.sleep(0.01)

    def window() -> Window:
        times: Window = []
        last = time.perf_counter()
        for _ in range(num_steps):
            control.answer()
            core.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return times

    def refill(number: int) -> None:
        """Have every window begin with contexts of the same length."""
        for request_id in core.live_request_ids():
            core.abort(request_id)
        submit(core, random_prompts(BATCH, PROMPT_TOKENS, number), 4000, f"round{number}")
        while any(not request.first_token_ns for request in core.scheduler.lifecycle.requests()):
            core.step()

    assert observatory.metrics_address is not None
    host, port = observatory.metrics_address
    pairs: list[tuple[Window, Window]] = []
    command = [sys.executable, __file__, "--scrape", f"{host}:{port}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        scrapers = Scrapers(process)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or len(pairs) < 2:
            windows: dict[bool, Window] = {}
            for is_on in (True, False) if len(pairs) % 2 else (False, True):
                refill(2 * len(pairs) + len(windows))
                with scrapers.storming() if is_on else nullcontext():
                    windows[is_on] = window()
            pairs.append((windows[True], windows[False]))
        process.terminate()
    observatory.stop()
    return pairs, scrapers


def main() -> None:
    """Print the result as JSON; exit 1 when the upper end of the interval misses the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--steps", type=int, default=STEPS_PER_WINDOW, help="steps in one window")
    parser.add_argument("--scrape", metavar="HOST:PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.scrape:
        host, _, port = args.scrape.rpartition(":")
        scrape_on_demand(host, int(port))
        return
    pairs, scrapers = measure(args.seconds, args.steps)
    changed = change(pairs)
    rate = scrapers.num_scrapes / scrapers.seconds
    print(
        json.dumps(
            {
                "pairs": len(pairs),
                "steps_per_window": args.steps,
                "sequences": BATCH,
                "scrapes_per_second": round(rate, 1),
                "itl_p99_ms_storm": round(1e3 * p99([t for on, _ in pairs for t in on]), 3),
                "itl_p99_ms_none": round(1e3 * p99([t for _, off in pairs for t in off]), 3),
                "itl_p99_change": changed.rounded(4),
                "budget_change_upper95": BUDGET_CHANGE,
            }
        )
    )
    sys.exit(changed.high > BUDGET_CHANGE or rate < 0.9 * SCRAPES_PER_SECOND)


if __name__ == "__main__":
    main()
