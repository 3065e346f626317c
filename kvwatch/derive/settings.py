"""Tables of settings for docs/configuration.md, made from the class that declares them."""

import msgspec

from kvwatch.config import Setting, declared_settings
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


def _kind(each: Setting) -> str:
    text = " or ".join(f"`{choice}`" for choice in each.choices) or each.kind.__name__
    if each.is_repeated:
        return f"{text}, may be given several times"
    low, high = each.spec.minimum, each.spec.maximum
    if low is not None and high is not None:
        text += f", {low:g} to {high:g}"
    elif low is not None or high is not None:
        text += f", at least {low:g}" if low is not None else f", at most {high:g}"
    return f"{text} or none" if each.is_optional else text
