"""For each alert: series that are well, then sick, then well again, point by point; a point is a minute, or five."""

from collections.abc import Iterator
from dataclasses import dataclass

TARGET = 'job="kvwatch",instance="a:9400"'
ENGINE = f'{TARGET},engine="chat",dp_rank="0",model_name="m"'
DAY = 24 * 12
"""In points of five minutes."""

Phase = tuple[int, float | None]
"""Points, and a value; none for a series that is not there."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One story. Times are points since its beginning."""

    alert: str
    series: dict[str, str]
    quiet: tuple[int, ...] = (25,)
    """Before: the alert does not fire."""
    fires: int = 85
    clears: int = 170
    minutes: int = 1
    """Between two points: five where an alert looks back for hours, so that promtool has less to do."""


def hold(*phases: Phase) -> str:
    """Return a gauge that holds a value for some points, then another."""
    return " ".join("_" if value is None else f"{value:g}" for points, value in phases for _ in range(points))


def grow(*phases: tuple[int, float]) -> str:
    """Return a counter that grows by so much a point for some points, then by another amount."""
    return " ".join(f"{total:g}" for total in _totals(phases))


def _totals(phases: tuple[tuple[int, float], ...]) -> Iterator[float]:
    total = 0.0
    for points, step in phases:
        for _ in range(points):
            yield total
            total += step


def of(name: str, **labels: str) -> str:
    """Return a series of the engine."""
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f"kvwatch_{name}{{{ENGINE}{more}}}"


def sick(well: float, ill: float) -> str:
    """Return a gauge: well for 30 points, ill for 60, well for 120."""
    return hold((30, well), (60, ill), (120, well))


def sick_counter(well: float, ill: float) -> str:
    """Return a counter by its growth a point: well for 30 points, ill for 60, well for 120."""
    return grow((30, well), (60, ill), (120, well))


def late(name: str, bound: str, ill: int = 60, well: int = 120) -> dict[str, str]:
    """Return a histogram of 60 observations a point, of which half are late while it is ill."""
    whole = 30 + ill + well
    return {
        of(f"{name}_bucket", le=bound): grow((30, 60), (ill, 30), (well, 60)),
        of(f"{name}_count"): grow((whole, 60)),
    }


HERE = {f'kvwatch_build_info{{{TARGET},version="1"}}': hold((210, 1)), f"up{{{TARGET}}}": hold((210, 1))}
"""What a target that is scraped shows."""

SIDECAR = 'job="kvwatch-sidecar",instance="s:9400"'
TTFT, ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"

PAGE_CASES: tuple[Case, ...] = (
    Case(
        alert="KVWatchRequestsStalledForBlocks",
        series={of("kv_stall_seconds_total"): sick_counter(0, 48), **late(TTFT, "2.5")},
    ),
    Case(alert="KVWatchEngineStuck", series={of("engine_state", state="stalled"): sick(0, 1)}),
    Case(
        alert="KVWatchEngineStuck",
        series={
            of("last_step_timestamp_seconds"): " ".join(
                str(60 * (30 if 30 <= minute < 90 else minute)) for minute in range(210)
            ),
            of("requests", state="running"): hold((210, 3)),
        },
    ),
    Case(
        alert="KVWatchLedgerViolation",
        series={of("ledger_violations_total"): sick_counter(0, 1)},
    ),
    Case(
        alert="KVWatchTelemetryAbsent",
        series={
            f'kvwatch_build_info{{{SIDECAR},version="1"}}': sick(1, 1),
            f"up{{{SIDECAR}}}": sick(1, 0),
        },
    ),
    Case(
        alert="KVWatchTelemetryAbsent",
        series={
            f'kvwatch_build_info{{{TARGET},version="1"}}': hold((30, 1), (60, None), (120, 1)),
            f"up{{{TARGET}}}": hold((210, 1)),
        },
    ),
    Case(alert="KVWatchEngineAbsent", series={**HERE, of("source_up"): sick(1, 0)}),
    Case(alert="KVWatchEngineAbsent", series={**HERE, f"up{{{TARGET}}}": sick(1, 0)}),
    Case(
        alert="KVWatchEngineAbsent",
        series={f'kvwatch_build_info{{{TARGET},version="1"}}': hold((30, 1), (60, None), (120, 1))},
    ),
)

TICKET_CASES: tuple[Case, ...] = (
    Case(
        alert="KVWatchLowFreeBlocks",
        series={
            of("kv_free_blocks_min", tier="device", window="60s"): sick(100, 3),
            of("kv_watermark_blocks", tier="device"): hold((210, 10)),
        },
    ),
    Case(
        alert="KVWatchPreemptionStorm",
        series={
            of("preemptions_total", mode="swap", reason="blocks"): sick_counter(0, 30),
            of("queue_seconds_count"): grow((210, 60)),
        },
    ),
    Case(
        alert="KVWatchRecomputeTax",
        series={
            of("recomputed_tokens_total"): sick_counter(0, 2000),
            of("computed_tokens_total"): grow((210, 10_000)),
        },
    ),
    Case(
        alert="KVWatchAllocationFailures",
        series={
            of("kv_allocation_failures_total", reason="growth"): sick_counter(0, 30),
            of("kv_allocation_failures_total", reason="admission"): grow((210, 600)),
        },
    ),
    Case(
        alert="KVWatchOrphanedBlocks",
        series={of("kv_orphaned_blocks", tier="device"): hold((30, 0), (60, 7), (120, 0))},
    ),
    Case(
        alert="KVWatchPrematureEvictions",
        series={
            of("prefix_cache_regretted_tokens_total"): sick_counter(0, 500),
            of("prefix_cache_queried_tokens_total"): grow((210, 4000)),
        },
        fires=88,
    ),
    Case(
        alert="KVWatchPrematureEvictions",
        series={
            of("kv_premature_eviction_away_seconds_count", tier="device"): sick_counter(0, 40),
            of("kv_block_evictions_total", tier="device", reason="removed"): grow((210, 60)),
        },
        fires=88,
    ),
    Case(
        alert="KVWatchHitRateCollapse",
        series={
            of("prefix_cache_hit_tokens_total", tier="device"): grow((DAY + 12, 15_000), (24, 1500), (36, 15_000)),
            of("prefix_cache_queried_tokens_total"): grow((DAY + 72, 30_000)),
        },
        quiet=(6, DAY + 10),
        fires=DAY + 34,
        clears=DAY + 70,
        minutes=5,
    ),
    Case(
        alert="KVWatchQueueNearLimit",
        series={
            of("requests", state="waiting"): sick(10, 90),
            of("requests", state="running"): hold((210, 90)),
            of("queue_limit", unit="requests"): hold((210, 100)),
            of("queue_limit", unit="tokens"): hold((210, 10)),
        },
    ),
    Case(alert="KVWatchFirstTokenBurn", series=late(TTFT, "2.5", 24, 120), fires=50, clears=140, minutes=5),
    Case(alert="KVWatchTokenLatencyBurn", series=late(ITL, "0.2", 24, 120), fires=50, clears=140, minutes=5),
    Case(
        alert="KVWatchTransferFailures",
        series={
            of("transfer_failures_total", reason="disk_full"): sick_counter(0, 1),
            of("transfer_failures_total", reason="dropped"): grow((210, 5)),
        },
    ),
    Case(
        alert="KVWatchRebuildFailed",
        series={
            of("pool_rebuilds_total", outcome="failed"): grow((30, 0), (1, 1), (180, 0)),
            of("pool_rebuilds_total", outcome="refused"): grow((210, 1)),
        },
        fires=60,
        clears=120,
    ),
    Case(
        alert="KVWatchConfigDrift",
        series={of("config_drift", key="watermark_blocks"): hold((30, 0), (90, 1), (90, 0))},
        quiet=(25, 60),
        fires=110,
        clears=150,
    ),
    Case(
        alert="KVWatchLeftPaused",
        series={
            of("waiting_requests", reason="paused"): sick(0, 4),
            of("waiting_requests", reason="blocks"): hold((210, 4)),
        },
    ),
    Case(
        alert="KVWatchLeftDraining",
        series={
            of("engine_state", state="draining"): sick(0, 1),
            of("engine_state", state="running"): sick(1, 0),
        },
    ),
    Case(
        alert="KVWatchAuthorisationFailures",
        series={of("admin_auth_failures_total", reason="unknown"): sick_counter(0, 30)},
    ),
    Case(
        alert="KVWatchTelemetryLagging",
        series={of("telemetry_dropped_total", subscriber="recorder"): sick_counter(0, 100)},
    ),
    Case(
        alert="KVWatchTelemetryLagging",
        series={of("telemetry_lag_events", subscriber="recorder"): sick(10, 60_000)},
    ),
    Case(
        alert="KVWatchSourceIncomplete",
        series={of("source_complete"): sick(1, 0), of("source_up"): hold((210, 1))},
    ),
    Case(alert="KVWatchSourceDrifting", series={of("source_drift_blocks"): sick(0, 12)}),
)

QUIET_CASES: tuple[Case, ...] = (
    # A low hit rate is no news: without traffic, or when a cache is empty since a restart.
    Case(
        alert="KVWatchHitRateCollapse",
        series={
            of("prefix_cache_hit_tokens_total", tier="device"): grow((DAY + 12, 150), (24, 15), (36, 150)),
            of("prefix_cache_queried_tokens_total"): grow((DAY + 72, 300)),
        },
        quiet=(6, DAY + 20, DAY + 34),
        minutes=5,
    ),
    Case(
        alert="KVWatchHitRateCollapse",
        series={
            of("prefix_cache_hit_tokens_total", tier="device"): grow((DAY + 12, 15_000), (24, 1500), (36, 15_000)),
            of("prefix_cache_queried_tokens_total"): grow((DAY + 12, 30_000)) + " " + grow((60, 30_000)),
        },
        quiet=(6, DAY + 20, DAY + 34),
        minutes=5,
    ),
    # What the device no longer finds and the host does is a hit all the same: tiers are summed before they are divided.
    Case(
        alert="KVWatchHitRateCollapse",
        series={
            of("prefix_cache_hit_tokens_total", tier="device"): grow((DAY + 12, 15_000), (24, 1500), (36, 15_000)),
            of("prefix_cache_hit_tokens_total", tier="host"): grow((DAY + 12, 0), (24, 13_500), (36, 0)),
            of("prefix_cache_queried_tokens_total"): grow((DAY + 72, 30_000)),
        },
        quiet=(6, DAY + 20, DAY + 34),
        minutes=5,
    ),
    # Waiting for blocks alone does not page: only together with late first tokens.
    Case(
        alert="KVWatchRequestsStalledForBlocks",
        series={
            of("kv_stall_seconds_total"): sick_counter(0, 48),
            of(f"{TTFT}_bucket", le="2.5"): grow((210, 60)),
            of(f"{TTFT}_count"): grow((210, 60)),
        },
        quiet=(25, 60, 85),
    ),
    # An idle engine makes no steps.
    Case(
        alert="KVWatchEngineStuck",
        series={
            of("last_step_timestamp_seconds"): hold((210, 60)),
            of("requests", state="running"): hold((210, 0)),
        },
        quiet=(25, 60, 200),
    ),
)
"""Stories in which an alert stays silent although a part of its condition holds."""
