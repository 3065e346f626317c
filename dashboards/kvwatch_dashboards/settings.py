"""Every threshold of dashboards and alerts, and its reason. Nothing else here; units are in the names.

Where a diagnosis rule compares with the same number, it is that number.
"""

from kvwatch.insight.diagnosis import thresholds as diagnosis
from kvwatch.telemetry.log import DEFAULT_CAPACITY

ENGINE_JOBS = "kvwatch"
"""Regular expression of the scrape jobs that read engines; the examples under deploy/ call them so."""

SIDECAR_JOBS = "kvwatch-sidecar"
"""Regular expression of the scrape jobs that read sidecars."""

RUNBOOK = "https://kvwatch.github.io/runbook"
"""Where dashboards/runbook.md is published; the alert's name in lower case is the anchor. Change it to your copy."""

# ---------------------------------------------------------------- promises to users

TTFT_SLO_SECONDS = 2.5
"""First token: what a person who asked a chat waits without wondering. Must be one of the histogram's bounds."""

ITL_SLO_SECONDS = 0.2
"""Between two tokens: five tokens a second is about as fast as people read. Must be one of the histogram's bounds."""

SLO_TARGET_RATIO = 0.99
"""Part of the observations that keep the promise over 30 days: one in a hundred may be late."""

PAGE_BURN = 14.4
"""At that rate 2 % of the month's budget is gone in an hour (the multi-window rule of Google's SRE workbook)."""

TICKET_BURN = 6.0
"""At that rate 5 % of the month's budget is gone in six hours (the same rule's second window)."""

# ---------------------------------------------------------------- memory

STALL_RATIO = diagnosis.STALL_RATIO
"""Part of the time with requests waiting for blocks: as in the diagnosis."""

USAGE_WARNING_RATIO = 0.8
"""Of the pool in use: from here a burst of a fifth of the load does not fit."""

USAGE_CRITICAL_RATIO = 0.95
"""Of the pool in use: the next request of ordinary length waits."""

WASTE_WARNING_RATIO = diagnosis.WASTE_RATIO
"""Of the held slots that hold nothing: as in the diagnosis."""

PREEMPTIONS_PER_ADMISSION = diagnosis.PREEMPTIONS_PER_ADMISSION
"""Preemptions for one admission: as in the diagnosis."""

MIN_PREEMPTIONS_PER_SECOND = 0.05
"""Three a minute; below that a ratio to few admissions means nothing."""

RECOMPUTE_TAX_RATIO = 0.1
"""One in ten tokens computed twice: more than a replica in ten works for nothing."""

GROWTH_FAILURES_PER_SECOND = 0.1
"""Running requests that find no block, six a minute for a while: no single burst."""

# ---------------------------------------------------------------- prefix cache

REGRETTED_RATIO = diagnosis.REGRETTED_QUERIED_RATIO
"""Of the prompt tokens that had been evicted: as in the diagnosis."""

PREMATURE_RATIO = diagnosis.PREMATURE_RATIO
"""Of removed blocks of a foreign engine that came back: as in the diagnosis."""

HIT_COLLAPSE_RATIO = 0.5
"""Half of the hit rate of the same time yesterday: deployments and prompts change by less from day to day."""

MIN_QUERIED_TOKENS_PER_SECOND = 50
"""Traffic below which a hit rate is noise: about one prompt in ten seconds."""

WARM_UP = "2h"
"""After a restart a cache is empty, and a low hit rate no news."""

# ---------------------------------------------------------------- requests and engine

QUEUE_RATIO = 0.8
"""Of the queue's limit: a fifth is left before requests get 429."""

STUCK_SECONDS = 120
"""Four times the engine's own --stall-seconds: a step that is only slow has long ended."""

# ---------------------------------------------------------------- kvwatch itself

AUTH_FAILURES_PER_SECOND = 0.1
"""Refused calls of the admin API, six a minute for a while: no person mistypes a token that often."""

LAG_EVENTS = round(diagnosis.LAG_RATIO * DEFAULT_CAPACITY)
"""Events that a subscriber may be behind: half of what the log keeps."""

CPU_WARNING_RATIO = 0.05
"""Of one core for all of kvwatch's threads: five times what the benchmarks measure."""
