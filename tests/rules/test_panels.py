"""Every query of every dashboard brings something, of an engine or of a sidecar: asked of promtool.

The series are those of the golden page of an engine, and one for each metric that only sidecars or further tiers have,
all of them growing: a query that selects nothing, or that Prometheus cannot parse, shows at once.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from kvwatch.derive.metrics import full_name
from kvwatch.sources.knowledge import NOT_AVAILABLE, SOURCES, knowledge
from kvwatch.sources.scrape.rules import Dialect
from kvwatch.sources.scrape.sglang import SGLANG
from kvwatch.sources.scrape.vllm import VLLM
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric, MetricKind
from kvwatch_dashboards.boards import BOARDS
from kvwatch_dashboards.panel import Board, Panel
from kvwatch_dashboards.preview.reading import asked

GOLDEN = Path(__file__).parents[1] / "golden" / "exposition.txt"
TARGET = 'job="kvwatch",instance="a:9400"'
ENGINE = f'{TARGET},engine="scripted",dp_rank="0",model_name="scripted-model"'
NEEDS_AN_OCCASION = {"Settings that are not what was declared", "Settings that differ between replicas"}
"""Panels that are empty while all is well."""

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here: install the package 'prometheus'"
)


def series_of_an_engine() -> list[str]:
    """Return the names and labels of the golden page's series, as Prometheus would have them."""
    lines = [line for line in GOLDEN.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found = [line.rsplit(" ", 1)[0] for line in lines]
    return [each.replace("{", f"{{{TARGET},", 1) if "{" in each else f"{each}{{{TARGET}}}" for each in found if each]


def series_of(metric: Metric, labels: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return series of a metric; labels that are not given have a value that they may have."""
    own = "".join(f',{label}="{labels.get(label, _value(metric, label))}"' for label in metric.labels)
    if metric.kind is not MetricKind.HISTOGRAM:
        return [f"{full_name(metric)}{{{ENGINE}{own}}}"]
    buckets = [f'{full_name(metric)}_bucket{{{ENGINE}{own},le="{bound}"}}' for bound in ("1.0", "+Inf")]
    return [*buckets, *(f"{full_name(metric)}_{part}{{{ENGINE}{own}}}" for part in ("sum", "count"))]


def _value(metric: Metric, label: str) -> str:
    return dict(metric.label_values).get(label, ("device" if label == "tier" else "x",))[0]


def all_series() -> list[str]:
    series = series_of_an_engine()
    names = {re.split(r"[{]", each, maxsplit=1)[0] for each in series}
    for metric in CATALOGUE:
        own = {full_name(metric) + part for part in ("", "_bucket")}
        if not own & names:
            series += series_of(metric)
    return series


def as_prometheus_asks(expr: str) -> str:
    return asked(expr, "5m", "10m")


def of_another(series: str) -> str:
    """Return the same series of a second engine."""
    return series.replace('instance="a:9400"', 'instance="b:9400"').replace('engine="scripted"', 'engine="second"')


def verdict_of_promtool(folder: Path, series: list[str], queries: list[str]) -> str:
    """Return what promtool says of queries that should all bring something; empty when they do."""
    story = {
        "rule_files": [],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": each, "values": "5+5x20"} for each in series],
                "promql_expr_test": [
                    {
                        "expr": f"clamp_max(count({as_prometheus_asks(expr)}), 1) or vector(0)",
                        "eval_time": "15m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                    for expr in queries
                ],
            }
        ],
    }
    path = folder / "story.yaml"
    path.write_text(json.dumps(story), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def panels_of(board: Board) -> list[Panel]:
    return [panel for row in board.rows for panel in row.panels if panel.title not in NEEDS_AN_OCCASION]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_query_brings_something_of_two_engines(board: Board, tmp_path: Path) -> None:
    series = all_series()
    queries = [query.expr for panel in panels_of(board) for query in panel.queries]

    assert verdict_of_promtool(tmp_path, [*series, *map(of_another, series)], queries) == ""


def series_told_by(dialect: Dialect, source: str) -> list[str]:
    """Return what a sidecar beside a foreign engine shows: what its page tells, and what follows from its events."""
    series: list[str] = []
    place = SOURCES.index(source)
    scraped = {rule.metric for rule in dialect.rules}
    for rule in dialect.rules:
        labels = [each if isinstance(each, str) else each.otherwise for each in rule.labels]
        series += series_of(rule.metric, dict(zip(rule.metric.labels, labels, strict=True)))
    for each in knowledge():
        if each.metric not in scraped and not each.cells[place].startswith(NOT_AVAILABLE):
            series += series_of(each.metric)
    return list(dict.fromkeys(series))


@pytest.mark.parametrize(("dialect", "source"), [(VLLM, "vLLM"), (SGLANG, "SGLang")], ids=["vLLM", "SGLang"])
@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_panel_that_a_foreign_engine_cannot_fill_says_so_and_the_others_are_filled(
    board: Board, dialect: Dialect, source: str, tmp_path: Path
) -> None:
    full = [panel for panel in panels_of(board) if source not in panel.when_empty]
    queries = [query.expr for panel in full for query in panel.queries]

    assert verdict_of_promtool(tmp_path, series_told_by(dialect, source), queries) == ""


def test_the_check_sees_a_query_that_brings_nothing(tmp_path: Path) -> None:
    assert "exp:" in verdict_of_promtool(tmp_path, all_series(), ['kvwatch_requests{state="no such state"}'])
