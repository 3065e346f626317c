"""What Prometheus and Alertmanager are told. Text only: knows neither ports nor processes.

Both read YAML; what is written is JSON below a comment, which is YAML too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = "# Written by kvwatch_dashboards.local; the rules are those of dashboards/generated.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How soon people hear of something, in Prometheus' durations."""

    scrape: str = "5s"
    """Between two scrapes and two evaluations. A page is rendered once a second at most."""
    group_wait: str = "10s"
    """From the first alert of a group until it is sent: others that come with it are in the same message."""
    group_interval: str = "1m"
    """Between two messages of a group that has changed."""
    page_repeat: str = "1h"
    """Until a page that still fires is sent again."""
    ticket_repeat: str = "12h"
    """Until a ticket that still fires is sent again."""


def prometheus_config(
    jobs: Mapping[str, Sequence[str]], rule_files: Sequence[Path], alertmanagers: Sequence[str], timing: Timing
) -> str:
    """Return prometheus.yml.

    Args:
        jobs: Name of each scrape job -> its targets, `host:port`.
        rule_files: The rules.
        alertmanagers: Where alerts go, `host:port`.
        timing: How often.
    """
    return _yaml(
        {
            "global": {
                "scrape_interval": timing.scrape,
                "scrape_timeout": timing.scrape,
                "evaluation_interval": timing.scrape,
            },
            "rule_files": [str(path) for path in rule_files],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]},
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": list(targets)}]} for name, targets in jobs.items()
            ],
        }
    )


def alertmanager_config(webhook: str | None, timing: Timing) -> str:
    """Return alertmanager.yml: pages at once and again and again, tickets seldom.

    Args:
        webhook: URL that both are sent to; without one they are only shown.
        timing: How soon, how often.
    """
    hooks = {} if webhook is None else {"webhook_configs": [{"url": webhook, "send_resolved": True}]}
    return _yaml(
        {
            "route": {
                "receiver": "tickets",
                "group_by": ["alertname", "engine", "dp_rank"],
                "group_wait": timing.group_wait,
                "group_interval": timing.group_interval,
                "repeat_interval": timing.ticket_repeat,
                "routes": [
                    {
                        "receiver": "pages",
                        "matchers": ['severity="page"'],
                        "repeat_interval": timing.page_repeat,
                    }
                ],
            },
            "inhibit_rules": [
                {
                    "source_matchers": ['alertname="KVWatchEngineAbsent"'],
                    "target_matchers": ['severity="ticket"'],
                    "equal": ["instance"],
                }
            ],
            "receivers": [{"name": "pages"} | hooks, {"name": "tickets"} | hooks],
        }
    )


def _yaml(content: Mapping[str, object]) -> str:
    return _HEAD + json.dumps(content, indent=2) + "\n"
