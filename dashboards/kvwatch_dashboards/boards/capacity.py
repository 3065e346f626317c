"""*KV capacity*: what the pools hold, what it is worth, and what would fit."""

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_dashboards import scoped as q
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.boards import shared
from kvwatch_dashboards.panel import ENGINE, Board, Level, Panel, Query, Row

_TIER = f"{ENGINE} {{{{tier}}}}"


def _lines(title: str, metric: Metric, *keep: str, unit: str = "short", legend: str = ENGINE) -> Panel:
    return Panel(title=title, unit=unit, queries=(Query(q.gauge(metric, *keep), legend),))


def _rates(title: str, metric: Metric, by: str, unit: str = "short") -> Panel:
    return Panel(
        title=title, unit=unit, kind="stack", queries=(Query(f"sum by ({by}) ({q.rate(metric, by)})", f"{{{{{by}}}}}"),)
    )


_BLOCKS = Panel(
    title="Blocks of the device by state",
    unit="short",
    kind="stack",
    queries=(Query(f"sum by (state) ({q.value(m.KV_BLOCKS, tier='device')})", "{{state}}"),),
)
_USAGE_MAX = Panel(
    title="Highest usage of the last minute",
    unit="percentunit",
    queries=(Query(q.gauge(m.KV_USAGE_RATIO_MAX, "tier", how="max"), _TIER),),
    levels=shared.USAGE_LEVELS,
)
_WASTE = Panel(
    title="Waste",
    unit="percentunit",
    queries=(
        Query(f"1 - {q.ratio(q.gauge(m.KV_FILLED_SLOTS, tier='device'), q.gauge(m.KV_HELD_SLOTS, tier='device'))}"),
    ),
    levels=(Level(s.WASTE_WARNING_RATIO, "yellow"),),
    about="Slots of used blocks of the device without a token, from their sums. Above the line blocks are too large for these requests: choose"
    " a smaller --block-size.",
)
_WASTE_BY_GROUP = Panel(
    title="Waste by group",
    unit="percentunit",
    queries=(Query(q.value(m.KV_WASTE_RATIO, tier="device"), f"{ENGINE} group {{{{group}}}}"),),
)
_TOKENS = Panel(
    title="Tokens that fit",
    unit="short",
    queries=(Query(q.gauge(m.KV_TOKEN_CAPACITY, "tier", how="min"), _TIER),),
    about="Tokens that fit each pool, of the group for which that is fewest. The longest request that can ever run: longer ones"
    " are refused.",
)
_PEAK = Panel(
    title="Blocks that a request held at most",
    unit="short",
    queries=tuple(Query(q.quantile(p, m.REQUEST_KV_BLOCKS), f"p{round(100 * p)}") for p in (0.5, 0.9, 0.99)),
)
_FITS = Panel(
    title="Requests that fit together",
    unit="short",
    queries=(Query(f"{q.gauge(m.KV_BLOCK_CAPACITY, tier='device')} / ({q.mean(m.REQUEST_KV_BLOCKS)} > 0)"),),
    about="Capacity divided by the mean of what a request holds at most. If that is below --max-num-seqs, memory limits"
    " concurrency, not the setting.",
)
_BYTES = Panel(
    title="Bytes of the pools",
    unit="bytes",
    queries=(
        Query(
            f"{q.gauge(m.KV_BLOCK_CAPACITY, 'tier')} * on (job, instance, engine, dp_rank) group_left ()"
            f" {q.gauge(m.KV_BLOCK_BYTES, how='max')}",
            _TIER,
        ),
    ),
)
_MEMORY = Panel(
    title="Memory of the device",
    unit="bytes",
    kind="stack",
    queries=(Query(f"sum by (kind) ({q.value(m.DEVICE_MEMORY_BYTES)})", "{{kind}}"),),
)
_IGNORED = Panel(
    title="Files of tiers that were of no use",
    unit="short",
    queries=(Query(f"sum by (tier, reason) ({q.value(m.KV_TIER_IGNORED_FILES)})", "{{tier}} {{reason}}"),),
)
_LIFETIME = Panel(
    title="Age of blocks at their eviction",
    unit="s",
    queries=tuple(Query(q.quantile(p, m.KV_BLOCK_LIFETIME), f"p{round(100 * p)}") for p in (0.1, 0.5, 0.9)),
)

CAPACITY = Board(
    uid="kvwatch-capacity",
    title="kvwatch / KV capacity",
    about="What the pools hold, what it is worth, and what would fit: for planning.",
    hours=24,
    rows=(
        Row("How full?", (shared.USAGE, _USAGE_MAX, _BLOCKS)),
        Row("How much room?", (_lines("Capacity", m.KV_BLOCK_CAPACITY, "tier", legend=_TIER), _lines("Free blocks", m.KV_FREE_BLOCKS, "tier", legend=_TIER), _TOKENS)),
        Row("What fits?", (_PEAK, _FITS, _lines("Resident blocks of foreign engines", m.KV_INDEXED_BLOCKS, "tier", legend=_TIER))),
        Row("What is wasted, what is shared?", (_WASTE, _WASTE_BY_GROUP, _lines("Shared blocks", m.KV_SHARED_BLOCKS), _lines("Blocks saved by sharing", m.KV_SHARING_SAVED_BLOCKS))),
        Row("What moves?", (_rates("Allocations by reason", m.KV_BLOCK_ALLOCATIONS, "reason"), _rates("Releases by reason", m.KV_BLOCK_RELEASES, "reason"), _rates("Stores by tier", m.KV_BLOCK_STORES, "tier"), _rates("Copies by tier", m.KV_BLOCK_COPIES, "tier"), _LIFETIME, shared.ORPHANED)),
        Row("Bytes and tiers", (_BYTES, _MEMORY, _IGNORED)),
    ),
)  # fmt: skip
