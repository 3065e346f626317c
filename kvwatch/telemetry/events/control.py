"""Events of the people who run the server. Numbers 70 to 79; 80 was taken before the family had a range of its own."""

from typing import Annotated, Literal

from kvwatch.telemetry import metrics
from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.schema import Event, amount_of, event, identity, label, value

NS = 1e-9

RebuildOutcome = Literal["resized", "refused", "failed"]


@event(
    81, "control.pool_rebuilt", "Somebody wanted the pool to have another size: whether it has, and what it took.",
    feeds=(
        metrics.POOL_REBUILDS.count(),
        metrics.POOL_REBUILD_SECONDS.observe(amount_of("duration_ns", NS)),
    ),
)  # fmt: skip
class PoolRebuilt(Event):
    """If it was resized, blocks from `new_num_blocks` on are gone or come new and empty; else nothing has changed.

    `BlocksEvicted` with reason `resize` and `BlocksRelocated` come before it and tell how room was made.
    """

    old_num_blocks: Annotated[int, value(1, "Blocks before, the null block included.", "blocks")]
    new_num_blocks: Annotated[int, value(2, "Blocks that were asked for, the null block included.", "blocks")]
    outcome: Annotated[RebuildOutcome, label(3, "Whether it has that size now.")]
    duration_ns: Annotated[int | None, value(4, "Time without steps; none if it was refused.", "ns")]
    watermark_blocks: Annotated[int, value(5, "Watermark from now on.", "blocks")]
    reason: Annotated[str, identity(6, "Why, in the words of whoever asked.")] = ""
    error: Annotated[str, identity(7, "What stood against it; empty if it has that size now.")] = ""
    tier: Annotated[Tier, label(8, "Tier of the pool.")] = "device"


@event(80, "control.drain_started", "The engine takes no new requests and finishes those it has.")
class DrainStarted(Event):
    """Sent on SIGTERM; after the grace time what still runs is aborted."""

    grace_ns: Annotated[int, value(1, "Grace time.", "ns")]
