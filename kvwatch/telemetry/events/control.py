"""Events of the people who run the server, and of what they change. Numbers 80 to 89."""

from typing import Annotated, Literal

from kvwatch.telemetry import metrics
from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.schema import Event, amount_of, event, identity, label, value

NS = 1e-9

RebuildOutcome = Literal["resized", "refused", "failed", "rebuilt"]

SettingKey = Literal[
    "num_blocks",
    "watermark",
    "max_num_seqs",
    "max_batch_tokens",
    "max_prefill_chunk",
    "max_queued_requests",
    "max_queued_tokens",
    "reserve_prompt",
    "preemption_mode",
    "victim_policy",
    "protect_after_preemptions",
    "prefix_cache",
    "trace_ratio",
    "log_level",
    "block_size",
    "kv_dtype",
    "num_speculative_tokens",
]
"""Settings that can change while the engine runs; `kvwatch.control.settings` says what they are."""


@event(
    81, "control.pool_rebuilt", "Somebody wanted the pool to have another size or layout: whether it has it now.",
    feeds=(
        metrics.POOL_REBUILDS.count(),
        metrics.POOL_REBUILD_SECONDS.observe(amount_of("duration_ns", NS)),
    ),
)  # fmt: skip
class PoolRebuilt(Event):
    """If it was resized, blocks from `new_num_blocks` on are gone or come new and empty.

    `BlocksEvicted` with reason `resize` and `BlocksRelocated` come before it and tell how room was made; if it was
    rebuilt, with blocks of another size or type, `BlocksLaidOut`. If it was refused or failed, it is as it was.
    """

    old_num_blocks: Annotated[int, value(1, "Blocks before, the null block included.", "blocks")]
    new_num_blocks: Annotated[int, value(2, "Blocks that were asked for, the null block included.", "blocks")]
    outcome: Annotated[RebuildOutcome, label(3, "Whether it has that size now.")]
    duration_ns: Annotated[int | None, value(4, "Time without steps; none if it was refused.", "ns")]
    watermark_blocks: Annotated[int, value(5, "Watermark from now on.", "blocks")]
    reason: Annotated[str, identity(6, "Why, in the words of whoever asked.")] = ""
    error: Annotated[str, identity(7, "What stood against it; empty if it has that size now.")] = ""
    tier: Annotated[Tier, label(8, "Tier of the pool.")] = "device"
    max_model_len: Annotated[
        int | None, value(9, "Longest sequence that model and pool, without pins, allow from now on.", "tokens")
    ] = None


@event(80, "control.drain_started", "The engine takes no new requests and finishes those it has.")
class DrainStarted(Event):
    """Sent on SIGTERM; after the grace time what still runs is aborted."""

    grace_ns: Annotated[int, value(1, "Grace time.", "ns")]


@event(
    82, "control.config_changed", "Somebody changed a setting of the running engine.",
    feeds=(metrics.CONFIG_CHANGES.count(),),
)  # fmt: skip
class ConfigChanged(Event):
    """One for each setting. When only the declared value has changed, `old` is `new`."""

    actor: Annotated[str, identity(1, "Who asked.")]
    key: Annotated[SettingKey, label(2, "Setting.")]
    old: Annotated[str, identity(3, "Value before, as text.")]
    new: Annotated[str, identity(4, "Value from now on, as text.")]
    declared: Annotated[str, identity(5, "Value that flags, environment and file say, as text.")]
    reason: Annotated[str, identity(6, "Why, in the words of whoever asked.")]
    config: Annotated[dict[str, float], value(7, "All settings in force from now on that are numbers.", "1")]

    @property
    def is_drift(self) -> bool:
        """Whether the setting is not what was declared."""
        return self.new != self.declared


@event(83, "control.admission_paused", "Somebody has the engine admit no waiting request for a while.")
class AdmissionPaused(Event):
    """Who runs goes on. A second one sets a new time."""

    actor: Annotated[str, identity(1, "Who asked.")]
    reason: Annotated[str, identity(2, "Why, in the words of whoever asked.")]
    duration_ns: Annotated[int, value(3, "Time after which admission goes on by itself.", "ns")]


@event(84, "control.admission_resumed", "Waiting requests are admitted again.")
class AdmissionResumed(Event):
    """Since somebody asked, or since the time of the pause was over."""

    actor: Annotated[str, identity(1, "Who asked; empty when the time was over.")]
    reason: Annotated[str, identity(2, "Why, in the words of whoever asked.")]
    paused_ns: Annotated[int, value(3, "How long it was paused.", "ns")]


@event(88, "control.adapter_loaded", "A LoRA adapter is in memory, and requests may use it.")
class AdapterLoaded(Event):
    """The same folder, loaded again, is another adapter to the prefix cache."""

    adapter: Annotated[str, label(1, "Name under which it is served.")]
    load_id: Annotated[str, identity(2, "Names this loading; part of the block hashes of its requests.")]
    rank: Annotated[int, value(3, "Highest rank of its modules.", "1")]
    num_bytes: Annotated[int, value(4, "Memory that it takes.", "bytes")]
    total_bytes: Annotated[int, value(5, "Memory of all adapters from now on.", "bytes")]


@event(89, "control.adapter_freed", "An unloaded LoRA adapter is in memory no more: its last request has ended.")
class AdapterFreed(Event):
    """What the prefix cache holds of it can be found no more."""

    adapter: Annotated[str, label(1, "Name under which it was served.")]
    load_id: Annotated[str, identity(2, "Names its loading.")]
    num_bytes: Annotated[int, value(3, "Memory that it took.", "bytes")]
    total_bytes: Annotated[int, value(4, "Memory of all adapters from now on.", "bytes")]
    in_use_ns: Annotated[int, value(5, "Time since it was unloaded, in which requests still used it.", "ns")]
