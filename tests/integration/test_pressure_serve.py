"""A mixed load on a pool of 40 blocks, from `kvwatch bench` to `kvwatch serve`, in every mode of preemption.

What the bench cannot see from outside is read from the server's recording: how long each request waited for its turn
and was away after preemptions, apart from the time in which it was computed.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from bench_runs import bench_process
from server_process import ServerProcess, serve_process

from kvwatch.bench.plan import plan_requests
from kvwatch.bench.saved import SavedRun, read_run
from kvwatch.bench.scenarios import SCENARIOS, RequestSpec
from kvwatch.recorder.reader import Recording
from kvwatch.telemetry.events import RequestFinished, RequestResumed
from kvwatch.telemetry.schema import Event

NUM_BLOCKS = 40
LIMIT_TOKENS = NUM_BLOCKS * 16
SEED = 7
NEAR_TIE = 1e-4
MAX_EXCUSED_SHARE = 0.02
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
    saved: Path
    num_requests: int


@pytest.fixture(scope="module", params=[60, 1000])
def unpressured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unpressured]:
    saved = tmp_path_factory.mktemp("unpressured") / "run.json"
    with serve_process("embedded", *SERVE, "--num-blocks", str(20 * NUM_BLOCKS)) as server:
        report = bench(server, request.param, "--save", str(saved), "--save-texts")
        assert report["server"]["preemptions"] == 0
        yield Unpressured(server, saved, request.param)


def bench(server: ServerProcess, num_requests: int, *words: str) -> Any:
    """Send the load with a dozen clients; return the report."""
    process = bench_process(
        "--url", server.api, "--scenario", "mixed", "--num-requests", str(num_requests), "--concurrency", "12",
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
    with serve_process("embedded", *SERVE, *flags, *MODES[mode]) as server:
        report = bench(
            server, unpressured.num_requests, "--save", str(saved), "--compare", str(unpressured.saved),
            "--assert", "errors==0", "--assert", "used_blocks_after==0", "--assert", "isolation_mismatches==0",
        )  # fmt: skip
        server.terminate()

    seen = report["server"]
    print(f"{mode}: {report['duration_seconds']:.0f} s, {seen['preemptions']:.0f} preemptions, least {seen}")
    assert seen["preemptions"] > 0
    check_waits(read_run(saved), read_events(recordings))
    check_texts(unpressured, read_run(unpressured.saved), report["comparison"])


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


def check_waits(run: SavedRun, events: Sequence[Event]) -> None:
    """Nobody waits longer than five times the median of its class, or two seconds, beyond its own service."""
    waits: dict[str, float] = {}
    for event in events:
        if isinstance(event, RequestFinished):
            waits[event.request] = waits.get(event.request, 0.0) + (event.queue_ns or 0) / 1e9
        if isinstance(event, RequestResumed):
            waits[event.request] = waits.get(event.request, 0.0) + event.away_ns / 1e9
    by_class: dict[str, list[float]] = {}
    for request in run.requests:
        if request.status == "ok":
            by_class.setdefault(request.scenario, []).append(waits[request.answer_id])
    ratios = {}
    for scenario, found in by_class.items():
        ratios[scenario] = max(found) / max(5 * median(found), 2.0)
        print(f"{scenario}: {len(found)} waited {median(found):.2f} s in the middle, {max(found):.2f} s at most")
    assert max(ratios.values()) <= 1.0, ratios


def check_texts(unpressured: Unpressured, there: SavedRun, comparison: Any) -> None:
    """Greedy texts are equal but at near ties of the two best tokens, which the unpressured server is asked about."""
    specs = plan_requests(
        {name: scenario.mixed_weight for name, scenario in SCENARIOS.items()},
        unpressured.num_requests, there.seed, there.scale,
    )  # fmt: skip
    differing = comparison["differing"]
    print(f"{comparison['identical']} of {comparison['compared']} texts are identical")
    assert comparison["compared"] >= 0.8 * unpressured.num_requests
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
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    length = 0
    for token, best in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        length += len(token)
        if length > character:
            first, second = sorted(best.values(), reverse=True)[:2]
            return first - second
    raise AssertionError(f"the text has no character {character}")
