"""Events of blocks that move between tiers: swapped requests, offloaded and restored prefixes.

Numbers 81 to 89. Every transfer begins with `TransferStarted` and ends with the event of what it did, with
`TransferFailed`, or with both: blocks that arrived before it failed are told first. `transfer` names it.
"""

from typing import Annotated, Literal

from kvwatch.telemetry import metrics
from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.schema import Event, amount_of, event, identity, label, size_of, value

NS = 1e-9

TransferKindName = Literal["swap_out", "swap_in", "offload", "restore"]
TransferFailure = Literal[
    "copy", "deadline", "dropped", "disk_full", "disk_write", "disk_read", "corrupt", "missing", "no_room", "stopped"
]
"""Why blocks did not arrive.

`copy`: copying memory failed; `deadline`: it took too long; `dropped`: its request ended first; `disk_full`,
`disk_write`, `disk_read`: the disk refused; `corrupt`: a file does not hold what it should; `missing`: what was found
had been evicted by the time it was asked for; `no_room`: too many blocks were on their way already, or the tier's
blocks were all in use; `stopped`: the engine stops.
"""


@event(30, "transfer.started", "Blocks are on their way from one tier to another.")
class TransferStarted(Event):
    """Until the end the blocks stay with their owner in both tiers."""

    transfer: Annotated[int, identity(1, "Number of the transfer.")]
    kind: Annotated[TransferKindName, label(2, "What moves, and which way.")]
    request: Annotated[str, identity(3, "Request whose blocks they are; empty for an offload.")]
    num_blocks: Annotated[int, value(4, "Blocks that move.", "blocks")]
    from_tier: Annotated[Tier, label(5, "Tier that is read.")]
    to_tier: Annotated[Tier, label(6, "Tier that is written.")]


@event(
    31, "transfer.swapped_out", "A preempted request's blocks are in the host's memory.",
    feeds=(
        metrics.SWAP_BLOCKS.count(size_of("destinations"), direction="out"),
        metrics.SWAP_BYTES.count(amount_of("num_bytes"), direction="out"),
        metrics.SWAP_SECONDS.observe(amount_of("duration_ns", NS), direction="out"),
    ),
)  # fmt: skip
class SwappedOut(Event):
    """Its device blocks are released next. A block that several of its sequences share moved once."""

    transfer: Annotated[int, identity(1, "Number of the transfer.")]
    request: Annotated[str, identity(2, "Request whose blocks they are.")]
    sources: Annotated[list[int], identity(3, "Blocks that were read.")]
    destinations: Annotated[list[int], identity(4, "Blocks that hold the same now.")]
    filled_slots: Annotated[list[int], value(5, "Filled slots of each of them.", "tokens")]
    num_bytes: Annotated[int, value(6, "Bytes moved.", "bytes")]
    duration_ns: Annotated[int, value(7, "Time that moving them took.", "ns")]
    waited_ns: Annotated[int, value(8, "Time before that, behind other transfers.", "ns")]
    from_tier: Annotated[Tier, label(9, "Tier that was read.")] = "device"
    to_tier: Annotated[Tier, label(10, "Tier that was written.")] = "host"


@event(
    32, "transfer.swapped_in", "A swapped request's blocks are back on the device.",
    feeds=(
        metrics.SWAP_BLOCKS.count(size_of("destinations"), direction="in"),
        metrics.SWAP_BYTES.count(amount_of("num_bytes"), direction="in"),
        metrics.SWAP_SECONDS.observe(amount_of("duration_ns", NS), direction="in"),
    ),
)  # fmt: skip
class SwappedIn(Event):
    """Its host blocks are released next."""

    transfer: Annotated[int, identity(1, "Number of the transfer.")]
    request: Annotated[str, identity(2, "Request whose blocks they are.")]
    sources: Annotated[list[int], identity(3, "Blocks that were read.")]
    destinations: Annotated[list[int], identity(4, "Blocks that hold the same now.")]
    filled_slots: Annotated[list[int], value(5, "Filled slots of each of them.", "tokens")]
    num_bytes: Annotated[int, value(6, "Bytes moved.", "bytes")]
    duration_ns: Annotated[int, value(7, "Time that moving them took.", "ns")]
    waited_ns: Annotated[int, value(8, "Time before that, behind other transfers.", "ns")]
    from_tier: Annotated[Tier, label(9, "Tier that was read.")] = "host"
    to_tier: Annotated[Tier, label(10, "Tier that was written.")] = "device"


@event(
    33, "transfer.offloaded", "Prefix blocks that were evicted from one tier are in the next one.",
    feeds=(
        metrics.SWAP_BLOCKS.count(size_of("destinations"), direction="offload"),
        metrics.SWAP_BYTES.count(amount_of("num_bytes"), direction="offload"),
        metrics.SWAP_SECONDS.observe(amount_of("duration_ns", NS), direction="offload"),
    ),
)  # fmt: skip
class Offloaded(Event):
    """They were read when they were evicted, so that their places could be reused at once; no source is told."""

    transfer: Annotated[int, identity(1, "Number of the transfer.")]
    destinations: Annotated[list[int], identity(2, "Blocks that hold them now; they can be hit from now on.")]
    filled_slots: Annotated[list[int], value(3, "Filled slots of each of them.", "tokens")]
    num_bytes: Annotated[int, value(4, "Bytes moved.", "bytes")]
    duration_ns: Annotated[int, value(5, "Time that moving them took.", "ns")]
    waited_ns: Annotated[int, value(6, "Time before that, behind other transfers.", "ns")]
    from_tier: Annotated[Tier, label(7, "Tier that evicted them.")]
    to_tier: Annotated[Tier, label(8, "Tier that has them now.")]


@event(
    34, "transfer.restored", "A prefix hit in a tier behind the device: the blocks are on the device now.",
    feeds=(
        metrics.SWAP_BLOCKS.count(size_of("destinations"), direction="restore"),
        metrics.SWAP_BYTES.count(amount_of("num_bytes"), direction="restore"),
        metrics.SWAP_SECONDS.observe(amount_of("duration_ns", NS), direction="restore"),
    ),
)  # fmt: skip
class Restored(Event):
    """They enter the device's prefix index next. The tier that was read keeps them too."""

    transfer: Annotated[int, identity(1, "Number of the transfer.")]
    request: Annotated[str, identity(2, "Request that hit.")]
    sources: Annotated[list[int], identity(3, "Blocks that were read.")]
    destinations: Annotated[list[int], identity(4, "Blocks that hold the same now.")]
    filled_slots: Annotated[list[int], value(5, "Filled slots of each of them.", "tokens")]
    num_bytes: Annotated[int, value(6, "Bytes moved.", "bytes")]
    duration_ns: Annotated[int, value(7, "Time that moving them took.", "ns")]
    waited_ns: Annotated[int, value(8, "Time before that, behind other transfers.", "ns")]
    from_tier: Annotated[Tier, label(9, "Tier that was read.")]
    to_tier: Annotated[Tier, label(10, "Tier that was written.")] = "device"


@event(
    35, "transfer.failed", "Blocks did not arrive; what they held is computed again when it is needed.",
    feeds=(metrics.TRANSFER_FAILURES.count(),),
)  # fmt: skip
class TransferFailed(Event):
    """Serving goes on. An offload that never began has no `TransferStarted` either, and its number is -1."""

    transfer: Annotated[int, identity(1, "Number of the transfer.")]
    kind: Annotated[TransferKindName, label(2, "What should have moved, and which way.")]
    request: Annotated[str, identity(3, "Request whose blocks they are; empty for an offload.")]
    reason: Annotated[TransferFailure, label(4, "Why.")]
    num_blocks: Annotated[int, value(5, "Blocks that did not arrive.", "blocks")]
    from_tier: Annotated[Tier, label(6, "Tier that was to be read.")]
    to_tier: Annotated[Tier, label(7, "Tier that was to be written.")]
    error: Annotated[str, identity(8, "Class of the exception; empty if there was none.")] = ""
