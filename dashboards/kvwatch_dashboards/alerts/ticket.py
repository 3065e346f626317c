"""Alerts that somebody looks at in working hours: capacity, waste, defects that users hardly feel yet."""

from kvwatch.telemetry import metrics as m
from kvwatch_dashboards import promql as q
from kvwatch_dashboards import recording as r
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.alerts.alert import Alert
from kvwatch_dashboards.alerts.page import WHO

_SLOW = f"{s.TICKET_BURN * (1 - s.SLO_TARGET_RATIO):.4g}"
_WINDOW_MIN = q.gauge(m.KV_FREE_BLOCKS_MIN, tier="device", how="min")

_MEMORY: tuple[Alert, ...] = (
    Alert(
        name="KVWatchLowFreeBlocks",
        severity="ticket",
        expr=f"{_WINDOW_MIN} < {q.gauge(m.KV_WATERMARK_BLOCKS, tier='device')}",
        lasts="15m",
        summary=f"{WHO}: free blocks fall below the watermark again and again",
        description="Within every minute of the last quarter of an hour fewer blocks were free than the watermark holds back:"
        " running requests eat what is meant for their growth. Plan for a larger pool or another replica.",
    ),
    Alert(
        name="KVWatchPreemptionStorm",
        severity="ticket",
        expr=f"({r.PREEMPTIONS.name} > {s.PREEMPTIONS_PER_ADMISSION} * {r.ADMISSIONS.name})"
        f" and ({r.PREEMPTIONS.name} > {s.MIN_PREEMPTIONS_PER_SECOND})",
        lasts="10m",
        summary=f"{WHO}: requests throw each other out of memory",
        description="{{ $value | humanize }} preemptions a second for want of blocks, more than one for ten admissions. Raise"
        " the watermark; if that does not help, the pool is too small.",
    ),
    Alert(
        name="KVWatchRecomputeTax",
        severity="ticket",
        expr=f"{r.RECOMPUTE_TAX.name} > {s.RECOMPUTE_TAX_RATIO}",
        lasts="15m",
        summary=f"{WHO}: tokens are computed twice",
        description="{{ $value | humanizePercentage }} of all computed tokens had been computed before a preemption dropped"
        " them. Swap to the host, or give the pool more memory.",
    ),
    Alert(
        name="KVWatchAllocationFailures",
        severity="ticket",
        expr=f"{q.rate(m.KV_ALLOCATION_FAILURES, reason='growth')} > {s.GROWTH_FAILURES_PER_SECOND}",
        lasts="10m",
        summary=f"{WHO}: running requests find no free block",
        description="{{ $value | humanize }} times a second a running request needed a block and none was free. Each time"
        " somebody is preempted.",
    ),
    Alert(
        name="KVWatchOrphanedBlocks",
        severity="ticket",
        expr=f"(delta({q.series(m.KV_ORPHANED_BLOCKS, window='1h')}) > 0)"
        f" and (min_over_time({q.series(m.KV_ORPHANED_BLOCKS, window='10m')}) > 0)",
        lasts="5m",
        summary=f"{WHO}: blocks leak",
        description="{{ $value | humanize }} more blocks than an hour ago are used though no live request holds them. They"
        " are lost until the engine restarts.",
    ),
)  # fmt: skip

_CACHE: tuple[Alert, ...] = (
    Alert(
        name="KVWatchPrematureEvictions",
        severity="ticket",
        expr=f"({r.REGRETTED_RATIO.name} > {s.REGRETTED_RATIO}) or ({r.PREMATURE_RATIO.name} > {s.PREMATURE_RATIO})",
        lasts="30m",
        summary=f"{WHO}: the prefix cache evicts what is asked for again",
        description="{{ $value | humanizePercentage }} of what is asked for had been evicted for want of room. A larger pool"
        " or a tier behind it would save computing it again.",
    ),
    Alert(
        name="KVWatchHitRateCollapse",
        severity="ticket",
        expr=f"({r.HIT_RATIO.name} < {s.HIT_COLLAPSE_RATIO} * ({r.HIT_RATIO.name} offset 1d))"
        f" and ({q.rate(m.PREFIX_CACHE_QUERIED_TOKENS, '30m')} > {s.MIN_QUERIED_TOKENS_PER_SECOND})"
        f" unless (resets({q.series(m.PREFIX_CACHE_QUERIED_TOKENS, window=s.WARM_UP)}) > 0)"
        f" unless ({q.increase(m.SOURCE_RESETS, s.WARM_UP)} > 0)",
        lasts="30m",
        summary=f"{WHO}: prefix hits collapsed against yesterday",
        description="The hit rate is {{ $value | humanizePercentage }}, less than half of what it was at this time yesterday,"
        " with traffic and without a restart. A changed prompt template or routing is the usual reason.",
    ),
)  # fmt: skip

_SERVICE: tuple[Alert, ...] = (
    Alert(
        name="KVWatchQueueNearLimit",
        severity="ticket",
        expr=f"{q.gauge(m.REQUESTS, state='waiting')} / ({q.gauge(m.QUEUE_LIMIT, unit='requests')} > 0) > {s.QUEUE_RATIO}",
        lasts="5m",
        summary=f"{WHO}: the queue is nearly full",
        description="{{ $value | humanizePercentage }} of the queue's limit is taken: soon requests get 429.",
    ),
    Alert(
        name="KVWatchFirstTokenBurn",
        severity="ticket",
        expr=f"({r.TTFT_LATE['30m'].name} > {_SLOW}) and ({r.TTFT_LATE['6h'].name} > {_SLOW})",
        lasts="5m",
        summary=f"{WHO}: first tokens are late",
        description=f"{{{{ $value | humanizePercentage }}}} of first tokens take longer than {s.TTFT_SLO_SECONDS:g} s, for hours:"
        " at that rate a month's budget is gone in five days.",
    ),
    Alert(
        name="KVWatchTokenLatencyBurn",
        severity="ticket",
        expr=f"({r.ITL_LATE['30m'].name} > {_SLOW}) and ({r.ITL_LATE['6h'].name} > {_SLOW})",
        lasts="5m",
        summary=f"{WHO}: answers stutter",
        description=f"{{{{ $value | humanizePercentage }}}} of tokens come more than {s.ITL_SLO_SECONDS:g} s after the one before,"
        " for hours: at that rate a month's budget is gone in five days.",
    ),
    Alert(
        name="KVWatchTransferFailures",
        severity="ticket",
        expr=f"{q.increase(m.TRANSFER_FAILURES, '30m', keep=('reason',), reason='!dropped')} > 0",
        lasts="5m",
        summary=f"{WHO}: transfers between tiers fail ({{{{ $labels.reason }}}})",
        description="{{ $value | humanize }} transfers in half an hour did not arrive; their tokens are computed again.",
    ),
)  # fmt: skip

_CHANGE: tuple[Alert, ...] = (
    Alert(
        name="KVWatchRebuildFailed",
        severity="ticket",
        expr=f"{q.increase(m.POOL_REBUILDS, '1h', outcome='failed')} > 0",
        lasts="0m",
        summary=f"{WHO}: the pool could not be rebuilt",
        description="Somebody wanted another pool and the machine could not give it. The engine runs on as it was.",
    ),
    Alert(
        name="KVWatchConfigDrift",
        severity="ticket",
        expr=f"{q.series(m.CONFIG_DRIFT)} == 1",
        lasts="1h",
        summary=f"{WHO}: {{{{ $labels.key }}}} is not what was declared",
        description="A live change of this setting has been in force for an hour beyond its declaration; a restart would undo it."
        " Declare it, or revert it.",
    ),
    Alert(
        name="KVWatchLeftPaused",
        severity="ticket",
        expr=f"{q.gauge(m.WAITING_REQUESTS, reason='paused')} > 0",
        lasts="15m",
        summary=f"{WHO}: admission was left paused",
        description="{{ $value | humanize }} requests wait since admission is paused, for a quarter of an hour.",
    ),
    Alert(
        name="KVWatchLeftDraining",
        severity="ticket",
        expr=f"{q.gauge(m.ENGINE_STATE, state='draining')} == 1",
        lasts="30m",
        summary=f"{WHO}: the engine was left draining",
        description="The engine takes no new requests for half an hour and has not ended either.",
    ),
)

_ITSELF: tuple[Alert, ...] = (
    Alert(
        name="KVWatchAuthorisationFailures",
        severity="ticket",
        expr=f"{q.rate(m.ADMIN_AUTH_FAILURES)} > {s.AUTH_FAILURES_PER_SECOND}",
        lasts="10m",
        summary="{{ $labels.instance }}: the admin API refuses callers again and again",
        description="{{ $value | humanize }} calls a second come without a token that is good enough: a script with an old token,"
        " or somebody who tries tokens.",
    ),
    Alert(
        name="KVWatchTelemetryLagging",
        severity="ticket",
        expr=f"({q.increase(m.TELEMETRY_DROPPED, '15m', keep=('subscriber',))} > 0)"
        f" or ({q.series(m.TELEMETRY_LAG)} > {s.LAG_EVENTS})",
        lasts="5m",
        summary=f"{WHO}: {{{{ $labels.subscriber }}}} does not keep up with events",
        description="A subscriber of the event log lost events or is about to. What it counts is low by what was lost.",
    ),
    Alert(
        name="KVWatchSourceIncomplete",
        severity="ticket",
        expr=f"({q.series(m.SOURCE_COMPLETE)} == 0) and ({q.series(m.SOURCE_UP)} == 1)",
        lasts="30m",
        summary=f"{WHO}: the sidecar does not know the engine's history",
        description="Resident blocks cannot be counted until the engine's cache is cleared or its history is replayed.",
    ),
    Alert(
        name="KVWatchSourceDrifting",
        severity="ticket",
        expr=f"{q.series(m.SOURCE_DRIFT)} > 0",
        lasts="15m",
        summary=f"{WHO}: the engine's events contradict the sidecar's picture",
        description="{{ $value | humanize }} blocks are not where they should be: events were lost without a trace.",
    ),
)

TICKETS: tuple[Alert, ...] = (*_MEMORY, *_CACHE, *_SERVICE, *_CHANGE, *_ITSELF)
