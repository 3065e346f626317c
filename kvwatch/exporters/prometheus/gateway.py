"""What a gateway picks endpoints by: the signals of the Gateway API Inference Extension, read from a view.

The extension lets a server choose the names and fixes type and meaning: gauges of queued and running requests, of the
used part of the cache, and of its shape as labels. They repeat what other series say, in the one form that an endpoint
picker needs: a single series each, nothing to match or to divide.
"""

from kvwatch.ledger.view import Sample, View
from kvwatch.telemetry import metrics as m

TIER = "device"


def gateway_samples(view: View) -> list[Sample]:
    """Return the signals that a view can give; none while the engine has not been heard of."""
    plain = {
        m.GATEWAY_QUEUED_REQUESTS: view.value(m.REQUESTS, "waiting"),
        m.GATEWAY_RUNNING_REQUESTS: view.value(m.REQUESTS, "running"),
        m.GATEWAY_KV_UTILIZATION: view.value(m.KV_USAGE_RATIO, TIER),
    }
    samples = [Sample(metric, (), value) for metric, value in plain.items() if value is not None]
    block_size = view.value(m.KV_BLOCK_SIZE_TOKENS)
    capacity = view.value(m.KV_BLOCK_CAPACITY, TIER)
    if block_size is not None and capacity is not None:
        samples.append(Sample(m.GATEWAY_CACHE_CONFIG, (f"{block_size:.0f}", f"{capacity:.0f}"), 1))
    return samples
