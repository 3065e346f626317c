"""Moments that dashboards mark with a vertical line, so that a change and what follows it are seen together."""

from dataclasses import dataclass

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_dashboards import promql, scoped

MOMENT = "2m"
"""Window in which something counts as having happened now: two scrapes of a minute each fit in."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """One kind of moments: wherever the query brings something."""

    name: str
    colour: str
    expr: str


def _grown(metric: Metric) -> str:
    return f"{promql.increase(metric, MOMENT, scope=scoped.scope(metric, {}))} > 0"


ANNOTATIONS: tuple[Annotation, ...] = (
    Annotation("Configuration changed", "blue", _grown(m.CONFIG_CHANGES)),
    Annotation("Pool rebuilt", "purple", _grown(m.POOL_REBUILDS)),
    Annotation(
        "Engine restarted",
        "red",
        f"resets({scoped.value(m.COMPUTED_TOKENS)}[{MOMENT}]) > 0 or {_grown(m.SOURCE_RESETS)}",
    ),
)
