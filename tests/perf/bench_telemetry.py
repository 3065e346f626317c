"""What telemetry costs the embedded model: attached and detached in turn, every 100 steps, in one process. Prints JSON.

    python tests/perf/bench_telemetry.py [--seconds 600]

Attached means everything: collector, ledger, recorder, flight recorder, spans and metrics to a collector over OTLP, a
reader of the gRPC stream and a scraper once a second; those who receive are another process. 16 sequences decode all
the time, so that every step does the same work; windows next to each other are paired. Coming and going happens
between the windows.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from embedded_engine import SteppedControl, load_embedded, make_core, random_prompts, submit
from paired import estimate, pseudomedian, ratio
from telemetry_threads import TelemetryThreads

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.observatory.plan import ObservatoryPlan, Subject, plan_observatory
from kvwatch.observatory.settings import ObservatorySettings
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.core import EngineCore

STEPS_PER_WINDOW = 100
BATCH = 16
BUDGET_LOSS = 0.01
ATTACH_SECONDS = 10.0
SETTLE_SECONDS = 0.3
"""Before every window, so that neither begins with what coming and going still does."""


class Load:
    """Keeps `BATCH` sequences decoding."""

    def __init__(self, core: EngineCore, control: SteppedControl) -> None:
        self.core = core
        self.control = control
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
            self.control.answer()
            num_tokens += sum(len(output.token_ids) for output in self.core.step())
        return num_tokens / (time.perf_counter() - started)


class Peers:
    """Those who listen, in a process of their own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input = process.stdin
        self.endpoint = process.stdout.readline().strip()
        """The collector's."""

    def tell(self, word: str) -> None:
        """Say `on` or `off`."""
        self._input.write(f"{word}\n")
        self._input.flush()


@contextmanager
def attached(plan: ObservatoryPlan, subject: Subject, control: SteppedControl, peers: Peers) -> Iterator[None]:
    """Have everything attached: return when the first view is there and the stream is read."""
    built = plan.build(subject)
    built.observatory.start()
    peers.tell("on")
    try:
        assert built.stream is not None
        stream = built.stream
        _wait(control, lambda: bool(built.observatory.view.gauges) and stream.num_subscribers > 0)
        time.sleep(SETTLE_SECONDS)
        yield
    finally:
        peers.tell("off")
        built.observatory.stop()


def _wait(control: SteppedControl, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ATTACH_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nobody listens"
        control.answer()
        time.sleep(0.005)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running_peers(metrics_port: int, grpc_port: int) -> Iterator[Peers]:
    """Run those who listen."""
    command = [sys.executable, str(Path(__file__).with_name("telemetry_peers.py")), str(metrics_port), str(grpc_port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Peers(process)
        finally:
            process.kill()


def main() -> None:
    """Print the result as JSON; exit 1 when the upper end of the interval misses the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    seconds = parser.parse_args().seconds
    log = EventLog()
    core = make_core(load_embedded(), log, max_num_seqs=BATCH, num_blocks=8192)
    control = SteppedControl(core)
    load = Load(core, control)
    load.window()
    subject = Subject(log, control, EngineIdentity("bench"), config={})
    metrics_port, grpc_port = free_port(), free_port()
    threads = TelemetryThreads()
    on: list[float] = []
    core_share: list[float] = []
    off: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = stack.enter_context(running_peers(metrics_port, grpc_port))
        settings = ObservatorySettings(
            metrics_listen=f"127.0.0.1:{metrics_port}",
            grpc_listen=f"127.0.0.1:{grpc_port}",
            admin_listen="off",
            record_dir=str(folder / "records"),
            flight_dir=str(folder / "flight"),
            otlp_endpoint=peers.endpoint,
        )
        plan = plan_observatory(settings, "bench", folder)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            is_on_first = len(on) % 2 == 0
            for is_on in (is_on_first, not is_on_first):
                load.refill()  # every window begins with contexts of the same length: 50 steps later they cost 5 % more
                if is_on:
                    with attached(plan, subject, control, peers):
                        began_ns, cpu_ns = time.perf_counter_ns(), threads.cpu_ns()
                        on.append(load.window())
                        core_share.append((threads.cpu_ns() - cpu_ns) / (time.perf_counter_ns() - began_ns))
                else:
                    time.sleep(SETTLE_SECONDS)
                    off.append(load.window())
    loss = pseudomedian([1 - a / b for a, b in zip(on, off, strict=True)])
    print(
        json.dumps(
            {
                "windows": len(on),
                "steps_per_window": STEPS_PER_WINDOW,
                "attached": "ledger, scraper, OTLP traces and metrics, gRPC reader, recorder, flight recorder",
                "on_output_tokens_per_second": estimate(on).rounded(1),
                "off_output_tokens_per_second": estimate(off).rounded(1),
                "ratio_on_off": ratio(on, off).rounded(4),
                "core_share_of_telemetry_threads": estimate(core_share).rounded(4),
                "loss": loss.rounded(4),
                "budget_loss_upper95": BUDGET_LOSS,
            }
        )
    )
    sys.exit(loss.high > BUDGET_LOSS)


if __name__ == "__main__":
    main()
