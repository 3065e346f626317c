"""*Incident*: one row for each question of a person on call, over all selected engines."""

from kvwatch.telemetry import metrics as m
from kvwatch_dashboards import scoped as q
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.boards import shared
from kvwatch_dashboards.panel import ENGINE, Board, Level, Panel, Query, Row, Text

_BY_ENGINE = "job, instance, engine, dp_rank, model_name"

_WORST = Panel(
    title="Usage, worst first",
    unit="percentunit",
    kind="table",
    span=8,
    queries=(Query(f"topk(10, {q.gauge(m.KV_USAGE_RATIO, how='max', tier='device')})", column="in use"),),
    levels=shared.USAGE_LEVELS,
    about="The ten engines with the fullest pools. One full beside empty ones: look at the router, not at the pool.",
)
_WAITING_BY_ENGINE = Panel(
    title="Waiting requests by engine",
    unit="short",
    queries=(Query(q.gauge(m.REQUESTS, state="waiting")),),
    about="Who has the queue? If one engine has all of it, drain it or mend the routing; if all have one, capacity is short.",
)
_STEP_TIME = Panel(
    title="Slow steps by engine",
    unit="s",
    queries=(Query(q.quantile(0.99, m.STEP_DURATION, "engine", "dp_rank", phase="forward"), ENGINE),),
    about="99th percentile of the forward pass, by engine. One slower than its neighbours with the same load: look at that"
    " machine.",
)
_CHANGED = Panel(
    title="Settings that were changed",
    unit="short",
    queries=(Query(q.happened(m.CONFIG_CHANGES, "key"), f"{ENGINE} {{{{key}}}}"),),
    about="Live changes of settings. Ask whoever made them: the audit trail of the admin API has the reason, and can revert"
    " them.",
)
_REBUILDS = Panel(
    title="Rebuilds and restarts",
    unit="short",
    queries=(
        Query(q.happened(m.POOL_REBUILDS, "outcome"), f"{ENGINE} rebuild {{{{outcome}}}}"),
        Query(q.increase(m.SOURCE_RESETS), f"{ENGINE} restart"),
    ),
    about="Attempts to resize a pool, and restarts that a sidecar has seen. A restart empties the prefix cache: hits come back"
    " within the time that it takes to fill.",
)
_TRAFFIC = Panel(
    title="Tokens in and out",
    unit="short",
    queries=(
        Query(f"sum({q.rate(m.PROMPT_TOKENS)})", "prompt tokens/s"),
        Query(f"sum({q.rate(m.GENERATED_TOKENS)})", "generated tokens/s"),
    ),
    about="The load in tokens. If prompts grew while answers did not, somebody sends longer prompts: prefill and memory feel it"
    " first.",
)
_VICTIMS = Panel(
    title="Time away after a preemption",
    unit="s",
    queries=(Query(q.quantile(0.9, m.PREEMPTION_AWAY, "mode"), "p90 {{mode}}"),),
)
_IN_FAVOUR = Panel(
    title="Blocks given up by why",
    unit="short",
    kind="stack",
    queries=(Query(f"sum by (reason) ({q.rate(m.KV_BLOCK_RELEASES, 'reason')})", "{{reason}}"),),
    about="Blocks given up in a second. `preempted` is work taken from somebody: who, and in whose favour, is not a metric; see"
    " the requests of the admin API, or `kvwatch tail --follow`.",
)
_STATE = Panel(
    title="Stalled, failed, draining",
    unit="short",
    queries=(Query(f"sum by (state) ({q.value(m.ENGINE_STATE, state='!running')})", "{{state}}"),),
    levels=(Level(1, "red"),),
    about="Engines in each state but `running`. stalled: a step takes longer than --stall-seconds. failed: restart it and read"
    " its log.",
)
_OLDEST = Panel(
    title="Longest wait",
    unit="s",
    queries=(Query(q.age(m.OLDEST_WAITING_TIMESTAMP)),),
    levels=(Level(s.TTFT_SLO_SECONDS, "red"),),
)
_LAST_STEP = Panel(
    title="Time since the last step, while requests run",
    unit="s",
    queries=(
        Query(f"({q.age(m.LAST_STEP_TIMESTAMP)}) and on ({_BY_ENGINE}) ({q.gauge(m.REQUESTS, state='running')} > 0)"),
    ),
    levels=(Level(s.STUCK_SECONDS, "red"),),
    about="Since when nothing has moved. Growing by a second a second: the engine is stuck; restart it.",
)
_CHURN = Panel(
    title="Evictions, and what of it was regretted",
    unit="short",
    queries=(
        Query(f"sum({q.rate(m.KV_BLOCK_EVICTIONS)})", "evicted blocks/s"),
        Query(f"sum({q.rate(m.PREFIX_CACHE_REGRETTED_TOKENS)} / on (job, instance, engine, dp_rank) group_left ()"
              f" {q.gauge(m.KV_BLOCK_SIZE_TOKENS, how='max')})", "regretted blocks/s"),
        Query(f"sum({q.observations(m.KV_PREMATURE_EVICTION_AWAY)})", "came back/s"),
    ),
    about="Evictions alone are harmless: a full cache makes room. Regretted ones were asked for again: the pool is too small for"
    " its prefixes.",
)  # fmt: skip
_HITS_LOST = Panel(
    title="Where prompt tokens went",
    unit="percentunit",
    kind="stack",
    queries=tuple(
        Query(q.ratio(f"sum({q.rate(metric)})", f"sum({q.rate(m.PREFIX_CACHE_QUERIED_TOKENS)})"), name)
        for metric, name in (
            (m.PREFIX_CACHE_HIT_TOKENS, "found"),
            (m.PREFIX_CACHE_REGRETTED_TOKENS, "had been evicted"),
            (m.PREFIX_CACHE_GRANULARITY_LOST_TOKENS, "in no full block"),
        )
    ),
    about="What is not in the picture was never seen before. More evicted: memory. More in no full block: prompts are shorter,"
    " or blocks too large. Less found and neither: prompts have changed.",
)
_EVICTIONS = Panel(
    title="Evictions by reason",
    unit="short",
    kind="stack",
    queries=(Query(f"sum by (reason) ({q.rate(m.KV_BLOCK_EVICTIONS, 'reason')})", "{{reason}}"),),
)
_HELD = Panel(
    title="Blocks for each running request",
    unit="short",
    queries=(Query(q.ratio(q.gauge(m.KV_BLOCKS, tier="device", state="used"), q.gauge(m.REQUESTS, state="running"))),),
    about="Growing without longer requests is the other sign of a leak. Prefixes that are pinned or shared also count.",
)
_ROOM = Panel(
    title="Free blocks, least of the last minute",
    unit="short",
    queries=(Query(q.gauge(m.KV_FREE_BLOCKS_MIN, how="min", tier="device")), Query(q.gauge(m.KV_WATERMARK_BLOCKS), f"{ENGINE} watermark")),
    about="What can be taken away at any moment. An engine whose line stays far above the watermark can take another's load.",
)  # fmt: skip
_QUEUE = Panel(
    title="Queue against its limit",
    unit="percentunit",
    queries=(Query(q.ratio(q.gauge(m.REQUESTS, state="waiting"), q.gauge(m.QUEUE_LIMIT, unit="requests"))),),
    levels=(Level(s.QUEUE_RATIO, "red"),),
    about="At 100 % requests get 429. Draining an engine sends its load here: look at this first.",
)
_SAFE = Text(
    title="What can I safely do?",
    height=9,
    markdown="""| doing | costs | look first |
| --- | --- | --- |
| drain an engine | its running requests finish; its cache is lost when it ends | do the others have free blocks above their watermark, and room in their queues? |
| raise the watermark | nothing is lost; requests wait a little longer before they start | is it below the number of running sequences? |
| pause admission | requests wait until it is resumed | only for minutes: the queue has a limit |
| reset the prefix cache | hits are lost until it has filled again; running requests go on | is the hit rate worth anything now? |
| resize the pool | steps stand still for a moment; shrinking drops cached blocks, and is refused if used ones do not fit | free blocks, device memory |
| restart an engine | running requests and the cache are lost | only if it is stuck, failed, or leaks |
""",
)
_UP = Panel(
    title="Sources reached and whole",
    unit="short",
    queries=(Query(q.value(m.SOURCE_UP), f"{ENGINE} reached"), Query(q.value(m.SOURCE_COMPLETE), f"{ENGINE} whole")),
)

INCIDENT = Board(
    uid="kvwatch-incident",
    title="kvwatch / Incident",
    about="One row for each question of a person on call. Begin at the top; each panel says what to do.",
    hours=3,
    rows=(
        Row("KV-bound or compute-bound?", (shared.STALL, shared.WAITING, shared.MODEL_SHARE)),
        Row("Which replicas?", (_WORST, _WAITING_BY_ENGINE, _STEP_TIME)),
        Row("What changed?", (_CHANGED, _REBUILDS, _TRAFFIC)),
        Row("Who was preempted, and in whose favour?", (shared.PREEMPTIONS, _VICTIMS, _IN_FAVOUR)),
        Row("What is stuck now, and since when?", (_STATE, _OLDEST, _LAST_STEP)),
        Row("Thrash or benign churn?", (_CHURN, shared.RECOMPUTE_TAX, shared.USAGE)),
        Row("Why did hits fall?", (shared.HIT_RATIO, _HITS_LOST, _EVICTIONS)),
        Row("A leak?", (shared.ORPHANED, _HELD)),
        Row("What can I safely do?", (_ROOM, _QUEUE)),
        Row("Is kvwatch itself whole?", (shared.VIOLATIONS, shared.LAG, _UP)),
    ),
    words={"What can I safely do?": _SAFE},
)
