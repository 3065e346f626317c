"""Makes the tiers behind the device from what was set: part of the composition root of `kvwatch serve`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvwatch.config import parse_bytes
from kvwatch.errors import ConfigError
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.cache import KVGroup
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.tiers import Tiers
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.sizing import free_memory_bytes
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.file_system import FileSystem, folder_error
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings
from kvwatch_engine.serve.settings import ServeSettings

if TYPE_CHECKING:
    from kvwatch_engine.model.runner import ModelRunner


def tier_settings(flags: ServeSettings) -> TierSettings:
    """Read the settings of the tiers, before a model is loaded for them.

    Raises:
        ConfigError: a size is none, two settings contradict each other, or the machine has not that much.
    """
    if (flags.disk_dir is None) != (flags.disk_bytes is None):
        raise ConfigError("--disk-dir says where the disk tier is, --disk-bytes how large; give both or neither")
    if flags.preemption_mode == "swap" and flags.host_memory is None:
        raise ConfigError("--preemption-mode swap needs room to swap to; give --host-memory, or another mode")
    settings = TierSettings(
        host_bytes=parse_bytes(flags.host_memory, "--host-memory") if flags.host_memory is not None else 0,
        disk_folder=Path(flags.disk_dir) if flags.disk_dir is not None else None,
        disk_bytes=parse_bytes(flags.disk_bytes, "--disk-bytes") if flags.disk_bytes is not None else 0,
        bytes_per_second=_bandwidth(flags.swap_bandwidth),
        transfer_seconds=flags.transfer_seconds,
    )
    if flags.strict_prefix_cache and settings.has_tiers:
        raise ConfigError(
            "--strict-prefix-cache compares token ids, which tiers do not keep; leave it out, or --host-memory and "
            "--disk-dir"
        )
    free = free_memory_bytes()
    if settings.host_bytes > free:
        raise ConfigError(
            f"--host-memory {flags.host_memory} is more than the {free / 2**30:.1f} GiB that this machine has free; "
            "give less"
        )
    if settings.disk_folder is not None:
        try:
            FileSystem().make_folder(settings.disk_folder)
        except OSError as error:
            raise folder_error(settings.disk_folder, error) from error
    return settings


def served_groups(settings: TierSettings, model: ModelInfo) -> tuple[KVGroup, ...]:
    """Return the KV groups of a model as they are served with these tiers.

    Tiers keep beginnings of sequences, block by block in one order; each of several groups would have another part to
    be kept, moved and found. A model with one window for all its layers is served as if it had none, which costs the
    blocks outside of the window and changes no text.

    Raises:
        ConfigError: the model has several groups.
    """
    if not settings.has_tiers:
        return model.groups
    if len(model.groups) > 1:
        raise ConfigError(
            f"layers of {model.name} see different windows: it has {len(model.groups)} KV groups, but --host-memory "
            "and --disk-dir serve models with one; leave both out, and preempted requests are computed again"
        )
    return tuple(replace(group, window=None) for group in model.groups)


def tiers_factory(
    settings: TierSettings, runner: "ModelRunner", model: ModelInfo, log: EventLog
) -> Callable[[BlockManager], Tiers] | None:
    """Return what makes the tiers once there are block tables; none if no tier was asked for.

    What is returned raises ConfigError if a tier is smaller than a block, or the folder cannot be used.
    """
    if not settings.has_tiers:
        return None
    from kvwatch_engine.memory.tiers.device import device_store, pinned_memory

    spec = runner.kv_cache.spec
    identity = StoreIdentity(
        weights_fingerprint=model.weights_fingerprint,
        kv_dtype=spec.dtype,
        block_size=spec.block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    device = device_store(lambda: runner.kv_cache)
    machine = Machine(device) if runner.kv_cache.device.type == "cpu" else Machine(device, pinned_memory)
    return lambda manager: MemoryTiers(manager, settings, machine, identity, spec.block_bytes, log)


def _bandwidth(text: str | None) -> float | None:
    return None if text is None else float(parse_bytes(text.strip().removesuffix("/s"), "--swap-bandwidth"))
