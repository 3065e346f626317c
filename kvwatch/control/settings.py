"""Which settings of a running engine can change, and how: declared here once.

The admin API, the documentation and the flags of `serve` take type, bounds and meaning from this table. Knows no
engine: what stands against a change (live requests, memory) the engine says itself.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal

import msgspec

from kvwatch.telemetry.events.control import SettingKey

SettingValue = str | int | float | bool | None
"""Value of a setting; none unsets an optional one."""

SettingType = Literal["int", "float", "bool", "choice", "text"]


class ChangeKind(StrEnum):
    """When a setting can change."""

    BETWEEN_STEPS = "between_steps"
    """At once, between two steps."""
    REBUILD = "rebuild"
    """The cache is laid out anew while no step runs; only with `--allow-rebuild`."""


class LiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that can change while the engine serves; its key is that of `serve`'s configuration."""

    key: SettingKey
    type: SettingType
    brief: str
    unit: str = ""
    kind: ChangeKind = ChangeKind.BETWEEN_STEPS
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    """Whether none is a value."""

    def problem(self, value: object) -> str:
        """Return why `value` cannot be this setting's, with the remedy; empty when type and bounds allow it.

        Text such as a watermark is read by the engine, which knows its pool.
        """
        if value is None:
            return "" if self.is_optional else f"{self.key} cannot be unset; give {self._expected()}"
        if not self._is_typed(value):
            return f"{self.key}: {value!r} is not {self._expected()}; give one"
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.minimum is not None and value < self.minimum:
                return f"{self.key}: {value} is less than {self.minimum:g}; give at least that"
            if self.maximum is not None and value > self.maximum:
                return f"{self.key}: {value} is more than {self.maximum:g}; give at most that"
        return ""

    def _is_typed(self, value: object) -> bool:
        if self.type == "bool":
            return isinstance(value, bool)
        if self.type == "int":
            return isinstance(value, int) and not isinstance(value, bool)
        if self.type == "float":
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        return isinstance(value, str) and (self.type == "text" or value in self.choices)

    def _expected(self) -> str:
        words = {"int": "an integer", "float": "a finite number", "bool": "true or false", "text": "text"}
        return words.get(self.type) or f"one of {', '.join(self.choices)}"


LIVE_SETTINGS: Final[Mapping[SettingKey, LiveSetting]] = {
    each.key: each
    for each in (
        LiveSetting(
            key="num_blocks", type="int", unit="blocks", minimum=2,
            brief="Blocks of the pool, the null block included.",
        ),
        LiveSetting(
            key="watermark", type="text", brief="Blocks kept free at admission: 0.02 is a ratio, 8 are blocks.",
        ),
        LiveSetting(
            key="max_num_seqs", type="int", unit="sequences", minimum=1, maximum=4096,
            brief="Most sequences in one step.",
        ),
        LiveSetting(key="max_batch_tokens", type="int", unit="tokens", minimum=1, brief="Most tokens in one step."),
        LiveSetting(
            key="max_prefill_chunk", type="int", unit="tokens", minimum=1, is_optional=True,
            brief="Most tokens of one sequence in one step.",
        ),
        LiveSetting(
            key="max_queued_requests", type="int", unit="requests", minimum=1,
            brief="Waiting requests beyond this get 429.",
        ),
        LiveSetting(
            key="max_queued_tokens", type="int", unit="tokens", minimum=1,
            brief="Waiting prompt tokens beyond this get 429.",
        ),
        LiveSetting(
            key="reserve_prompt", type="bool",
            brief="Admit a request only when all its tokens fit at once; else its first chunk is enough.",
        ),
        LiveSetting(
            key="preemption_mode", type="choice", choices=("recompute", "swap", "auto"),
            brief="What becomes of K/V whose blocks are taken; auto: what is cheaper, as measured.",
        ),
        LiveSetting(
            key="victim_policy", type="choice", choices=("newest", "least-computed", "lowest-priority"),
            brief="Who yields when blocks are short; low priorities always come first.",
        ),
        LiveSetting(
            key="protect_after_preemptions", type="int", unit="preemptions", minimum=1,
            brief="A request that was preempted so often yields last of its priority.",
        ),
        LiveSetting(key="prefix_cache", type="bool", brief="Reuse the blocks of known prefixes."),
        LiveSetting(
            key="trace_ratio", type="float", unit="ratio", minimum=0, maximum=1,
            brief="Part of the traces that begin here which is exported.",
        ),
        LiveSetting(
            key="log_level", type="choice", choices=("debug", "info", "warning", "error"),
            brief="Least severe lines shown.",
        ),
        LiveSetting(
            key="block_size", type="int", unit="tokens", minimum=1, maximum=1024, kind=ChangeKind.REBUILD,
            brief="Tokens in one block.",
        ),
        LiveSetting(
            key="kv_dtype", type="choice", choices=("auto", "int8", "fp8_e4m3", "fp8_e5m2"), kind=ChangeKind.REBUILD,
            brief="Type of the cache: `auto` is the model's; int8 and fp8 hold two to four times the tokens.",
        ),
        LiveSetting(
            key="num_speculative_tokens", type="int", unit="tokens", minimum=0, maximum=32,
            brief="Tokens guessed from a sequence's own text and verified in one step; 0: none.",
        ),
    )
}  # fmt: skip
"""Every setting that can change live, by its key."""


def setting_of(key: str) -> LiveSetting | None:
    """Return the setting that is called so; none if none is, or it cannot change live."""
    return {str(known): setting for known, setting in LIVE_SETTINGS.items()}.get(key)
