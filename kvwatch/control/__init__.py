"""What may be asked of an engine: the contract between engine, observatory and admin API. A leaf beside telemetry.

settings.py    which settings can change live, and how
changes.py     what a change is and what the engine answers
inspection.py  what can be looked up
prefixes.py    pins and the reset of the prefix cache
adapters.py    LoRA adapters of a server
protocol.py    the calls
"""

from kvwatch.control.adapters import AdapterControl, AdapterInfo
from kvwatch.control.changes import (
    AdmissionState,
    ChangeOutcome,
    ChangePreview,
    Changes,
    SettingChange,
    SettingsState,
    SettingState,
)
from kvwatch.control.inspection import (
    MAX_PAGE,
    BlockInfo,
    BlockOwner,
    BlockPage,
    BlockQuery,
    PrefixInfo,
    PrefixOrder,
    PrefixTop,
    RequestInfo,
    RequestPage,
    RequestQuery,
)
from kvwatch.control.prefixes import PinnedPrefix, PrefixReset, PrefixScope
from kvwatch.control.protocol import EngineControl, LiveControl, OutsideSetting, PrefixControl
from kvwatch.control.settings import LIVE_SETTINGS, ChangeKind, LiveSetting, SettingValue, setting_of
from kvwatch.telemetry.events.control import SettingKey

__all__ = [
    "AdapterControl",
    "AdapterInfo",
    "LIVE_SETTINGS",
    "MAX_PAGE",
    "AdmissionState",
    "BlockInfo",
    "BlockOwner",
    "BlockPage",
    "BlockQuery",
    "ChangeKind",
    "ChangeOutcome",
    "ChangePreview",
    "Changes",
    "EngineControl",
    "LiveControl",
    "LiveSetting",
    "OutsideSetting",
    "PinnedPrefix",
    "PrefixControl",
    "PrefixInfo",
    "PrefixOrder",
    "PrefixReset",
    "PrefixScope",
    "PrefixTop",
    "RequestInfo",
    "RequestPage",
    "RequestQuery",
    "SettingChange",
    "SettingKey",
    "SettingState",
    "SettingValue",
    "SettingsState",
    "setting_of",
]
