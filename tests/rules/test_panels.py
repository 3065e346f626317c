"""Every query of every dashboard brings something, of an engine or of a sidecar: asked of promtool.

The series are those of the golden page of an engine, and one for each metric that only sidecars or further tiers have,
all of them growing: a query that selects nothing, or that Prometheus cannot parse, shows at once.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvwatch.derive.metrics import full_name
from kvwatch.telemetry.metrics import CATALOGUE
from kvwatch.telemetry.schema import Metric, MetricKind
from kvwatch_dashboards.boards import BOARDS
from kvwatch_dashboards.panel import Board

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


def series_of(metric: Metric) -> list[str]:
    """Return series of a metric that an engine alone does not have."""
    own = "".join(f',{label}="{_value(metric, label)}"' for label in metric.labels)
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
    expr = expr.replace("$__rate_interval", "5m")
    return re.sub(r"\$(job|model|engine|dp_rank|tier|group)\b", ".*", expr)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_query_brings_something(board: Board, tmp_path: Path) -> None:
    panels = [panel for row in board.rows for panel in row.panels if panel.title not in NEEDS_AN_OCCASION]
    queries = [as_prometheus_asks(query.expr) for panel in panels for query in panel.queries]
    story = {
        "rule_files": [],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": each, "values": "5+5x20"} for each in all_series()],
                "promql_expr_test": [
                    {
                        "expr": f"clamp_max(count({expr}), 1) or vector(0)",
                        "eval_time": "15m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                    for expr in queries
                ],
            }
        ],
    }
    path = tmp_path / "story.yaml"
    path.write_text(json.dumps(story), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
