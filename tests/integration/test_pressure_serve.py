"""A thousand mixed requests on 40 blocks, from `kvwatch bench` to `kvwatch serve`, in every mode of preemption.

    pytest -s tests/integration/test_pressure_serve.py -k "tiny and swap"        one mode, a random model: 1 minute
    pytest -s tests/integration/test_pressure_serve.py -k "shallow and swap"     a few real layers: 6 minutes
    pytest -s tests/integration/test_pressure_serve.py -k "embedded and swap"    the whole model: 12 minutes

On 2 idle cores, that is. On a busy machine all of them take several times as long.

UNPRESSURED_RUNS=DIR keeps the run without pressure, which all modes are compared with, for the next command.

The time is the model's: some 25,000 steps of two or three sequences, since a pool of 640 tokens holds no more, and each
step reads all weights. So there are smaller models besides the whole one. What they say is also much easier to get
wrong (see `make_shallow_model`).

What the bench cannot see from outside is read from the server's recording: how long each request waited for its turn
and was away after preemptions, apart from the time in which it was computed.
"""

import json
import os
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench_runs import bench_process
from server_process import ServerProcess, serve_process
from tiny_models import make_shallow_model, make_tiny_model
from waits import check_fairness

from kvwatch.bench.plan import plan_requests
from kvwatch.bench.saved import SavedRun, read_run
from kvwatch.bench.scenarios import SCENARIOS, RequestSpec
from kvwatch.recorder.reader import Recording
from kvwatch.telemetry.events import RequestPreempted
from kvwatch.telemetry.schema import Event

KEEP = "UNPRESSURED_RUNS"
NUM_REQUESTS = 1000
NUM_BLOCKS = 40
LIMIT_TOKENS = NUM_BLOCKS * 16
SEED = 7
NEAR_TIE = 1e-4
MAX_EXCUSED_SHARE = 0.02
MAX_FOREIGN_SHARE = 0.1
"""Part of the processors' time that others may take before seconds say more about them than about the engine."""
SERVE = ("--dtype", "float32", "--served-model-name", "embedded")
MODES: dict[str, tuple[str, ...]] = {
    "recompute": (),
    "swap": ("--host-memory", "2GiB"),
    "auto": ("--host-memory", "2GiB"),
}

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(4 * 3600)]


@dataclass
class Unpressured:
    """The same load where nobody is ever short of blocks; its server still answers."""

    server: ServerProcess
    model: str
    saved: Path


@pytest.fixture(scope="module", params=["tiny", "shallow", "embedded"])
def unpressured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unpressured]:
    folder = tmp_path_factory.mktemp("unpressured")
    model = request.param if request.param == "embedded" else str(small_model(request.param, folder / "model"))
    saved = Path(os.environ.get(KEEP, folder)) / f"{request.param}.json"
    with serve_process(model, *SERVE, "--num-blocks", str(20 * NUM_BLOCKS)) as server:
        if not saved.exists():
            report = bench(server, "--save", str(saved), "--save-texts")
            assert report["server"]["preemptions"] == 0
        yield Unpressured(server, model, saved)


def small_model(kind: str, folder: Path) -> Path:
    """Write a smaller model than the embedded one."""
    if kind == "shallow":
        return make_shallow_model(folder)
    return make_tiny_model("llama", folder, max_position_embeddings=2048)


def bench(server: ServerProcess, *words: str) -> Any:
    """Send the load with a dozen clients; return the report."""
    process = bench_process(
        "--url", server.api, "--scenario", "mixed", "--num-requests", str(NUM_REQUESTS), "--concurrency", "12",
        "--seed", str(SEED), "--limit-tokens", str(LIMIT_TOKENS), "--endpoint", "completions",
        "--request-timeout", "3600", "--json", *words,
    )  # fmt: skip
    output, errors = process.communicate()
    assert output, errors
    report = json.loads(output)
    missed = [each for each in report["assertions"] if not each["is_met"]]
    assert process.returncode == 0, (missed, report["errors"], report["isolation"], errors)
    return report


@pytest.mark.parametrize("mode", MODES)
def test_a_mixed_load_under_pressure(unpressured: Unpressured, mode: str, tmp_path: Path) -> None:
    saved, recordings = tmp_path / "run.json", tmp_path / "recordings"
    flags = ("--num-blocks", str(NUM_BLOCKS + 1), "--preemption-mode", mode, "--record-dir", str(recordings))
    with serve_process(unpressured.model, *SERVE, *flags, *MODES[mode]) as server:
        busy = BusyTime(server.process.pid)
        report = bench(
            server, "--save", str(saved), "--save-texts", "--compare", str(unpressured.saved),
            "--assert", "errors==0", "--assert", "used_blocks_after==0", "--assert", "isolation_mismatches==0",
        )  # fmt: skip
        foreign = busy.foreign_share()
        server.terminate()
    seen, events = report["server"], read_events(recordings)
    preemptions = Counter[str](event.mode for event in events if isinstance(event, RequestPreempted))
    print(f"{mode}: {report['duration_seconds']:.0f} s, preemptions {dict(preemptions)}, {report['requests']}, {seen}")
    assert preemptions.total() == seen["preemptions"] > 0
    # Swap falls back where there is nothing to swap, or a copy of the same step is still to come.
    assert mode == "auto" or preemptions[mode] > 0.9 * preemptions.total()
    print(f"others had {foreign:.0%} of the processors")
    answered = [(each.scenario, each.answer_id) for each in read_run(saved).requests if each.status == "ok"]
    check_fairness(answered, events, judges_seconds=foreign <= MAX_FOREIGN_SHARE)
    check_texts(unpressured, read_run(unpressured.saved), report["comparison"])


class BusyTime:
    """Who has the processors' time from now on: a server and this process's children, or others."""

    def __init__(self, server_pid: int) -> None:
        self._server = psutil.Process(server_pid)
        self._started = time.monotonic()
        self._before = self._all(), self._own()

    def foreign_share(self) -> float:
        """Return the part of all processors' time that others have had."""
        everybody, own = self._all() - self._before[0], self._own() - self._before[1]
        return max(0.0, everybody - own) / ((time.monotonic() - self._started) * (os.cpu_count() or 1))

    def _all(self) -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - times.iowait - times.guest)

    def _own(self) -> float:
        server, ours = self._server.cpu_times(), os.times()
        return server.user + server.system + ours.user + ours.system + ours.children_user + ours.children_system


def read_events(folder: Path) -> list[Event]:
    """Return all events of a server's recordings."""
    events: list[Event] = []
    for path in sorted(folder.rglob("*.kvrec")):
        with Recording(path) as recording:
            for item in recording.items():
                if isinstance(item, list):
                    events += item
    assert events, f"nothing was recorded: {sorted(folder.rglob('*'))}"
    return events


def check_texts(unpressured: Unpressured, there: SavedRun, comparison: Any) -> None:
    """Greedy texts are equal but at near ties of the two best tokens, which the unpressured server is asked about."""
    specs = plan_requests(
        {name: scenario.mixed_weight for name, scenario in SCENARIOS.items()},
        NUM_REQUESTS, there.seed, there.scale,
    )  # fmt: skip
    differing = comparison["differing"]
    print(f"{comparison['identical']} of {comparison['compared']} texts are identical")
    assert comparison["compared"] >= 0.8 * NUM_REQUESTS
    assert len(differing) <= max(1, MAX_EXCUSED_SHARE * comparison["compared"])
    for each in differing:
        gap = gap_of_the_best(unpressured.server, specs[each["index"]], each["character"])
        assert gap < NEAR_TIE, f"request {each['index']} differs at character {each['character']}: {each}"


def gap_of_the_best(server: ServerProcess, spec: RequestSpec, character: int) -> float:
    """Return by how much the best token is more likely than the second where a text reaches this character."""
    answer = server.openai().with_options(timeout=600).completions.create(
        model="embedded", prompt=spec.prompt, max_tokens=spec.max_tokens, temperature=0, logprobs=2,
        extra_body={"ignore_eos": spec.is_fixed_length},
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    offsets = logprobs.text_offset
    last = bisect_right(offsets, character) - 1
    gaps = []
    for best in logprobs.top_logprobs[bisect_left(offsets, offsets[last]) : last + 1]:  # several make one character
        first, second = sorted(best.values(), reverse=True)[:2]
        gaps.append(first - second)
    return min(gaps)
