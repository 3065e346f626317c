"""Changes the settings of one engine between two steps, all that are asked for or none. Engine thread only.

    plan ──▶ victims give their blocks back ──▶ the pool changes ──▶ settings are in force ──▶ ConfigChanged
    refused                                     failed: all settings as before

Owns the declared values and the version of the settings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from kvwatch_engine.live.pauses import PauseEstimate
from kvwatch_engine.live.planning import ChangePlan, plan_change
from kvwatch_engine.live.rebuild import Rebuilder
from kvwatch_engine.live.values import live_values, text_of, unknown_key
from kvwatch_engine.resize import PreparedResize
from kvwatch_engine.scheduling.limits import numbers_in_force
from kvwatch_engine.scheduling.request import Request

_ASSUMED_BYTES_PER_SECOND: Final = 1e9
"""Speed of copying blocks before any was measured."""
_ASSUMED_BASE_SECONDS: Final = {False: 0.0, True: 0.2}
"""What a change takes beside that: another number of blocks, and a rebuild, which has the model compute a little."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RebuildLimits:
    """How far a rebuild of the cache may disturb those who are served."""

    max_pause_seconds: float = 10.0
    """Longest time without steps, as estimated, and longest wait for transfers."""
    cooldown_seconds: float = 60.0
    """Time between two rebuilds."""


class Changer:
    """Knows what was declared, and carries out what is wanted instead."""

    def __init__(
        self,
        core: EngineCore,
        limits: RebuildLimits | None = None,
        on_phase: Callable[[str], None] = lambda _phase: None,
    ) -> None:
        """Take the core's settings as declared.

        Args:
            core: the engine, not started yet.
            limits: of rebuilds; none allows none.
            on_phase: is told each phase of a rebuild as it begins.
        """
        self._core = core
        self._limits = limits
        self._rebuilder = Rebuilder(core, core.memory, limits.max_pause_seconds, on_phase) if limits else None
        self._rebuilt_ns: int | None = None
        self._outside: dict[SettingKey, OutsideSetting] = {}
        self._declared = live_values(core.settings)
        # Not from 0 at every start: what somebody has read of the engine before is out of date.
        self._version = core.log.clock.wall_ns() // 1_000_000
        self._pauses = {
            is_rebuild: PauseEstimate(seconds, _ASSUMED_BYTES_PER_SECOND)
            for is_rebuild, seconds in _ASSUMED_BASE_SECONDS.items()
        }
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
        return SettingsState(self._version, settings, is_rebuild_allowed=self._rebuilder is not None)

    def preview(self, changes: Changes, arriving: Iterable[GenerationRequest]) -> ChangePreview:
        """Return what `change` would do now."""
        try:
            plan = self._plan(changes, arriving)
        except ChangeRefused as error:
            return ChangePreview(
                version=self._version, is_possible=False, problem=str(error), is_passing=error.is_passing
            )
        return ChangePreview(
            version=self._version,
            is_possible=True,
            changes=list(plan.changes),
            is_rebuild=plan.rebuild is not None,
            num_blocks_freed=plan.num_blocks_freed,
            preempted_requests=[request.request_id for request in plan.victims],
            num_recomputed_tokens=sum(request.num_tokens_to_lose for request in plan.victims),
            num_cached_blocks_lost=plan.num_cached_blocks_lost,
            pause_seconds=self._pause_seconds(plan),
            memory_bytes=plan.pool_bytes,
            extra_memory_bytes=plan.extra_bytes,
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
        plan = plan_change(core, changes, self._outside_values(), core.accepted(arriving), self._rebuilder)
        if plan.rebuild is not None:
            self._check_limits(plan)
        return plan

    def _check_limits(self, plan: ChangePlan) -> None:
        assert self._limits is not None, "it allowed the rebuild"
        pause, longest = self._pause_seconds(plan), self._limits.max_pause_seconds
        if pause > longest:
            raise ChangeRefused(
                f"no step would run for about {pause:.1f} s, but --max-rebuild-pause allows {longest:g} s; try again "
                "when fewer tokens are live, or start the server with a longer one"
            )
        if self._rebuilt_ns is not None:
            since = (self._core.log.clock.monotonic_ns() - self._rebuilt_ns) / 1e9
            if since < self._limits.cooldown_seconds:
                raise ChangeRefused(
                    f"the cache was rebuilt {since:.1f} s ago, and --rebuild-cooldown is "
                    f"{self._limits.cooldown_seconds:g} s; ask again after that"
                )

    def _pause_seconds(self, plan: ChangePlan) -> float:
        has_pause = plan.rebuild is not None or plan.is_resize
        return self._pauses[plan.rebuild is not None].seconds(plan.moved_bytes) if has_pause else 0.0

    def _carry_out(self, plan: ChangePlan, begun_ns: int, actor: str, reason: str) -> ChangeOutcome:
        clock = self._core.log.clock
        again = self._change_pool(plan, reason)
        if plan.is_sized and self._rebuilder is not None:
            self._rebuilder.sized_as = self._core.settings
        for key, value in plan.outside.items():
            self._outside[key].set(value)
        self._tell(plan.changes, actor, reason)
        return ChangeOutcome(
            version=self._version,
            changes=list(plan.changes),
            pause_seconds=(clock.monotonic_ns() - begun_ns) / 1e9,
            is_rebuild=plan.rebuild is not None,
            preempted_requests=[request.request_id for request in again],
            num_cached_blocks_lost=plan.num_cached_blocks_lost,
        )

    def _change_pool(self, plan: ChangePlan, reason: str) -> Sequence[Request]:
        """Let the settings come into force; return who is computed again."""
        core, clock = self._core, self._core.log.clock
        begun_ns = clock.monotonic_ns()
        if plan.rebuild is not None:
            assert self._rebuilder is not None, "it planned the rebuild"
            try:
                again = self._rebuilder.carry_out(plan.rebuild, plan.wanted, reason)
            finally:
                self._rebuilt_ns = clock.monotonic_ns()
            self._pauses[True].learn(plan.moved_bytes, (self._rebuilt_ns - begun_ns) / 1e9)
            return again
        for request in plan.victims:
            core.scheduler.drop(request, "rebuild")
        if not plan.is_resize:
            core.adopt(plan.wanted)
            return plan.victims
        core.resize(PreparedResize(plan.wanted, core.resizer.plan(plan.wanted.num_blocks), reason))
        self._pauses[False].learn(plan.moved_bytes, (clock.monotonic_ns() - begun_ns) / 1e9)
        return plan.victims

    def _tell(self, changed: Sequence[SettingChange], actor: str, reason: str) -> None:
        if not changed:
            return
        self._version += 1
        self._note_drift()
        core = self._core
        config = numbers_in_force(core.settings)
        for each in changed:
            old, new, declared = text_of(each.old), text_of(each.new), text_of(self._declared[each.key])
            logger.info("setting changed", key=each.key, old=old, new=new, actor=actor, reason=reason)
            if core.log.active:
                core.log.append(ConfigChanged(actor, each.key, old, new, declared, reason, config))

    def _note_drift(self) -> None:
        values = self._values()
        self._core.config_drift = {str(key): float(value != self._declared[key]) for key, value in values.items()}
