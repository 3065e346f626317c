"""Metrics that deliberately are in no panel and no rule, each with its reason.

A metric that is neither shown nor here fails `tests/contract/test_dashboards.py`.
"""

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric

_GATEWAY = "for a gateway's endpoint picker; people have the metric that it repeats"

UNUSED: dict[Metric, str] = {
    m.GATEWAY_QUEUED_REQUESTS: _GATEWAY,
    m.GATEWAY_RUNNING_REQUESTS: _GATEWAY,
    m.GATEWAY_KV_UTILIZATION: _GATEWAY,
    m.GATEWAY_CACHE_CONFIG: _GATEWAY,
}
