"""What the ledger's state says as gauges. Read at a step boundary; O(live requests), never O(blocks) when healthy."""

from kvwatch.ledger.ledger import Ledger
from kvwatch.ledger.pool import TierPool
from kvwatch.ledger.view import Sample
from kvwatch.telemetry import metrics as m

GROUP = "0"
"""The one KV group that exists."""

NO_GROUP = ""
"""Empty blocks belong to no group; for Prometheus an empty label is an absent one."""

WAIT_REASONS = ("blocks", "sequences", "tokens", "paused")


def gauges(ledger: Ledger, wall_minus_monotonic_ns: int) -> list[Sample]:
    """Return every gauge that is known now.

    Args:
        ledger: State to read.
        wall_minus_monotonic_ns: Turns the events' monotonic times into Unix times.
    """
    if not ledger.is_loaded:
        return []
    samples = [sample for pool in ledger.pools.values() for sample in _pool_gauges(pool, ledger)]
    limits = ledger.limits
    samples += [
        Sample(m.KV_BLOCK_SIZE_TOKENS, (), limits.block_size_tokens),
        Sample(m.KV_BLOCK_BYTES, (), limits.block_bytes),
        Sample(m.REQUESTS, ("running",), ledger.num_running),
        Sample(m.REQUESTS, ("waiting",), ledger.num_waiting),
        Sample(m.QUEUE_LIMIT, ("requests",), limits.max_queued_requests),
        Sample(m.QUEUE_LIMIT, ("tokens",), limits.max_queued_tokens),
    ]
    samples += [Sample(m.WAITING_REQUESTS, (r,), ledger.waiting_for.get(r, 0)) for r in WAIT_REASONS]
    samples += _timestamps(ledger, wall_minus_monotonic_ns)
    return samples


def _pool_gauges(pool: TierPool, ledger: Ledger) -> list[Sample]:
    tier, used, cached, empty = pool.tier, pool.num_used, pool.num_cached, pool.num_empty
    by_tier, by_group = (tier,), (tier, GROUP)
    block_size = ledger.limits.block_size_tokens
    held = used * block_size
    return [
        Sample(m.KV_BLOCK_CAPACITY, by_tier, pool.capacity),
        Sample(m.KV_BLOCKS, (tier, GROUP, "used"), used),
        Sample(m.KV_BLOCKS, (tier, GROUP, "cached"), cached),
        Sample(m.KV_BLOCKS, (tier, NO_GROUP, "empty"), empty),
        Sample(m.KV_FREE_BLOCKS, by_tier, cached + empty),
        Sample(m.KV_USAGE_RATIO, by_tier, used / pool.capacity if pool.capacity else 0.0),
        Sample(m.KV_TOKEN_CAPACITY, by_group, pool.capacity * block_size),
        Sample(m.KV_HELD_SLOTS, by_group, held),
        Sample(m.KV_FILLED_SLOTS, by_group, pool.num_filled_slots),
        Sample(m.KV_WASTE_RATIO, by_group, 1 - pool.num_filled_slots / held if held else 0.0),
        Sample(m.KV_SHARED_BLOCKS, by_group, pool.num_shared),
        Sample(m.KV_SHARING_SAVED_BLOCKS, by_group, pool.num_entries - used),
        Sample(m.KV_WATERMARK_BLOCKS, by_tier, ledger.limits.watermark_blocks),
        Sample(m.KV_ORPHANED_BLOCKS, by_tier, pool.orphaned(ledger.requests.keys())),
    ]


def _timestamps(ledger: Ledger, offset_ns: int) -> list[Sample]:
    times = {
        m.LEDGER_UPDATE_TIMESTAMP: ledger.time_ns,
        m.LAST_STEP_TIMESTAMP: ledger.last_step_ns,
        m.OLDEST_WAITING_TIMESTAMP: min(
            (request.queued_ns for request in ledger.requests.values() if request.state != "running"), default=None
        ),
    }
    return [Sample(metric, (), (t + offset_ns) / 1e9) for metric, t in times.items() if t is not None]
