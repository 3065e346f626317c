"""Alerts. Each has a section of its name in dashboards/runbook.md and a test in tests/rules."""

from kvwatch_dashboards.alerts.alert import Alert
from kvwatch_dashboards.alerts.page import PAGES
from kvwatch_dashboards.alerts.ticket import TICKETS

ALERTS: tuple[Alert, ...] = (*PAGES, *TICKETS)

__all__ = ["ALERTS", "PAGES", "TICKETS", "Alert"]
