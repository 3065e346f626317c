"""What the ledger's state says as gauges. Read at a step boundary; O(live requests), never O(blocks) when healthy."""

from collections.abc import Mapping

from kvwatch.ledger.group import GroupPool
from kvwatch.ledger.index import IndexCounts
from kvwatch.ledger.ledger import CHECKED_TIER, ENGINE_STATES, Ledger
from kvwatch.ledger.pool import TierPool
from kvwatch.ledger.view import Sample
from kvwatch.ledger.window import RollingMinimum
from kvwatch.telemetry import metrics as m

NO_GROUP = ""
"""Empty blocks belong to no group; for Prometheus an empty label is an absent one."""

WAIT_REASONS = ("blocks", "sequences", "tokens", "paused", "transfer")


def gauges(ledger: Ledger, wall_minus_monotonic_ns: int) -> list[Sample]:
    """Return every gauge that is known now.

    Args:
        ledger: State to read.
        wall_minus_monotonic_ns: Turns the events' monotonic times into Unix times.
    """
    if not ledger.is_loaded:
        return []
    if ledger.index is not None:
        return _index_gauges(ledger.index, ledger, wall_minus_monotonic_ns)
    samples = [sample for pool in ledger.pools.values() for sample in _pool_gauges(pool, ledger)]
    limits = ledger.limits
    samples += [
        Sample(m.KV_BLOCK_SIZE_TOKENS, (), limits.block_size_tokens),
        Sample(m.KV_BLOCK_BYTES, (), limits.block_bytes),
        Sample(m.REQUESTS, ("running",), ledger.num_running),
        Sample(m.REQUESTS, ("waiting",), ledger.num_waiting - ledger.num_swapped),
        Sample(m.REQUESTS, ("swapped",), ledger.num_swapped),
        Sample(m.QUEUE_LIMIT, ("requests",), limits.max_queued_requests),
        Sample(m.QUEUE_LIMIT, ("tokens",), limits.max_queued_tokens),
    ]
    samples += [Sample(m.WAITING_REQUESTS, (r,), ledger.waiting_for.get(r, 0)) for r in WAIT_REASONS]
    state = ledger.engine_state
    samples += [Sample(m.ENGINE_STATE, (name,), name == state) for name in ENGINE_STATES]
    samples += [Sample(m.CONFIG_VALUE, (key,), number) for key, number in ledger.config.items()]
    samples += [Sample(m.CONFIG_DRIFT, (key,), drift) for key, drift in ledger.config_drift.items()]
    samples += [Sample(m.DEVICE_MEMORY_BYTES, (kind,), size) for kind, size in ledger.memory_bytes.items()]
    samples += _timestamps(ledger, wall_minus_monotonic_ns)
    return samples


def extremes(ledger: Ledger, lowest_free: Mapping[str, RollingMinimum], now_ns: int, window: str) -> list[Sample]:
    """Return the least free blocks and the highest usage of the window that ends now, for tiers that have seen one.

    Args:
        ledger: Gives the capacities.
        lowest_free: Free blocks by tier.
        now_ns: Monotonic time in ns.
        window: Value of the label `window`.
    """
    samples: list[Sample] = []
    for tier, minimum in lowest_free.items():
        pool = ledger.pools[tier]
        lowest, capacity = minimum.lowest(pool.num_free, now_ns), pool.capacity
        if lowest is not None:
            samples.append(Sample(m.KV_FREE_BLOCKS_MIN, (tier, window), lowest))
            highest = (capacity - lowest) / capacity if capacity else 0.0
            samples.append(Sample(m.KV_USAGE_RATIO_MAX, (tier, window), highest))
    return samples


def _index_gauges(index: IndexCounts, ledger: Ledger, offset_ns: int) -> list[Sample]:
    """Return what is known of a foreign engine: how much is resident, unless its history has holes."""
    samples = [Sample(m.LEDGER_UPDATE_TIMESTAMP, (), (ledger.time_ns + offset_ns) / 1e9)]
    if index.is_complete:
        samples += [Sample(m.KV_INDEXED_BLOCKS, place, number) for place, number in index.counts.items()]
    return samples


def _pool_gauges(pool: TierPool, ledger: Ledger) -> list[Sample]:
    tier, used, empty = pool.tier, pool.num_used, pool.num_empty
    by_tier = (tier,)
    return [
        Sample(m.KV_BLOCK_CAPACITY, by_tier, pool.capacity),
        Sample(m.KV_FREE_BLOCKS, by_tier, pool.num_free),
        Sample(m.KV_USAGE_RATIO, by_tier, used / pool.capacity if pool.capacity else 0.0),
        *(sample for group in pool.groups.values() for sample in _group_gauges(pool, group, ledger)),
        Sample(m.KV_BLOCKS, (tier, NO_GROUP, "empty"), empty),
        *_pressure_gauges(pool, ledger),
        Sample(m.KV_ORPHANED_BLOCKS, by_tier, pool.orphaned(ledger.requests.keys() | ledger.transfers.requests)),
    ]


def _group_gauges(pool: TierPool, group: GroupPool, ledger: Ledger) -> list[Sample]:
    by_group, used = (pool.tier, group.name), group.num_used
    block_size, filled = ledger.limits.block_size_tokens, pool.num_filled_slots_of(group.name)
    held = (used - _num_arriving(pool, ledger)) * block_size
    return [
        Sample(m.KV_BLOCKS, (*by_group, "used"), used),
        Sample(m.KV_BLOCKS, (*by_group, "cached"), group.num_cached),
        Sample(m.KV_TOKEN_CAPACITY, by_group, pool.capacity * block_size),
        Sample(m.KV_HELD_SLOTS, by_group, held),
        Sample(m.KV_FILLED_SLOTS, by_group, filled),
        Sample(m.KV_WASTE_RATIO, by_group, 1 - filled / held if held else 0.0),
        Sample(m.KV_SHARED_BLOCKS, by_group, group.num_shared),
        Sample(m.KV_SHARING_SAVED_BLOCKS, by_group, group.num_entries - used),
    ]


def _num_arriving(pool: TierPool, ledger: Ledger) -> int:
    """Return how many used blocks of a group are being written by transfers; engines with tiers have one group."""
    return ledger.transfers.num_arriving(pool.tier) if len(ledger.pools) > 1 else 0


def _pressure_gauges(pool: TierPool, ledger: Ledger) -> list[Sample]:
    """Return the watermark, which the device alone has, and what only an engine with several tiers has."""
    samples = [Sample(m.KV_TIER_IGNORED_FILES, (pool.tier, reason), n) for reason, n in pool.ignored_files.items()]
    if pool.tier == CHECKED_TIER:
        samples.append(Sample(m.KV_WATERMARK_BLOCKS, (pool.tier,), ledger.limits.watermark_blocks))
        samples.append(Sample(m.KV_PINNED_BLOCKS, (pool.tier,), pool.num_pinned))
    if len(ledger.pools) > 1:
        samples.append(Sample(m.KV_BLOCKS_IN_TRANSFER, (pool.tier,), ledger.transfers.num_blocks(pool.tier)))
    return samples


def _timestamps(ledger: Ledger, offset_ns: int) -> list[Sample]:
    times = {
        m.LEDGER_UPDATE_TIMESTAMP: ledger.time_ns,
        m.LAST_STEP_TIMESTAMP: ledger.last_step_ns,
        m.OLDEST_WAITING_TIMESTAMP: min(
            (request.queued_ns for request in ledger.requests.values() if request.state != "running"), default=None
        ),
    }
    return [Sample(metric, (), (t + offset_ns) / 1e9) for metric, t in times.items() if t is not None]
