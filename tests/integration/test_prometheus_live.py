"""A real Prometheus scrapes an engine under the mixed load: queries work, and panels show what the bench measured."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from bench_runs import bench_process
from prometheus_stage import needs_prometheus, prometheus, wait_for
from server_process import ServerProcess, serve_process
from tiny_models import make_tiny_model

from kvwatch.derive.metrics import full_name
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_dashboards.alerts import ALERTS
from kvwatch_dashboards.annotations import ANNOTATIONS
from kvwatch_dashboards.boards import BOARDS
from kvwatch_dashboards.local.configuration import Timing
from kvwatch_dashboards.panel import Board, Panel
from kvwatch_dashboards.preview.reading import Span, asked, legend_labels, read_board
from kvwatch_dashboards.prometheus_api import PrometheusApi
from kvwatch_dashboards.recording import RECORDINGS

pytestmark = [needs_prometheus, pytest.mark.slow, pytest.mark.timeout(900)]

MIX = (
    "short=4,long=2,early-stop=2,max-tokens=2,shared-prefix=3,distinct=2,parallel=1,cold=1,warm=1,pressure=2"
    ",isolation=1"
)
"""The mixed load without clients that hang up: those read less than the engine computes for them."""
CONCURRENCY = 12
NUM_BLOCKS = 40
SCRAPE_SECONDS = 0.5


@dataclass(frozen=True)
class LiveRun:
    """A load that is over, and the Prometheus that has seen it."""

    server: ServerProcess
    api: PrometheusApi
    report: Any
    """The bench's own."""
    start: float
    """Of the scrape that is nearest to the bench's own reading before the load."""
    end: float
    """Of a scrape after the load, when nothing ran any more."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("live")
    model = make_tiny_model("llama", folder / "model", max_position_embeddings=2048)
    pools = ("--num-blocks", str(NUM_BLOCKS + 1), "--host-memory", "64MiB")
    flags = ("--served-model-name", "tiny", "--dtype", "float32", *pools)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_process(model, *flags, ready_seconds=400))
        timing = Timing(scrape=f"{1000 * SCRAPE_SECONDS:g}ms")
        api = stack.enter_context(prometheus(folder, {"kvwatch": [server.metrics_url]}, timing=timing))
        # Extremes are absent until a whole window was seen; a fast machine is done with the load before that.
        wait_for(lambda: full_name(m.KV_FREE_BLOCKS_MIN) in httpx.get(server.metrics_url, timeout=30).text, 150)
        report = _under_load(server)
        scrapes = _scrapes(api)
        start = min(scrapes, key=lambda at: abs(at - report["started_unix_seconds"]))
        over = report["started_unix_seconds"] + report["duration_seconds"] + 2.5
        wait_for(lambda: _scrapes(api)[-1] > over, 60)
        yield LiveRun(server, api, report, start, _scrapes(api)[-1])


def _under_load(server: ServerProcess) -> Any:
    words = ("--url", server.api, "--scenario", MIX, "--num-requests", "240", "--concurrency", str(CONCURRENCY))
    process = bench_process(*words, "--seed", "7", "--json")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["requests"]["ok"] == 240, report["errors"]
    assert report["server"]["preemptions"] > 0
    return report


def _scrapes(api: PrometheusApi) -> list[float]:
    """Return when the engine was scraped."""
    (points,) = [each.points for each in api.matrix('up{job="kvwatch"}[30m]')]
    return [at for at, _ in points]


def panel(uid: str, title: str) -> Panel:
    (board,) = [board for board in BOARDS if board.uid == f"kvwatch-{uid}"]
    (found,) = [panel for row in board.rows for panel in row.panels if panel.title == title]
    return found


def shown(run: LiveRun, uid: str, title: str, legend: str = "") -> float:
    """Return what a panel shows of the whole run: the sum of its lines (of those with that legend), at its end.

    A rate's window is the run, from one scrape to another: times its seconds it is what was counted.
    """
    window = f"{round(1000 * (run.end - run.start))}ms"
    queries = [query for query in panel(uid, title).queries if not legend or query.legend == legend]
    found = [series for query in queries for series in run.api.instant(asked(query.expr, window, window), run.end)]
    assert found, title
    return sum(series.points[0][1] for series in found)


def counted(run: LiveRun, uid: str, title: str, legend: str = "") -> float:
    return shown(run, uid, title, legend) * (run.end - run.start)


def extreme(run: LiveRun, uid: str, title: str, legend: str) -> list[float]:
    """Return what lines of a panel showed during the run, their sum at each scrape."""
    sums: dict[float, float] = {}
    for query in panel(uid, title).queries:
        if query.legend == legend:
            for series in run.api.range(asked(query.expr, "5s", "5m"), run.start, run.end, SCRAPE_SECONDS):
                for at, value in series.points:
                    sums[at] = sums.get(at, 0.0) + value
    assert sums, title
    return list(sums.values())


def exactly(value: float) -> Any:
    """What was counted between two scrapes; their times are known to a millisecond."""
    return pytest.approx(value, rel=2e-3, abs=1e-6)


def within_a_bucket(metric: Metric, seen: float, measured: float) -> bool:
    """Return whether a quantile of buckets is where the client's own lies, or beside it: a client is a little later."""
    bounds = (0.0, *metric.buckets, math.inf)
    place = next(index for index, bound in enumerate(bounds) if bound >= measured)
    return bounds[max(place - 2, 0)] <= seen <= bounds[min(place + 1, len(bounds) - 1)]


def test_ten_headline_panels_equal_the_figures_of_the_bench(run: LiveRun) -> None:
    report, server = run.report, run.report["server"]
    engine = "{{engine}}/{{dp_rank}}"

    assert counted(run, "pressure", "Preemptions by mode and reason") == exactly(server["preemptions"])
    computed = counted(run, "latency", "Tokens", "computed tokens/s")
    again = shown(run, "pressure", "Tokens computed twice") * computed
    assert again == exactly(server["num_recomputed_tokens"])
    assert shown(run, "prefix-cache", "Hit rate of all") == exactly(server["hit_ratio"])
    tokens = report["throughput"]
    assert counted(run, "incident", "Tokens in and out", "prompt tokens/s") == exactly(tokens["prompt_tokens"])
    # When the API sees a stop string, the engine is a step or two further: those tokens are in no answer.
    generated = counted(run, "incident", "Tokens in and out", "generated tokens/s")
    assert 0.998 * tokens["output_tokens"] < generated < 1.02 * tokens["output_tokens"]
    assert counted(run, "latency", "Requests that ended, by reason") == exactly(report["requests"]["ok"])
    least = extreme(run, "pressure", "Least free blocks beside the watermark", f"{engine} least free")
    assert min(least) == server["min_free_blocks"]
    in_use = extreme(run, "capacity", "Blocks in use", engine)
    assert in_use[-1] == server["used_blocks_after"] == 0
    # A look once a second need not meet the fullest moment; the minimum above does.
    assert 0.5 < max(in_use) <= 1 - server["min_free_blocks"] / NUM_BLOCKS
    states = extreme(run, "latency", "Requests by state", "{{state}}")
    assert max(states) == report["peak_concurrency"] == CONCURRENCY
    for uid, title, name, metric in (
        ("latency", "Time to first token", "ttft", m.TIME_TO_FIRST_TOKEN),
        ("latency", "Time between tokens", "itl", m.INTER_TOKEN_LATENCY),
        ("latency", "End to end", "e2e", m.END_TO_END),
    ):
        seen = shown(run, uid, title, "p50")
        assert within_a_bucket(metric, seen, report["latency"][name]["p50"]), (title, seen, report["latency"][name])


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_query_of_every_panel_is_answered_in_the_shape_of_its_panel(run: LiveRun, board: Board) -> None:
    page = httpx.get(run.server.metrics_url, timeout=30).text
    on_the_page = {line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    span = Span(run.start, run.end, SCRAPE_SECONDS)

    for reading in read_board(board, run.api, span):
        title = reading.panel.title
        for each in reading.shown:
            if reading.panel.kind != "table":
                assert set(legend_labels(each.query)) <= each.labels.keys(), title
            assert all(math.isfinite(value) for _, value in each.points), title
            times = [at for at, _ in each.points]
            assert times == sorted(set(times)), title
            if (each.query.unit or reading.panel.unit) == "percentunit":
                assert all(-1e-9 <= value <= 1 + 1e-6 for _, value in each.points), (title, each.name)
        if reading.panel.kind == "number":
            assert len(reading.shown) <= 1, title
        names = {full_name(metric).removesuffix("_total") for metric in reading.panel.metrics}
        if not reading.shown and title not in NEEDS_AN_OCCASION:
            assert names - {each.removesuffix("_total") for each in on_the_page}, f"{title} shows nothing"


NEEDS_AN_OCCASION = {
    "Settings that are not what was declared": "nothing was changed",
    "Settings that were changed": "nothing was changed",
    "Rebuilds and restarts": "there were none",
    "Settings that differ between replicas": "there is one",
    "Time without steps while the pool was rebuilt": "it was not",
}
"""Panels that are empty in this run, and why; the pictures' run fills them."""


def test_every_rule_is_evaluated_and_every_recording_records(run: LiveRun) -> None:
    wait_for(lambda: all(rule.health == "ok" for rule in run.api.rules()), 60, run.api.rules)
    rules = run.api.rules()

    assert {rule.name for rule in rules if rule.type == "alerting"} == {alert.name for alert in ALERTS}
    assert {rule.name for rule in rules if rule.type == "recording"} == {each.name for each in RECORDINGS}
    assert [rule for rule in rules if rule.last_error] == []
    silent = {each.name for each in RECORDINGS if not run.api.instant(each.name, run.end)}
    assert silent <= {"engine:kvwatch_kv_premature_evictions:ratio_rate30m"}, "only sidecars see premature evictions"
    for each in RECORDINGS:
        for series in run.api.instant(each.name, run.end):
            assert {"job", "instance", "engine", "dp_rank"} <= series.labels.keys(), each.name
    for annotation in ANNOTATIONS:
        assert run.api.range(asked(annotation.expr, "5s", "5m"), run.start, run.end, 5.0) == []
