"""Tables of settings for docs/configuration.md, made from the class that declares them."""

import msgspec

from kvwatch.config import Setting, declared_settings
from kvwatch.control import LIVE_SETTINGS, ChangeKind, LiveSetting
from kvwatch.derive.docs import table


def settings_section(cls: type[msgspec.Struct]) -> str:
    """Return the table of a command's settings."""
    rows = [
        (
            f"`{each.flag}`",
            f"`{each.variable}`",
            _kind(each),
            f"`{each.shown(each.default)}`",
            each.spec.brief,
        )
        for each in declared_settings(cls)
    ]
    return table(("flag", "environment", "type", "default", "meaning"), rows)


def live_section() -> str:
    """Return the table of the settings that can change while the engine serves."""
    when = {ChangeKind.BETWEEN_STEPS: "between two steps", ChangeKind.REBUILD: "by a rebuild"}
    rows = [(f"`{each.key}`", _live_kind(each), when[each.kind], each.brief) for each in LIVE_SETTINGS.values()]
    return table(("setting", "type", "changes", "meaning"), rows)


def _live_kind(each: LiveSetting) -> str:
    text = " or ".join(f"`{choice}`" for choice in each.choices) or each.type
    return _bounded(text, each.minimum, each.maximum, is_optional=each.is_optional)


def _kind(each: Setting) -> str:
    text = " or ".join(f"`{choice}`" for choice in each.choices) or each.kind.__name__
    if each.is_repeated:
        return f"{text}, may be given several times"
    return _bounded(text, each.spec.minimum, each.spec.maximum, is_optional=each.is_optional)


def _bounded(text: str, low: float | None, high: float | None, *, is_optional: bool) -> str:
    if low is not None and high is not None:
        text += f", {low:g} to {high:g}"
    elif low is not None or high is not None:
        text += f", at least {low:g}" if low is not None else f", at most {high:g}"
    return f"{text} or none" if is_optional else text
