"""*Fleet*: all engines, one row each, sorted by risk."""

from kvwatch.telemetry import metrics as m
from kvwatch_dashboards import promql
from kvwatch_dashboards import scoped as q
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.boards import shared
from kvwatch_dashboards.panel import ENGINE, WIDTH, Board, Level, Panel, Query, Row

_RATIO = "percentunit"
_BY = "job, instance, engine, dp_rank, model_name"


def _marked(expr: str, name: str) -> str:
    return f'label_replace({expr}, "risk", "{name}", "", "")'


_PARTS = (
    _marked(q.time_ratio(m.KV_STALL_SECONDS), "stall"),
    _marked(q.gauge(m.KV_USAGE_RATIO, how="max", tier="device"), "usage"),
    _marked(q.ratio(q.gauge(m.REQUESTS, state="waiting"), q.gauge(m.QUEUE_LIMIT, unit="requests")), "queue"),
    _marked(f"1 - {q.value(m.SOURCE_UP)}", "down"),
)
RISK = f"max by ({_BY}) ({' or '.join(_PARTS)})"
"""The worst of: time stalled for blocks, pool in use, queue in use, engine not reached; each from 0 to 1."""

_TABLE = Panel(
    title="Engines by risk",
    unit="short",
    kind="table",
    span=WIDTH,
    queries=tuple(
        Query(f"max by ({_BY}) ({expr})", column=column, unit=unit, has_levels=unit == _RATIO)
        for column, unit, expr in (
            ("risk", _RATIO, RISK),
            ("in use", _RATIO, q.gauge(m.KV_USAGE_RATIO, how="max", tier="device")),
            ("stalled for blocks", _RATIO, q.time_ratio(m.KV_STALL_SECONDS)),
            ("preemptions/s", "short", q.rate(m.PREEMPTIONS)),
            ("running", "short", q.gauge(m.REQUESTS, state="running")),
            ("waiting", "short", q.gauge(m.REQUESTS, state="waiting")),
            (
                "hit rate",
                "percent",
                q.ratio(f"100 * {q.rate(m.PREFIX_CACHE_HIT_TOKENS)}", q.rate(m.PREFIX_CACHE_QUERIED_TOKENS)),
            ),
            ("generated tokens/s", "short", q.rate(m.GENERATED_TOKENS)),
        )
    ),
    levels=(Level(s.USAGE_WARNING_RATIO, "yellow"), Level(s.USAGE_CRITICAL_RATIO, "red")),
    about="One row for each engine and rank. Risk is the worst of: time stalled for blocks, pool in use, queue in use, not"
    " reached; each from 0 to 1. Begin with the first row; an empty cell is what that source does not tell.",
)
_STATES = Panel(
    title="Engines by state",
    unit="short",
    kind="stack",
    queries=(Query(f"sum by (state) ({q.value(m.ENGINE_STATE)})", "{{state}}"),),
)
_VERSIONS = Panel(
    title="Versions",
    unit="short",
    kind="table",
    queries=(Query(f"count by (version) ({promql.series(m.BUILD_INFO, job='~$job')})", column="processes"),),
)
_SETTINGS = Panel(
    title="Settings that differ between replicas",
    unit="short",
    kind="table",
    queries=(Query(f"count by (model_name, key) (count by (model_name, key, value) (count_values by (model_name, key) (\"value\", {q.value(m.CONFIG_VALUE)}))) > 1", column="values"),),
    about="Settings of which replicas of one model have several values in force. One was configured or changed apart: the diff of"
    " the admin API says which.",
)  # fmt: skip
_DRIFT = Panel(
    title="Settings that are not what was declared",
    unit="short",
    kind="table",
    queries=(Query(f"{q.value(m.CONFIG_DRIFT)} == 1", column="drift"),),
)
_CAPACITY = Panel(
    title="Pools",
    unit="short",
    kind="table",
    queries=(
        Query(q.gauge(m.KV_BLOCK_CAPACITY, tier="device"), column="blocks"),
        Query(q.gauge(m.KV_BLOCK_SIZE_TOKENS, how="max"), column="block size"),
    ),
)
_LAST_STEP = Panel(title="Time since the last step", unit="s", queries=(Query(q.age(m.LAST_STEP_TIMESTAMP), ENGINE),))

FLEET = Board(
    uid="kvwatch-fleet",
    title="kvwatch / Fleet",
    about="All engines, one row each, sorted by risk.",
    rows=(
        Row("Who is at risk?", (_TABLE,)),
        Row("How are they?", (_STATES, _LAST_STEP, shared.STALL)),
        Row("Are they alike?", (_VERSIONS, _SETTINGS, _DRIFT, _CAPACITY)),
    ),
)
