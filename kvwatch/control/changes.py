"""What is asked of a running engine when it is to change, and what it answers. Values only."""

from collections.abc import Mapping

import msgspec

from kvwatch.control.settings import SettingValue
from kvwatch.telemetry.events.control import SettingKey

Changes = Mapping[str, SettingValue]
"""Key of a setting -> the value that it is to have. Keys are those of `LIVE_SETTINGS`."""


class SettingState(msgspec.Struct, frozen=True):
    """One live setting now."""

    key: SettingKey
    live: SettingValue
    declared: SettingValue
    """What flags, environment and file said at the start, or what was declared since."""

    @property
    def has_drifted(self) -> bool:
        """Whether the live value is not the declared one."""
        return self.live != self.declared


class SettingsState(msgspec.Struct, frozen=True):
    """All live settings of an engine at one moment."""

    version: int
    """Grows by one with each change: whoever changes settings may say which version he has read."""
    settings: list[SettingState]
    is_rebuild_allowed: bool
    """Whether settings of kind `rebuild` can change in this engine."""


class SettingChange(msgspec.Struct, frozen=True):
    """One setting that changes, or has changed."""

    key: SettingKey
    old: SettingValue
    new: SettingValue


class ChangePreview(msgspec.Struct, frozen=True, kw_only=True):
    """What a change would do at the moment of asking. Nothing was changed."""

    version: int
    """Version of the settings that this was said of."""
    is_possible: bool
    problem: str = ""
    """What stands against it, with the remedy; empty when it is possible."""
    is_passing: bool = False
    """Whether what stands against it ends within moments by itself."""
    changes: list[SettingChange] = []
    """Settings that would really change; a value that is in force already is left out."""
    is_rebuild: bool = False
    """Whether the cache would be laid out anew while no step runs."""
    num_blocks_freed: int = 0
    """Blocks that would be taken away from running requests."""
    preempted_requests: list[str] = []
    """Requests that would lose their place and be computed again."""
    num_recomputed_tokens: int = 0
    """Tokens that would be computed again."""
    num_cached_blocks_lost: int = 0
    """Cached blocks whose content would be lost."""
    pause_seconds: float | None = None
    """Estimated time without steps; none where nothing like it was measured."""
    memory_bytes: int | None = None
    """Memory that the pool would have afterwards; none when it does not change."""
    extra_memory_bytes: int = 0
    """Memory that the change needs for a while beside that of the present pool."""
    notes: list[str] = []
    """What else whoever asks should know, in plain words: for instance, that texts may change."""


class ChangeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was carried out."""

    version: int
    """Version of the settings from now on."""
    changes: list[SettingChange]
    """Settings that have really changed."""
    pause_seconds: float = 0.0
    """Time during which no step could run, as measured."""
    is_rebuild: bool = False
    preempted_requests: list[str] = []
    num_cached_blocks_lost: int = 0


class AdmissionState(msgspec.Struct, frozen=True):
    """Whether waiting requests are admitted."""

    is_paused: bool
    seconds_left: float | None = None
    """Time after which admission goes on by itself; none while it is not paused."""
