"""*Prefix cache*: what is found, what is not and why, and what lies in it."""

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_dashboards import scoped as q
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.boards import shared
from kvwatch_dashboards.panel import ENGINE, Board, Level, Panel, Query, Row


def _shape(title: str, metric: Metric) -> Panel:
    return Panel(title=title, unit="short", queries=(Query(q.value(metric), f"{ENGINE} {{{{tier}}}}"),))


_HITS = Panel(
    title="Tokens looked up and found",
    unit="short",
    queries=(
        Query(f"sum({q.rate(m.PREFIX_CACHE_QUERIED_TOKENS)})", "looked up/s"),
        Query(f"sum by (tier) ({q.rate(m.PREFIX_CACHE_HIT_TOKENS, 'tier')})", "found on {{tier}}/s"),
        Query(f"sum({q.rate(m.PREFIX_CACHE_RESUMED_HIT_TOKENS)})", "found again by preempted ones/s"),
    ),
    about="Hits by the tier that had them. What preempted requests find again is kept apart: thrash must not look like a good"
    " hit rate.",
)
_FLEET = Panel(
    title="Hit rate of all",
    unit="percentunit",
    kind="number",
    queries=(
        Query(
            q.ratio(f"sum({q.rate(m.PREFIX_CACHE_HIT_TOKENS)})", f"sum({q.rate(m.PREFIX_CACHE_QUERIED_TOKENS)})"), "all"
        ),
    ),
    about="All hits divided by all queries of the selected engines, not a mean of their rates. Compare with yesterday.",
)
_REGRETTED = Panel(
    title="Tokens that had been evicted",
    unit="percentunit",
    queries=(Query(q.ratio(q.rate(m.PREFIX_CACHE_REGRETTED_TOKENS), q.rate(m.PREFIX_CACHE_QUERIED_TOKENS))),),
    levels=(Level(s.REGRETTED_RATIO, "red"),),
    about="Prompt tokens that would have been found, had they not been evicted for want of room. Above the line a larger pool or"
    " a tier behind it pays.",
)
_GRANULARITY = Panel(
    title="Tokens in no full block",
    unit="percentunit",
    queries=(Query(q.ratio(q.rate(m.PREFIX_CACHE_GRANULARITY_LOST_TOKENS), q.rate(m.PREFIX_CACHE_QUERIED_TOKENS))),),
    about="Prompt tokens that can never be found, since they fill no block. Large beside few hits: a smaller --block-size.",
)
_IDLE = Panel(
    title="Idle time at eviction beside gap before reuse",
    unit="s",
    queries=(
        Query(q.quantile(0.5, m.KV_BLOCK_IDLE), "idle at eviction, median"),
        Query(q.quantile(0.5, m.KV_BLOCK_REUSE_GAP), "gap before reuse, median"),
    ),
    about="Blocks are evicted after so long without use, and reused after so long. When the lines meet, the cache is as small as"
    " it may be: anything that pushes idle time below the gap costs hits.",
)
_PREMATURE = Panel(
    title="Removed blocks that came back",
    unit="percentunit",
    queries=(Query(q.ratio(q.observations(m.KV_PREMATURE_EVICTION_AWAY), q.rate(m.KV_BLOCK_EVICTIONS))),),
    levels=(Level(s.PREMATURE_RATIO, "red"),),
    about="Of a sidecar's engine: the part of removals that was regretted. Above the line: more memory, or better routing.",
)
_EXTRA = Panel(
    title="Blocks that would have kept them",
    unit="short",
    queries=tuple(
        Query(q.quantile(p, m.KV_PREMATURE_EVICTION_EXTRA), f"{round(100 * p)}% of them") for p in (0.5, 0.9)
    ),
)
_AWAY = Panel(
    title="Time until they came back",
    unit="s",
    queries=(Query(q.quantile(0.5, m.KV_PREMATURE_EVICTION_AWAY), "median"),),
)
_EVICTIONS = Panel(
    title="Evictions by reason",
    unit="short",
    kind="stack",
    queries=(Query(f"sum by (reason) ({q.rate(m.KV_BLOCK_EVICTIONS, 'reason')})", "{{reason}}"),),
)
_PINNED = Panel(
    title="Pinned blocks beside free ones",
    unit="short",
    queries=(
        Query(q.gauge(m.KV_PINNED_BLOCKS, tier="device"), f"{ENGINE} pinned"),
        Query(q.gauge(m.KV_FREE_BLOCKS, tier="device"), f"{ENGINE} free"),
    ),
    about="What is pinned is never evicted: the pool is smaller by it for everybody else. Unpin what nobody asks for.",
)
_DUPLICATES = Panel(
    title="Blocks computed twice at the same time",
    unit="short",
    queries=(Query(q.rate(m.PREFIX_CACHE_DUPLICATE_BLOCKS)),),
    about="Many: requests with a common prefix arrive together; send the first of them alone, the others a moment later.",
)
_MISMATCHES = Panel(
    title="Blocks that hold something else",
    unit="short",
    queries=(Query(q.increase(m.PREFIX_CACHE_MISMATCHES)),),
    about="Only with --strict-prefix-cache. Anything but 0 is a defect: keep a recording and report it.",
)

PREFIX_CACHE = Board(
    uid="kvwatch-prefix-cache",
    title="kvwatch / Prefix cache",
    about="What is found, what is not and why, and what lies in the cache.",
    hours=24,
    rows=(
        Row("What is found?", (_FLEET, shared.HIT_RATIO, _HITS)),
        Row("What is not found, and why?", (_REGRETTED, _GRANULARITY, _EVICTIONS, _IDLE)),
        Row("What stays, what is there twice?", (_PINNED, _DUPLICATES, _MISMATCHES)),
        Row("What would more memory save?", (_PREMATURE, _EXTRA, _AWAY)),
        Row("What lies in it?", (_shape("Beginnings", m.KV_PREFIX_ROOTS), _shape("Ends of shared prefixes", m.KV_PREFIX_BRANCHES), _shape("Most popular prefix", m.KV_PREFIX_FAN_OUT_MAX), _shape("Longest prefix", m.KV_PREFIX_DEPTH_MAX))),
    ),
)  # fmt: skip
