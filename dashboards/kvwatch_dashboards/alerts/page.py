"""Alerts for which somebody gets up: users suffer now, or nobody can see whether they do."""

from kvwatch.telemetry import metrics as m
from kvwatch_dashboards import promql as q
from kvwatch_dashboards import recording as r
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.alerts.alert import Alert

WHO = "{{ $labels.engine }} rank {{ $labels.dp_rank }}"
_BUDGET = 1 - s.SLO_TARGET_RATIO
_FAST = f"{s.PAGE_BURN * _BUDGET:.4g}"

PAGES: tuple[Alert, ...] = (
    Alert(
        name="KVWatchRequestsStalledForBlocks",
        severity="page",
        expr=f"({r.STALL.name} > {s.STALL_RATIO}) and ({r.TTFT_LATE['5m'].name} > {_FAST})"
        f" and ({r.TTFT_LATE['1h'].name} > {_FAST})",
        lasts="2m",
        summary=f"{WHO}: requests wait for KV blocks and first tokens are late",
        description=f"Requests waited for blocks during {{{{ $value | humanizePercentage }}}} of the last 5 minutes, and first tokens"
        f" take longer than {s.TTFT_SLO_SECONDS:g} s so often that a month's budget is gone in two days. Shed load, or give"
        " the pool more memory.",
    ),
    Alert(
        name="KVWatchEngineStuck",
        severity="page",
        expr=f"({q.series(m.ENGINE_STATE, state='~stalled|failed')} == 1) or"
        f" (time() - {q.series(m.LAST_STEP_TIMESTAMP)} > {s.STUCK_SECONDS}"
        f" and on (job, instance, engine, dp_rank) {q.gauge(m.REQUESTS, state='running')} > 0)",
        lasts="1m",
        summary=f"{WHO}: the engine is stuck or failed",
        description="No step ends although requests run, or the engine says itself that it is stalled or failed. Nothing"
        " will be answered until it is restarted.",
    ),
    Alert(
        name="KVWatchLedgerViolation",
        severity="page",
        expr=f"{q.increase(m.LEDGER_VIOLATIONS, '15m')} > 0",
        lasts="0m",
        summary=f"{WHO}: the ledger contradicts the engine",
        description="The number of used, cached or empty blocks that kvwatch shows is not what the engine has, or the engine"
        " breaks its own law. Do not trust the pool's gauges; K/V may be corrupt.",
    ),
    Alert(
        name="KVWatchTelemetryAbsent",
        severity="page",
        expr=f'(up{{job=~"{s.ENGINE_JOBS}|{s.SIDECAR_JOBS}"}} == 1 unless on (job, instance) {q.series(m.BUILD_INFO)})'
        f' or (up{{job=~"{s.SIDECAR_JOBS}"}} == 0)',
        lasts="5m",
        summary="{{ $labels.instance }}: kvwatch is absent though the engine may be up",
        description="The target answers without kvwatch's metrics, or a sidecar does not answer at all. Engines go on, but"
        " nobody sees what their cache does, and no other alert can fire.",
    ),
    Alert(
        name="KVWatchEngineAbsent",
        severity="page",
        expr=f'(up{{job=~"{s.ENGINE_JOBS}"}} == 0) or ({q.series(m.SOURCE_UP)} == 0)'
        f" or absent({q.series(m.BUILD_INFO)})",
        lasts="2m",
        summary="Engine not reached: {{ $labels.instance }} {{ $labels.engine }}",
        description="The scrape of an engine fails, a sidecar does not reach the engine that it watches, or nothing of kvwatch is"
        " scraped at all.",
    ),
)  # fmt: skip
