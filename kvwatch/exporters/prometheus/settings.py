"""What an operator says about series, as text of flags: allow-lists, and thresholds that become bounds of buckets."""

import math
from collections.abc import Mapping

from kvwatch.errors import ConfigError
from kvwatch.ledger.series import SeriesSettings
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric

MAX_NAMES = 20
"""Values of one label that get series of their own; each adds series to every metric that has the label."""

MAX_THRESHOLDS = 8
"""Bounds that are added to one histogram; each is a series."""

MAX_SECONDS = 86_400
"""Longest time that can be a threshold."""

TENANT, ADAPTER = "tenant", "lora"
TENANTS_SETTING, LORAS_SETTING = "--metrics-tenants", "--metrics-loras"
SLO_SETTINGS: Mapping[str, Metric] = {
    "--slo-ttft": m.TIME_TO_FIRST_TOKEN,
    "--slo-itl": m.INTER_TOKEN_LATENCY,
    "--slo-e2e": m.END_TO_END,
}
"""Setting to the histogram whose bounds it adds to."""


def series_settings(tenants: str | None, loras: str | None, thresholds: Mapping[str, str | None]) -> SeriesSettings:
    """Read the settings.

    Args:
        tenants: Names with commas between them; none for no names.
        loras: The same for adapters.
        thresholds: Setting (a key of `SLO_SETTINGS`) to seconds with commas between them, or none.

    Raises:
        ConfigError: a list is too long, or a threshold is no positive number of seconds.
    """
    return SeriesSettings(
        allowed={
            TENANT: frozenset(parse_names(tenants, TENANTS_SETTING)),
            ADAPTER: frozenset(parse_names(loras, LORAS_SETTING)),
        },
        thresholds={SLO_SETTINGS[each]: parse_seconds(text, each) for each, text in thresholds.items()},
    )


def parse_names(text: str | None, setting: str) -> tuple[str, ...]:
    """Return the names of a list with commas, each once, in their order.

    Raises:
        ConfigError: there are more than `MAX_NAMES`.
    """
    names = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    if len(names) > MAX_NAMES:
        raise ConfigError(
            f"{setting}: {len(names)} names, but each adds series and {MAX_NAMES} is the limit; name those that "
            "matter, all others are counted as `other`"
        )
    return names


def parse_seconds(text: str | None, setting: str) -> tuple[float, ...]:
    """Return the thresholds of a list with commas, ascending, each once.

    Raises:
        ConfigError: one is not between 0 and `MAX_SECONDS`, or there are more than `MAX_THRESHOLDS`.
    """
    found: set[float] = set()
    for part in (text or "").split(","):
        if not part.strip():
            continue
        try:
            seconds = float(part)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_SECONDS:
            raise ConfigError(
                f"{setting}: {part.strip()!r} is no time in seconds; write for instance 0.2,0.5; at most a day"
            )
        found.add(seconds)
    if len(found) > MAX_THRESHOLDS:
        raise ConfigError(
            f"{setting}: {len(found)} thresholds, but {MAX_THRESHOLDS} is the limit; keep those agreed on"
        )
    return tuple(sorted(found))
