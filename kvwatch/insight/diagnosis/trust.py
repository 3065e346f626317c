"""Rules about the numbers themselves: what is seen of the engine is late, has holes, or is contradicted."""

from kvwatch.derive.metrics import full_name
from kvwatch.insight.diagnosis import thresholds as t
from kvwatch.insight.diagnosis.finding import Evidence, Verdict, many
from kvwatch.insight.diagnosis.reading import Observation
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import DEFAULT_CAPACITY
from kvwatch.telemetry.schema import Metric


def telemetry_lagging(o: Observation) -> Verdict | None:
    """A subscriber lost events, or is about to."""
    gaps, dropped = o.growth(m.TELEMETRY_GAPS), o.growth(m.TELEMETRY_DROPPED)
    lag = o.least(m.TELEMETRY_LAG)
    if not dropped and not gaps and lag < t.LAG_RATIO * DEFAULT_CAPACITY:
        return None
    return Verdict(
        f"Telemetry does not keep up: subscribers lost {many(dropped, 'event')} and are {lag:.0f} behind; counters"
        " are low by what was lost.",
        "Find the subscriber by its label and give it less to do or more processor: a slow disk under the recorder, a"
        " slow receiver behind OTLP or gRPC, a machine without a free core.",
        (
            Evidence("events lost", dropped, "events", (full_name(m.TELEMETRY_DROPPED),)),
            Evidence("times events were lost", gaps, "count", (full_name(m.TELEMETRY_GAPS),)),
            Evidence("events still to be read", lag, "events", (full_name(m.TELEMETRY_LAG),)),
        ),
    )


def numbers_untrue(o: Observation) -> Verdict | None:
    """The ledger contradicts the engine, or a part of the observatory fails."""
    violations, errors = o.growth(m.LEDGER_VIOLATIONS), o.growth(m.TELEMETRY_ERRORS)
    if not violations and not errors:
        return None
    return Verdict(
        f"Do not trust the numbers: the ledger disagreed with the engine after {many(violations, 'step')}, and"
        f" {many(errors, 'error')} happened inside kvwatch.",
        "Read kvwatch's log: it has the equation or the exception. Keep the flight recorder's file; report a defect.",
        (
            Evidence(
                "steps after which ledger and engine disagreed", violations, "count", (full_name(m.LEDGER_VIOLATIONS),)
            ),
            Evidence("errors of subscribers", errors, "count", (full_name(m.TELEMETRY_ERRORS),)),
        ),
    )


def source_incomplete(o: Observation) -> Verdict | None:
    """A sidecar does not reach its engine, or does not know all of its history."""
    if not o.now(m.SOURCE_UP):
        return Verdict(
            "The sidecar does not reach the engine: nothing is known of its state.",
            "Is the engine up, and are address and token of --engine right? The sidecar's log says what it tried.",
            (_source(o, "engine reached", m.SOURCE_UP),),
        )
    is_partial = o.knows(m.SOURCE_COMPLETE) and not o.now(m.SOURCE_COMPLETE)
    drift = o.least(m.SOURCE_DRIFT) if o.knows(m.SOURCE_DRIFT) else 0.0
    if not is_partial and not drift:
        return None
    return Verdict(
        "The sidecar's picture of the engine is incomplete: it missed events, so what is resident is not known.",
        "Offer a replay endpoint to the sidecar, or start it before the engine; a reset of the prefix cache makes the"
        " picture whole again.",
        (
            _source(o, "history known", m.SOURCE_COMPLETE),
            Evidence("blocks that contradict what was known", drift, "blocks", (full_name(m.SOURCE_DRIFT),)),
        ),
    )


def _source(o: Observation, what: str, metric: Metric) -> Evidence:
    return Evidence(what, o.now(metric) if o.knows(metric) else 1.0, "count", (full_name(metric),))
