"""*kvwatch itself*: are the numbers whole, true and cheap?"""

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_dashboards import promql
from kvwatch_dashboards import scoped as q
from kvwatch_dashboards import settings as s
from kvwatch_dashboards.boards import shared
from kvwatch_dashboards.panel import ENGINE, Board, Level, Panel, Query, Row

_SUBSCRIBER = f"{ENGINE} {{{{subscriber}}}}"


def _lost(title: str, metric: Metric) -> Panel:
    return Panel(
        title=title,
        unit="short",
        queries=(Query(q.increase(metric, "subscriber"), _SUBSCRIBER),),
        levels=(Level(1, "red"),),
    )


_CPU = Panel(
    title="Processor time of kvwatch's threads",
    unit="percentunit",
    kind="stack",
    queries=(Query(f"sum by (thread) ({promql.rate(m.TELEMETRY_CPU, q.WINDOW, keep=('thread',), job='~$job')})", "{{thread}}"),),
    levels=(Level(s.CPU_WARNING_RATIO, "yellow"),),
    about="The cost of watching, as a part of one core. Above the line: which thread, and what was it given to do?",
)  # fmt: skip
_EVENTS = Panel(
    title="Events by kind",
    unit="cps",
    kind="stack",
    queries=(Query(f"topk(10, sum by (event) ({q.rate(m.TELEMETRY_EVENTS, 'event')}) > 0)", "{{event}}"),),
)
_SOURCE_EVENT = Panel(
    title="Time since the engine's last event", unit="s", queries=(Query(q.age(m.SOURCE_LAST_EVENT_TIMESTAMP)),)
)
_SOURCE_LAG = Panel(
    title="Lag of the engine's events",
    unit="s",
    queries=tuple(Query(q.quantile(p, m.SOURCE_LAG), f"p{round(100 * p)}") for p in (0.5, 0.99)),
)
_STATUS = Panel(
    title="Sources reached and whole",
    unit="short",
    queries=(Query(q.value(m.SOURCE_UP), f"{ENGINE} reached"), Query(q.value(m.SOURCE_COMPLETE), f"{ENGINE} whole")),
)
_DRIFT = Panel(title="Drift", unit="short", queries=(Query(q.value(m.SOURCE_DRIFT)),), levels=(Level(1, "red"),))
_GAPS = Panel(
    title="Gaps, replays and restarts of sources",
    unit="short",
    queries=(
        Query(q.increase(m.SOURCE_GAPS), f"{ENGINE} gaps"),
        Query(q.increase(m.SOURCE_REPLAYS, "outcome"), f"{ENGINE} replays {{{{outcome}}}}"),
        Query(q.increase(m.SOURCE_RESETS), f"{ENGINE} restarts"),
    ),
)
_DECODE = Panel(
    title="What could not be understood",
    unit="short",
    queries=(Query(q.increase(m.SOURCE_DECODE_ERRORS, "kind"), f"{ENGINE} {{{{kind}}}}"),),
    levels=(Level(1, "red"),),
)

_REFUSED = Panel(
    title="Calls of the admin API that were refused",
    unit="cps",
    queries=(Query(q.rate(m.ADMIN_AUTH_FAILURES, "reason"), f"{ENGINE} {{{{reason}}}}"),),
    levels=(Level(s.AUTH_FAILURES_PER_SECOND, "red"),),
)

ITSELF = Board(
    uid="kvwatch-itself",
    title="kvwatch / kvwatch itself",
    about="Are the numbers whole, true and cheap?",
    rows=(
        Row("Are they true?", (shared.VIOLATIONS, _lost("Errors of subscribers", m.TELEMETRY_ERRORS), shared.AGE)),
        Row(
            "Are they whole?", (shared.LAG, _lost("Gaps", m.TELEMETRY_GAPS), _lost("Events lost", m.TELEMETRY_DROPPED))
        ),
        Row("Are they cheap?", (_CPU, _EVENTS)),
        Row("Who is refused?", (_REFUSED,)),
        Row("What a sidecar reads", (_STATUS, _DRIFT, _GAPS, _DECODE, _SOURCE_EVENT, _SOURCE_LAG)),
    ),
)
