"""What a change of settings would do to an engine as it is now, and what stands against it. Changes nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvwatch.control import Changes, SettingChange, SettingKey, SettingValue
from kvwatch.errors import ChangeRefused
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.rebuild import Rebuilder, RebuildPlan
from kvwatch_engine.live.values import check_changes, is_rebuild, live_values, wanted_settings
from kvwatch_engine.resize import AcceptedRequest, check_worst_cases
from kvwatch_engine.scheduling.request import Request, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePlan:
    """A change that is possible; valid until a request or a block changes."""

    wanted: EngineSettings
    changes: tuple[SettingChange, ...]
    """What really changes."""
    outside: Mapping[SettingKey, SettingValue]
    """What changes of the settings that are not the engine's."""
    victims: tuple[Request, ...] = ()
    """Running requests that must give their blocks back."""
    num_blocks_freed: int = 0
    num_cached_blocks_lost: int = 0
    moved_bytes: int = 0
    """Bytes that are copied while no step runs."""
    extra_bytes: int = 0
    """Memory that is needed for a while beside that of the present pool."""
    pool_bytes: int | None = None
    """Memory of the pool afterwards; none when it stays."""
    is_resize: bool = False
    is_sized: bool = False
    """Whether whoever asked has chosen the number of blocks."""
    rebuild: RebuildPlan | None = None
    notes: tuple[str, ...] = ()


def plan_change(
    core: EngineCore,
    changes: Changes,
    outside: Mapping[SettingKey, SettingValue],
    accepted: Iterable[AcceptedRequest],
    rebuilder: Rebuilder | None,
) -> ChangePlan:
    """Return how the engine would change.

    Args:
        core: the engine, between two steps.
        changes: what is wanted.
        outside: present values of the settings that are not the engine's, as far as there are any.
        accepted: requests that were accepted and have not ended.
        rebuilder: what lays the cache out anew; none if that is not allowed.

    Raises:
        ChangeRefused: it cannot be so.
    """
    check_changes(changes)
    values = {**live_values(core.settings), **outside}
    absent = changes.keys() - {str(key) for key in values}
    if absent:
        raise ChangeRefused(f"{min(absent)} has nobody here whom it concerns; leave it out")
    is_rebuilt = any(is_rebuild(key) and key in changes and changes[key] != value for key, value in values.items())
    if is_rebuilt and rebuilder is None:
        raise ChangeRefused(
            "block_size and kv_dtype change by a rebuild of the cache, which this server does not allow; start it with "
            "--allow-rebuild"
        )
    wanted = wanted_settings(core.settings, changes)
    if is_rebuilt:
        wanted = replace(wanted, num_pinned_blocks=0)  # pins end with the blocks that they name
    if is_rebuilt and rebuilder is not None and "num_blocks" not in changes:
        wanted = rebuilder.sized(wanted)
    asked = {key: changes[str(key)] for key, value in outside.items() if changes.get(key, value) != value}
    now = {**values, **live_values(wanted), **asked}
    changed = tuple(SettingChange(key, values[key], now[key]) for key in values if values[key] != now[key])
    requests = list(accepted)
    _check_requests(core, wanted, requests)
    plan = ChangePlan(
        wanted=wanted,
        changes=changed,
        outside=asked,
        is_sized="num_blocks" in changes,
        notes=tuple(_notes(core, wanted)),
    )
    if is_rebuilt and rebuilder is not None:
        return _with_rebuild(core, plan, rebuilder.plan(wanted, requests))
    return plan if wanted.num_blocks == core.settings.num_blocks else _with_resize(core, plan, requests)


def _check_requests(core: EngineCore, wanted: EngineSettings, requests: list[AcceptedRequest]) -> None:
    if wanted.preemption_mode == "swap" and core.tiers is None:
        raise ChangeRefused(
            "preemption_mode swap needs room to swap to, and this server was started without; choose recompute or auto"
        )
    if wanted.watermark_blocks >= wanted.num_usable_blocks:
        raise ChangeRefused(
            f"the watermark keeps {wanted.watermark_blocks} blocks free, but a pool of {wanted.num_blocks} has "
            f"{wanted.num_usable_blocks} beside the null block and {wanted.num_pinned_blocks} pinned ones; ask for a "
            "lower watermark, or for more blocks"
        )
    if wanted.max_chunk > core.settings.max_chunk:  # groups with a window hold more for a longer chunk
        check_worst_cases(wanted, requests)
    if wanted.max_num_seqs >= core.settings.max_num_seqs:
        return
    for request in requests:
        if request.sampling.num_sequences > wanted.max_num_seqs:
            raise ChangeRefused(
                f"request {request.request_id} has {request.sampling.num_sequences} sequences, but max_num_seqs would "
                f"be {wanted.max_num_seqs}: it could never run; ask for more, or wait until it has ended"
            )


def _notes(core: EngineCore, wanted: EngineSettings) -> Iterable[str]:
    num_running = core.scheduler.lifecycle.num_admitted_sequences
    if num_running > wanted.max_num_seqs:
        yield f"{num_running} sequences run; they go on, and others wait until fewer than {wanted.max_num_seqs} do"
    if core.settings.enable_prefix_cache and not wanted.enable_prefix_cache:
        yield "cached blocks stay until others need their room, and serve again when the prefix cache is on again"


def _with_resize(core: EngineCore, plan: ChangePlan, requests: list[AcceptedRequest]) -> ChangePlan:
    """Add what another number of blocks takes."""
    resizer, pool, wanted = core.resizer, core.manager.pool, plan.wanted
    resizer.check(wanted, requests)
    num_held = pool.num_used + pool.num_idle_pinned
    surplus = num_held - (wanted.num_blocks - 1)
    victims = core.scheduler.room_makers(surplus) if surplus > 0 else []
    num_freed = core.scheduler.num_blocks_freed_by(victims)
    num_kept = num_held - num_freed
    room, num_cached = wanted.num_blocks - 1 - num_kept, pool.num_cached - pool.num_idle_pinned
    num_moved = num_kept + min(num_cached, room)
    block_bytes = core.block_bytes
    return replace(
        plan,
        victims=tuple(victims),
        num_blocks_freed=num_freed,
        num_cached_blocks_lost=max(0, num_cached - room),
        moved_bytes=num_moved * block_bytes,
        extra_bytes=num_moved * block_bytes,
        pool_bytes=wanted.num_blocks * block_bytes,
        is_resize=True,
    )


def _with_rebuild(core: EngineCore, plan: ChangePlan, rebuild: RebuildPlan) -> ChangePlan:
    """Add what another layout of the cache takes."""
    block, pool = rebuild.layout, core.manager.pool
    notes = [*plan.notes, "prefixes that no running request holds are lost, behind the device too"]
    if len(core.pins):
        notes.append(f"{len(core.pins)} pins end; pin these prefixes again once they are computed")
    if rebuild.is_copied:
        notes.append("what running requests have computed is copied bit for bit; their texts stay as they would be")
    elif block.has_same_content(core.memory.layout(core.settings.block_size, core.settings.kv_dtype)):
        notes.append("memory does not suffice for both caches: running requests are computed again")
    else:
        notes.append("keys and values of another type: running requests are computed again, and texts may change")
    num_swapped = sum(each.state is RequestState.SWAPPED for each in core.scheduler.lifecycle.requests())
    if num_swapped:
        notes.append(f"{num_swapped} requests that are swapped out are computed again")
    return replace(
        plan,
        victims=rebuild.victims,
        num_blocks_freed=core.scheduler.num_blocks_freed_by(rebuild.victims),
        num_cached_blocks_lost=pool.num_cached,
        moved_bytes=rebuild.num_slots * (block.block_bytes // block.block_size),
        extra_bytes=rebuild.extra_bytes,
        pool_bytes=plan.wanted.num_blocks * block.block_bytes,
        rebuild=rebuild,
        notes=tuple(notes),
    )
