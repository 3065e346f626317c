"""Changes the settings of one engine between two steps, all that are asked for or none. Engine thread only.

    plan ──▶ victims give their blocks back ──▶ the pool changes ──▶ settings are in force ──▶ ConfigChanged
    refused                                     failed: all settings as before

Owns the declared values and the version of the settings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import structlog

from kvwatch.control import (
    ChangeOutcome,
    ChangePreview,
    Changes,
    OutsideSetting,
    SettingChange,
    SettingKey,
    SettingsState,
    SettingState,
    SettingValue,
)
from kvwatch.errors import ChangeConflict, ChangeRefused
from kvwatch.telemetry.events import ConfigChanged
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.core import EngineCore
from kvwatch_engine.live.planning import ChangePlan, plan_change
from kvwatch_engine.live.values import live_values, text_of, unknown_key
from kvwatch_engine.resize import PreparedResize

_ASSUMED_BYTES_PER_SECOND: Final = 1e9
"""Speed of copying blocks before any was measured."""

logger = structlog.get_logger(__name__)


class Changer:
    """Knows what was declared, and carries out what is wanted instead."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._outside: dict[SettingKey, OutsideSetting] = {}
        self._declared = live_values(core.settings)
        # Not from 0 at every start: what somebody has read of the engine before is out of date.
        self._version = core.log.clock.wall_ns() // 1_000_000
        self._bytes_per_second = _ASSUMED_BYTES_PER_SECOND
        self._note_drift()

    def attach(self, key: SettingKey, setting: OutsideSetting) -> None:
        """Offer a setting that is not the engine's own; the value that it has now is the declared one."""
        self._outside[key] = setting
        self._declared[key] = setting.get()
        self._note_drift()

    # ------------------------------------------------------------ reading

    def state(self) -> SettingsState:
        """Return all live settings."""
        declared = self._declared
        settings = [SettingState(key, value, declared[key]) for key, value in self._values().items()]
        return SettingsState(self._version, settings, is_rebuild_allowed=False)

    def preview(self, changes: Changes, arriving: Iterable[GenerationRequest]) -> ChangePreview:
        """Return what `change` would do now."""
        try:
            plan = self._plan(changes, arriving)
        except ChangeRefused as error:
            return ChangePreview(
                version=self._version, is_possible=False, problem=str(error), is_passing=error.is_passing
            )
        block_bytes = self._core.block_bytes
        moved = plan.num_blocks_kept * block_bytes if plan.is_resize else 0
        return ChangePreview(
            version=self._version,
            is_possible=True,
            changes=list(plan.changes),
            num_blocks_freed=plan.num_blocks_freed,
            preempted_requests=[request.request_id for request in plan.victims],
            num_recomputed_tokens=sum(request.num_tokens_to_lose for request in plan.victims),
            num_cached_blocks_lost=plan.num_cached_blocks_lost,
            pause_seconds=moved / self._bytes_per_second,
            memory_bytes=plan.wanted.num_blocks * block_bytes if plan.is_resize else None,
            extra_memory_bytes=moved,
            notes=list(plan.notes),
        )

    # ------------------------------------------------------------ changing

    def prepare(
        self, changes: Changes, arriving: Iterable[GenerationRequest], *, actor: str, reason: str, version: int | None
    ) -> tuple[EngineSettings, Callable[[], ChangeOutcome]]:
        """Find out whether a change is possible; return the settings that are wanted, and what carries it out.

        Raises:
            ChangeConflict: the settings have another version than `version`.
            ChangeRefused: it cannot be as asked.
        """
        if version is not None and version != self._version:
            raise ChangeConflict(
                f"the settings have version {self._version}, not {version}: somebody has changed them; read them again"
            )
        begun_ns = self._core.log.clock.monotonic_ns()
        try:
            plan = self._plan(changes, arriving)
        except ChangeRefused as error:
            num_blocks = changes.get("num_blocks")
            if isinstance(num_blocks, int) and not error.is_passing:
                self._core.report_refused_resize(num_blocks, reason, str(error))
            raise
        return plan.wanted, lambda: self._carry_out(plan, begun_ns, actor, reason)

    def declare(self, keys: Sequence[str], actor: str, reason: str) -> SettingsState:
        """Let what is live be the declared value of these settings.

        Raises:
            ChangeRefused: a key is unknown.
        """
        values = self._values()
        unknown = set(keys) - {str(key) for key in values}
        if unknown:
            raise unknown_key(min(unknown))
        chosen = {key: value for key, value in values.items() if key in keys}
        changed = [SettingChange(key, value, value) for key, value in chosen.items() if self._declared[key] != value]
        self._declared.update(chosen)
        self._tell(changed, actor, reason)
        return self.state()

    # ------------------------------------------------------------ parts

    def _values(self) -> dict[SettingKey, SettingValue]:
        return {**live_values(self._core.settings), **self._outside_values()}

    def _outside_values(self) -> Mapping[SettingKey, SettingValue]:
        return {key: setting.get() for key, setting in self._outside.items()}

    def _plan(self, changes: Changes, arriving: Iterable[GenerationRequest]) -> ChangePlan:
        core = self._core
        return plan_change(core, changes, self._outside_values(), core.accepted(arriving))

    def _carry_out(self, plan: ChangePlan, begun_ns: int, actor: str, reason: str) -> ChangeOutcome:
        core, clock = self._core, self._core.log.clock
        for request in plan.victims:
            core.scheduler.drop(request, "rebuild")
        if plan.is_resize:
            resize_ns = clock.monotonic_ns()
            core.resize(PreparedResize(plan.wanted, core.resizer.plan(plan.wanted.num_blocks), reason))
            self._note_speed(plan, clock.monotonic_ns() - resize_ns)
        else:
            core.adopt(plan.wanted)
        for key, value in plan.outside.items():
            self._outside[key].set(value)
        self._tell(plan.changes, actor, reason)
        return ChangeOutcome(
            version=self._version,
            changes=list(plan.changes),
            pause_seconds=(clock.monotonic_ns() - begun_ns) / 1e9,
            preempted_requests=[request.request_id for request in plan.victims],
            num_cached_blocks_lost=plan.num_cached_blocks_lost,
        )

    def _note_speed(self, plan: ChangePlan, duration_ns: int) -> None:
        moved = plan.num_blocks_kept * self._core.block_bytes
        if moved >= 1 << 20 and duration_ns > 0:  # less says more about everything else
            self._bytes_per_second = moved / duration_ns * 1e9

    def _tell(self, changed: Sequence[SettingChange], actor: str, reason: str) -> None:
        if not changed:
            return
        self._version += 1
        self._note_drift()
        core = self._core
        config = core.settings.numbers()
        for each in changed:
            old, new, declared = text_of(each.old), text_of(each.new), text_of(self._declared[each.key])
            logger.info("setting changed", key=each.key, old=old, new=new, actor=actor, reason=reason)
            if core.log.active:
                core.log.append(ConfigChanged(actor, each.key, old, new, declared, reason, config))

    def _note_drift(self) -> None:
        values = self._values()
        self._core.config_drift = {str(key): float(value != self._declared[key]) for key, value in values.items()}
