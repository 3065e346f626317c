"""Recording rules: ratios from their parts, once, for alerts and dashboards that look at all engines.

Names are `level:metric:operation`; the level `engine` keeps every label but those that the metrics declare.
"""

from dataclasses import dataclass

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_dashboards import promql as q
from kvwatch_dashboards import settings as s


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule."""

    name: str
    expr: str


SHORT, MIDDLE, LONG, DAY = "5m", "30m", "1h", "6h"

STALL = Recording("engine:kvwatch_kv_stall_seconds:rate5m", q.rate(m.KV_STALL_SECONDS, SHORT))
PREEMPTIONS = Recording("engine:kvwatch_preemptions:rate5m", q.rate(m.PREEMPTIONS, SHORT, reason="blocks"))
ADMISSIONS = Recording("engine:kvwatch_admissions:rate5m", q.observations(m.QUEUE_SECONDS, SHORT))
RECOMPUTE_TAX = Recording(
    "engine:kvwatch_recompute_tax:ratio_rate5m",
    q.ratio(q.rate(m.RECOMPUTED_TOKENS, SHORT), q.rate(m.COMPUTED_TOKENS, SHORT)),
)
HIT_RATIO = Recording(
    "engine:kvwatch_prefix_cache_hit:ratio_rate30m",
    q.ratio(q.rate(m.PREFIX_CACHE_HIT_TOKENS, MIDDLE), q.rate(m.PREFIX_CACHE_QUERIED_TOKENS, MIDDLE)),
)
REGRETTED_RATIO = Recording(
    "engine:kvwatch_prefix_cache_regretted:ratio_rate30m",
    q.ratio(q.rate(m.PREFIX_CACHE_REGRETTED_TOKENS, MIDDLE), q.rate(m.PREFIX_CACHE_QUERIED_TOKENS, MIDDLE)),
)
PREMATURE_RATIO = Recording(
    "engine:kvwatch_kv_premature_evictions:ratio_rate30m",
    q.ratio(q.observations(m.KV_PREMATURE_EVICTION_AWAY, MIDDLE), q.rate(m.KV_BLOCK_EVICTIONS, MIDDLE)),
)
USAGE = Recording(
    "engine:kvwatch_kv_usage:ratio",
    q.ratio(q.gauge(m.KV_BLOCKS, tier="device", state="used"), q.gauge(m.KV_BLOCK_CAPACITY, tier="device")),
)


def _late(name: str, metric: Metric, bound: float, window: str) -> Recording:
    return Recording(f"engine:kvwatch_{name}_late:ratio_rate{window}", q.late_ratio(metric, bound, window))


TTFT_LATE = {
    w: _late("time_to_first_token", m.TIME_TO_FIRST_TOKEN, s.TTFT_SLO_SECONDS, w) for w in (SHORT, MIDDLE, LONG, DAY)
}
ITL_LATE = {
    w: _late("inter_token_latency", m.INTER_TOKEN_LATENCY, s.ITL_SLO_SECONDS, w) for w in (SHORT, MIDDLE, LONG, DAY)
}

RECORDINGS: tuple[Recording, ...] = (
    STALL, PREEMPTIONS, ADMISSIONS, RECOMPUTE_TAX, HIT_RATIO, REGRETTED_RATIO, PREMATURE_RATIO, USAGE,
    *TTFT_LATE.values(), *ITL_LATE.values(),
)  # fmt: skip
