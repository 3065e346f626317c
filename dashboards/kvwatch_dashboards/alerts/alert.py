"""What an alert is."""

from dataclasses import dataclass
from typing import Literal

from kvwatch_dashboards import settings

Severity = Literal["page", "ticket"]
"""page: somebody gets up. ticket: somebody looks in working hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alerting rule."""

    name: str
    severity: Severity
    expr: str
    lasts: str
    """How long the expression must hold before the alert fires."""
    summary: str
    """One line; may use the labels of the expression: `{{ $labels.engine }}`."""
    description: str
    """What it means and the first thing to do."""

    @property
    def runbook_url(self) -> str:
        """Section of the runbook."""
        return f"{settings.RUNBOOK}#{self.name.lower()}"
