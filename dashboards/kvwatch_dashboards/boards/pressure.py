"""*Pressure*: what is done when memory is short, and what users feel of it, on one time axis."""

from kvwatch.telemetry import metrics as m
from kvwatch_dashboards import scoped as q
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.boards import shared
from kvwatch_dashboards.panel import ENGINE, Board, Level, Panel, Query, Row

_WATERMARK = Panel(
    title="Least free blocks beside the watermark",
    unit="short",
    queries=(
        Query(q.gauge(m.KV_FREE_BLOCKS_MIN, how="min", tier="device"), f"{ENGINE} least free"),
        Query(q.gauge(m.KV_WATERMARK_BLOCKS, tier="device"), f"{ENGINE} watermark"),
    ),
    about="Below the watermark again and again: running requests eat what is kept for their growth; plan for a larger pool. At"
    " 0: somebody is being preempted.",
)
_FAILURES = Panel(
    title="Allocations that found too few blocks",
    unit="cps",
    kind="stack",
    queries=(Query(f"sum by (reason) ({q.rate(m.KV_ALLOCATION_FAILURES, 'reason')})", "{{reason}}"),),
)
_AWAY = Panel(
    title="Time away after a preemption",
    unit="s",
    queries=tuple(
        Query(q.quantile(p, m.PREEMPTION_AWAY, "mode"), f"p{round(100 * p)} {{{{mode}}}}") for p in (0.5, 0.99)
    ),
)
_RECOMPUTE = Panel(
    title="Time to regain what was lost",
    unit="s",
    queries=tuple(Query(q.quantile(p, m.RECOMPUTE_SECONDS), f"p{round(100 * p)}") for p in (0.5, 0.99)),
)
_SWAP_BYTES = Panel(
    title="Bytes between tiers",
    unit="Bps",
    queries=(Query(f"sum by (direction) ({q.rate(m.SWAP_BYTES, 'direction')})", "{{direction}}"),),
)
_SWAP_BLOCKS = Panel(
    title="Blocks between tiers",
    unit="cps",
    queries=(Query(f"sum by (direction) ({q.rate(m.SWAP_BLOCKS, 'direction')})", "{{direction}}"),),
)
_SWAP_TIME = Panel(
    title="Time of a transfer",
    unit="s",
    queries=(Query(q.quantile(0.9, m.SWAP_SECONDS, "direction"), "p90 {{direction}}"),),
)
_TRANSFERS = Panel(
    title="Blocks on their way",
    unit="short",
    queries=(Query(q.gauge(m.KV_BLOCKS_IN_TRANSFER, "tier"), f"{ENGINE} {{{{tier}}}}"),),
)
_FAILED = Panel(
    title="Transfers that failed",
    unit="cps",
    kind="stack",
    queries=(Query(f"sum by (reason) ({q.rate(m.TRANSFER_FAILURES, 'reason')})", "{{reason}}"),),
)
_REBUILD = Panel(
    title="Time without steps while the pool was rebuilt",
    unit="s",
    queries=(Query(q.mean(m.POOL_REBUILD_SECONDS)),),
)
_OLDEST = Panel(
    title="Longest wait",
    unit="s",
    queries=(Query(q.age(m.OLDEST_WAITING_TIMESTAMP)),),
    levels=(Level(s.TTFT_SLO_SECONDS, "red"),),
)
_MEMORY = Panel(
    title="Out of memory",
    unit="short",
    queries=(Query(q.increase(m.OUT_OF_MEMORY)),),
    levels=(Level(1, "red"),),
)

PRESSURE = Board(
    uid="kvwatch-pressure",
    title="kvwatch / Pressure",
    about="What is done when memory is short, beside what users feel, on one time axis.",
    rows=(
        Row("What users feel", (shared.TTFT, shared.ITL, shared.WAITING)),
        Row("How short is memory?", (_WATERMARK, shared.STALL, _FAILURES)),
        Row("Preemption", (shared.PREEMPTIONS, _AWAY, _RECOMPUTE, shared.RECOMPUTE_TAX, _OLDEST, shared.STATES)),
        Row("Tiers", (_SWAP_BYTES, _SWAP_BLOCKS, _SWAP_TIME, _TRANSFERS, _FAILED)),
        Row("The pool and the device", (_REBUILD, _MEMORY)),
    ),
)
