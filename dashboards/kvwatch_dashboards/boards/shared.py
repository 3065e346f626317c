"""Panels that several dashboards show, so that one question has one answer."""

from kvwatch.telemetry import metrics as m
from kvwatch_dashboards import scoped as q
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.panel import ENGINE, Level, Panel, Query

LATE_TTFT = (Level(s.TTFT_SLO_SECONDS, "red"),)
LATE_ITL = (Level(s.ITL_SLO_SECONDS, "red"),)
USAGE_LEVELS = (Level(s.USAGE_WARNING_RATIO, "yellow"), Level(s.USAGE_CRITICAL_RATIO, "red"))

STALL = Panel(
    title="Time with requests waiting for blocks",
    unit="percentunit",
    queries=(Query(q.time_ratio(m.KV_STALL_SECONDS)),),
    levels=(Level(s.STALL_RATIO, "red"),),
    about="Part of the time in which at least one request waited for KV blocks. Near 100 %: memory is the bottleneck; near 0 %"
    " with a queue: it is something else, see what requests wait for.",
)
WAITING = Panel(
    title="What requests wait for",
    unit="short",
    kind="stack",
    queries=(Query(f"sum by (reason) ({q.value(m.WAITING_REQUESTS)})", "{{reason}}"),),
)
STATES = Panel(
    title="Requests by state",
    unit="short",
    kind="stack",
    queries=(Query(f"sum by (state) ({q.value(m.REQUESTS)})", "{{state}}"),),
)
USAGE = Panel(
    title="Blocks in use",
    unit="percentunit",
    queries=(Query(q.gauge(m.KV_USAGE_RATIO, how="max", tier="device")),),
    levels=USAGE_LEVELS,
    about="Used blocks of each device pool divided by its capacity; cached blocks count as free. Sustained above the red line:"
    " the next request waits. One line for each engine, never an average.",
)
MODEL_SHARE = Panel(
    title="Time of steps by phase",
    unit="percentunit",
    kind="stack",
    queries=(
        Query(
            f"sum by (phase) ({q.observations(m.STEP_DURATION, 'phase', part='_sum')})"
            f" / ignoring (phase) group_left () sum({q.observations(m.STEP_DURATION, part='_sum')})",
            "{{phase}}",
        ),
    ),
    about="Where the time of steps goes. Mostly forward while requests wait for tokens: bound by compute. Mostly schedule,"
    " build and apply: steps are too small, raise --max-batch-tokens.",
)
PREEMPTIONS = Panel(
    title="Preemptions by mode and reason",
    unit="cps",
    kind="stack",
    queries=(Query(f"sum by (mode, reason) ({q.rate(m.PREEMPTIONS, 'mode', 'reason')})", "{{mode}}, {{reason}}"),),
)
RECOMPUTE_TAX = Panel(
    title="Tokens computed twice",
    unit="percentunit",
    queries=(Query(q.ratio(q.rate(m.RECOMPUTED_TOKENS), q.rate(m.COMPUTED_TOKENS))),),
    levels=(Level(s.RECOMPUTE_TAX_RATIO, "red"),),
    about="Recomputed tokens divided by all computed tokens: the tax of preemption by recomputation. Above the line, raise the"
    " watermark, swap to the host, or enlarge the pool.",
)
ORPHANED = Panel(
    title="Blocks that nobody holds",
    unit="short",
    queries=(Query(q.gauge(m.KV_ORPHANED_BLOCKS)),),
    levels=(Level(1, "red"),),
)
HIT_RATIO = Panel(
    title="Hit rate",
    unit="percentunit",
    queries=(Query(q.ratio(q.rate(m.PREFIX_CACHE_HIT_TOKENS), q.rate(m.PREFIX_CACHE_QUERIED_TOKENS))),),
    about="Prompt tokens found in the cache divided by those looked up, of each engine. A fall without a restart: a changed"
    " prompt template, another routing, or evictions; see the row on why hits fall.",
)
TTFT = Panel(
    title="Time to first token",
    unit="s",
    queries=tuple(Query(q.quantile(p, m.TIME_TO_FIRST_TOKEN), f"p{round(100 * p)}") for p in (0.5, 0.9, 0.99)),
    levels=LATE_TTFT,
    has_exemplars=True,
)
ITL = Panel(
    title="Time between tokens",
    unit="s",
    queries=tuple(Query(q.quantile(p, m.INTER_TOKEN_LATENCY), f"p{round(100 * p)}") for p in (0.5, 0.9, 0.99)),
    levels=LATE_ITL,
    has_exemplars=True,
)
LAG = Panel(
    title="Events still to be read",
    unit="short",
    queries=(Query(q.gauge(m.TELEMETRY_LAG, "subscriber"), f"{ENGINE} {{{{subscriber}}}}"),),
    levels=(Level(s.LAG_EVENTS, "red"),),
)
VIOLATIONS = Panel(
    title="Ledger violations",
    unit="short",
    queries=(Query(q.increase(m.LEDGER_VIOLATIONS)),),
    levels=(Level(1, "red"),),
)
AGE = Panel(
    title="Age of what is shown",
    unit="s",
    queries=(Query(q.age(m.LEDGER_UPDATE_TIMESTAMP)),),
    about="Time since the newest event in the view. It grows while an engine is idle; growing while requests run means that the"
    " numbers are frozen: look at kvwatch's log.",
)
