"""The engine's whole KV state between two steps, as plain columns.

A snapshot and the events that follow it say exactly what all events from the beginning say. Late subscribers, healed
gaps and sidecars that restart all begin with one. Taken by the engine thread between steps.
"""

import msgspec


class SequenceState(msgspec.Struct, frozen=True, gc=False):
    """One live sequence that holds blocks; in a tier behind the device, all blocks of a swapped request."""

    request: str
    sequence: int
    block_ids: list[int]
    tier: str = "device"
    group: str = "0"
    """KV group whose block table this is; what has left a group's window is not in it."""


class RequestState(msgspec.Struct, frozen=True, gc=False):
    """One live request. `state` is `waiting`, `running` or `swapped`."""

    request: str
    state: str
    queued_ns: int
    """Monotonic time at which it was queued."""
    wait_reason: str = ""
    """Why it waits: `blocks`, `sequences`, `tokens` or `paused`; empty while it runs or was not looked at yet."""


class TierState(msgspec.Struct, frozen=True, gc=False):
    """The blocks of one tier, by column. Index 0 is the null block; every column has `num_blocks` entries."""

    tier: str
    num_blocks: int
    ref_counts: list[int]
    """Number of sequences whose block table contains the block."""
    hashes: list[bytes | None]
    """Block hash of every block that the prefix index knows."""
    filled_slots: list[int]
    """Slots whose K/V was written since the block was allocated."""
    ignored_files: dict[str, int] = {}
    """Files in the tier's folder that were of no use when it was opened, by why: `foreign`, `stale`, `torn`."""
    block_groups: list[int] = []
    """KV group of every used or cached block; empty where there is only one group."""
    parents: list[bytes | None] = []
    """Hash of the block before, for every block that has a hash; empty unless the engine gives token ids."""


class GroupState(msgspec.Struct, frozen=True, gc=False):
    """One KV group of an engine: layers of one kind of attention with block tables of their own."""

    group: str
    num_layers: int
    sliding_window: int | None = None
    """Tokens that a query sees, itself included; none sees all."""


class PinState(msgspec.Struct, frozen=True, gc=False):
    """One pinned prefix."""

    pin: str
    hashes: list[bytes]
    """Content that stays, in the device's pool."""


class TransferState(msgspec.Struct, frozen=True, gc=False):
    """Blocks on their way between two tiers."""

    transfer: int
    request: str
    """Request whose blocks they are; empty for an offload."""
    num_blocks: int
    from_tier: str
    to_tier: str


class IndexState(msgspec.Struct, frozen=True, gc=False):
    """Resident hashes in one tier and group of a foreign engine; which blocks hold them is not known.

    Each hash once; `ref_counts` says how many copies of it are there.
    """

    tier: str
    group: str
    hashes: list[bytes]
    ref_counts: list[int]


class EngineSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Everything that a ledger needs to go on from event number `seq`."""

    seq: int
    """Number of the first event that is not contained in this snapshot."""
    step: int
    time_ns: int
    block_size_tokens: int
    block_bytes: int
    watermark_blocks: int
    max_queued_requests: int
    max_queued_tokens: int
    tiers: list[TierState]
    sequences: list[SequenceState]
    requests: list[RequestState]
    engine_state: str = "running"
    """`running`, `draining`, `stalled`, `stopped` or `failed`."""
    config: dict[str, float] = {}
    """Values of the engine's settings that are numbers."""
    memory_bytes: dict[str, int] = {}
    """Memory of the device by what it is for: `weights`, `kv`, `workspace`. What is not known is absent."""
    indexed: list[IndexState] = []
    """What is resident in a foreign engine; it has no tiers, sequences and requests."""
    is_foreign: bool = False
    """Whether the engine tells which hashes are resident and nothing of its blocks."""
    is_complete: bool = True
    """Whether the history of a foreign engine is known from a moment at which its cache was empty."""
    transfers: list[TransferState] = []
    """What is on its way between tiers."""
    last_step_ns: int | None = None
    """Monotonic time at which the last step was completed; none before any."""
    groups: list[GroupState] = []
    """KV groups in the order of their numbers; empty where there is only group 0."""
    config_drift: dict[str, float] = {}
    """For each setting that can change live: 1 if its live value differs from the declared one, else 0."""
    pins: list[PinState] = []
    """Pinned prefixes, the oldest first."""
