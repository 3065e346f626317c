"""What telemetry costs the embedded model: an engine with it and one without, in turn every few steps. Prints JSON.

    python tests/perf/bench_telemetry.py [--seconds 400]

Attached means everything: collector, ledger, recorder, flight recorder, spans and metrics to a collector over OTLP, a
reader of the gRPC stream and a scraper once a second; those who receive are another process. 16 sequences decode all
the time, so that every step does the same work.

A machine's speed changes within a second by more than telemetry costs. So two engines, which share the weights, take
turns of few steps, and what is compared are cycles of two seconds: in each both compute for one. All that
telemetry does by the clock is stretched by two, so that it happens once in each second that its own engine computes;
its moments are at the begin of a cycle, where that engine has its turn. What the threads of telemetry do all the same
while the other one computes is taken off the other one's time. Which of the two is watched changes every round. Cycles
in which others took the processor are left out, whatever they show.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from embedded_engine import SteppedControl, load_embedded, make_core, random_prompts, submit
from paired import estimate, pseudomedian
from telemetry_threads import Foreign, TelemetryThreads

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.ledger import pace
from kvwatch.ledger.pace import next_tick_at
from kvwatch.observatory.plan import ObservatoryPlan, Subject, plan_observatory
from kvwatch.observatory.settings import ObservatorySettings
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.model.loader import LoadedModel

BATCH = 16
NUM_BLOCKS = 2048
FIRST_STEPS = 8
"""Steps of the first turn of each engine in a cycle: until everything is done that a tick begins."""
STEPS_PER_TURN = 2
"""Of the later ones: the shorter, the less do they differ by chance."""
STRETCH = 2
"""Seconds of the clock for one second that an engine computes."""
LEAD_SECONDS = 0.003
"""So long before a tick the watched engine begins."""
CYCLES_PER_ROUND = 8
BUDGET_LOSS = 0.01
MAX_FOREIGN_SHARE = 0.05
"""Part of a core that others may take during a cycle that counts."""
ATTACH_SECONDS = 10.0


class Side:
    """An engine that keeps `BATCH` sequences decoding."""

    def __init__(self, model: LoadedModel) -> None:
        self.log = EventLog()
        self.core = make_core(model, self.log, max_num_seqs=BATCH, num_blocks=NUM_BLOCKS)
        self.control = SteppedControl(self.core)
        self.subject = Subject(self.log, self.control, EngineIdentity("bench"), config={})
        self.num_rounds = 0

    def refill(self) -> None:
        """Begin a round: all sequences anew, prefilled, so that both engines have equal contexts."""
        self.core.manager.pool.clear_cache()
        for request_id in self.core.live_request_ids():
            self.core.abort(request_id)
        self.num_rounds += 1
        submit(self.core, random_prompts(BATCH, 64, self.num_rounds), 4000, f"round{self.num_rounds}")
        while any(not request.first_token_ns for request in self.core.scheduler.lifecycle.requests()):
            self.core.step()

    def turn(self, num_steps: int) -> float:
        """Do so many steps; return the seconds that they took."""
        started = time.perf_counter()
        for _ in range(num_steps):
            self.control.answer()
            outputs = self.core.step()
            assert len(outputs) == BATCH
        return time.perf_counter() - started


@dataclass(slots=True)
class Cycle:
    """What was measured in one cycle: both engines did the same steps."""

    num_steps: int = 0
    on_seconds: float = 0.0
    off_seconds: float = 0.0
    on_cpu_seconds: float = 0.0
    """Processor time of telemetry's threads while the watched engine computed ..."""
    off_cpu_seconds: float = 0.0
    """... and while the other one did."""
    foreign_share: float = 0.0
    """Part of a core that other processes had."""

    @property
    def loss(self) -> float:
        """Part of its tokens a second that the watched engine lost."""
        return 1 - (self.off_seconds - self.off_cpu_seconds) / self.on_seconds


def run_cycle(on: Side, off: Side, threads: TelemetryThreads, foreign: Foreign) -> Cycle:
    """Wait for a tick and let both engines take turns until shortly before the next one."""
    cycle = Cycle()
    begin = (time.monotonic() // STRETCH + 1) * STRETCH - LEAD_SECONDS
    time.sleep(max(0.0, begin - time.monotonic()))
    foreign.begin()
    threads.look()
    num_steps, slowest = FIRST_STEPS, 0.0
    while time.monotonic() + 2 * STEPS_PER_TURN * slowest < begin + STRETCH - LEAD_SECONDS:
        cpu_ns = threads.cpu_ns()
        on_seconds = on.turn(num_steps)
        between_ns = threads.cpu_ns()
        off_seconds = off.turn(num_steps)
        cycle.off_cpu_seconds += (threads.cpu_ns() - between_ns) / 1e9
        cycle.on_cpu_seconds += (between_ns - cpu_ns) / 1e9
        cycle.on_seconds += on_seconds
        cycle.off_seconds += off_seconds
        cycle.num_steps += num_steps
        slowest = max(slowest, on_seconds / num_steps, off_seconds / num_steps)
        num_steps = STEPS_PER_TURN
    cycle.foreign_share = foreign.share()
    return cycle


class Peers:
    """Those who listen, in a process of their own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input = process.stdin
        self.pid = process.pid
        self.endpoint = process.stdout.readline().strip()
        """The collector's."""

    def tell(self, word: str) -> None:
        """Say `on` or `off`."""
        self._input.write(f"{word}\n")
        self._input.flush()


@contextmanager
def attached(plan: ObservatoryPlan, side: Side, peers: Peers) -> Iterator[None]:
    """Have everything attached: return when the first view is there and the stream is read."""
    built = plan.build(side.subject)
    built.observatory.start()
    peers.tell("on")
    try:
        assert built.stream is not None
        stream = built.stream
        _wait(side.control, lambda: bool(built.observatory.view.gauges) and stream.num_subscribers > 0)
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
    command = [
        sys.executable,
        str(Path(__file__).with_name("telemetry_peers.py")),
        str(metrics_port),
        str(grpc_port),
        str(STRETCH),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Peers(process)
        finally:
            process.kill()


def stretched_tick_at(now: float, period_seconds: float) -> float:
    """Return when those look next who would look in `period_seconds` of an engine that computes all the time."""
    return next_tick_at(now, STRETCH * period_seconds)


def measure(plan: ObservatoryPlan, sides: Sequence[Side], peers: Peers, seconds: float) -> list[Cycle]:
    """Measure for so long, and to the end of the round."""
    threads, foreign = TelemetryThreads(), Foreign(peers.pid)
    cycles: list[Cycle] = []
    deadline = time.monotonic() + seconds
    on, off = sides
    while time.monotonic() < deadline:
        with attached(plan, on, peers):
            for side in sides:
                side.refill()
            run_cycle(on, off, threads, foreign)  # what comes from coming and from the prompts is over after that
            cycles += [run_cycle(on, off, threads, foreign) for _ in range(CYCLES_PER_ROUND)]
        on, off = off, on
    return cycles


def main() -> None:
    """Print the result as JSON; exit 1 when the upper end of the interval misses the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=400)
    seconds = parser.parse_args().seconds
    pace.next_tick_at = stretched_tick_at
    model = load_embedded()
    sides = (Side(model), Side(model))
    metrics_port, grpc_port = free_port(), free_port()
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
        measured = measure(plan_observatory(settings, "bench", folder), sides, peers, seconds)
    cycles = [each for each in measured if each.foreign_share <= MAX_FOREIGN_SHARE]
    if not cycles:
        sys.exit("others took the processor all the time; nothing can be said")
    loss = pseudomedian([each.loss for each in cycles])
    print(
        json.dumps(
            {
                "cycles": len(cycles),
                "cycles_left_out": len(measured) - len(cycles),
                "steps_of_each_engine": sum(each.num_steps for each in cycles),
                "attached": "ledger, scraper, OTLP traces and metrics, gRPC reader, recorder, flight recorder",
                "on_output_tokens_per_second": estimate(
                    [each.num_steps * BATCH / each.on_seconds for each in cycles]
                ).rounded(1),
                "off_output_tokens_per_second": estimate(
                    [each.num_steps * BATCH / each.off_seconds for each in cycles]
                ).rounded(1),
                "ratio_on_off": estimate([each.off_seconds / each.on_seconds for each in cycles]).rounded(4),
                "core_share_of_telemetry_threads": estimate(
                    [(each.on_cpu_seconds + each.off_cpu_seconds) / each.on_seconds for each in cycles]
                ).rounded(4),
                "of_it_beside_the_other_engine": estimate(
                    [each.off_cpu_seconds / each.off_seconds for each in cycles]
                ).rounded(4),
                "loss": loss.rounded(4),
                "budget_loss_upper95": BUDGET_LOSS,
            }
        )
    )
    sys.exit(loss.high > BUDGET_LOSS)


if __name__ == "__main__":
    main()
