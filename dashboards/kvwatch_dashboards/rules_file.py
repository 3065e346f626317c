"""Rules as the YAML that Prometheus reads. Every scalar is quoted as JSON quotes it, which is YAML too."""

import json
from collections.abc import Iterable, Iterator

from kvwatch_dashboards.alerts import ALERTS, Alert
from kvwatch_dashboards.recording import RECORDINGS, Recording

HEAD = "# Written by `make derive` from dashboards/kvwatch_dashboards; change it there.\n"


def recording_rules(rules: Iterable[Recording] = RECORDINGS) -> str:
    """Return the file of recording rules."""
    return HEAD + "\n".join(["groups:", *_group("kvwatch-recording", (_recording(each) for each in rules))]) + "\n"


def alerting_rules(alerts: Iterable[Alert] = ALERTS) -> str:
    """Return the file of alerts: a group for each severity."""
    found = list(alerts)
    lines = ["groups:"]
    for severity in ("page", "ticket"):
        lines += _group(f"kvwatch-{severity}", (_alert(each) for each in found if each.severity == severity))
    return HEAD + "\n".join(lines) + "\n"


def _group(name: str, rules: Iterable[Iterator[str]]) -> Iterator[str]:
    yield f"  - name: {name}"
    yield "    rules:"
    for rule in rules:
        for number, line in enumerate(rule):
            yield ("      - " if number == 0 else "        ") + line


def _recording(rule: Recording) -> Iterator[str]:
    yield f"record: {json.dumps(rule.name)}"
    yield f"expr: {json.dumps(rule.expr)}"


def _alert(alert: Alert) -> Iterator[str]:
    yield f"alert: {alert.name}"
    yield f"expr: {json.dumps(alert.expr)}"
    yield f"for: {alert.lasts}"
    yield "labels:"
    yield f"  severity: {alert.severity}"
    yield "annotations:"
    yield f"  summary: {json.dumps(alert.summary)}"
    yield f"  description: {json.dumps(alert.description)}"
    yield f"  runbook_url: {json.dumps(alert.runbook_url)}"
