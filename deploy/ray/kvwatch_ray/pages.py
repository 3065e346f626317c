"""Pages of metrics: many into one, and the few numbers that scaling needs out of one."""

from collections.abc import Iterable, Mapping

from kvwatch.derive.metrics import full_name
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric

_HEADERS = ("# HELP ", "# TYPE ")


def merged(pages: Iterable[str]) -> str:
    """Return one page with the series of all, each family with one header. Engines must have names of their own.

    Args:
        pages: In Prometheus' text format.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith(_HEADERS):
                family = line.split(" ", 3)[2]
                known = headers.setdefault(family, [])
                if line[:7] not in {each[:7] for each in known}:
                    known.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(line)
    lines = (line for family, known in headers.items() for line in (*known, *samples.get(family, ())))
    return "\n".join(lines) + "\n"


def value_of(page: str, metric: Metric, labels: Mapping[str, str] | None = None) -> float | None:
    """Return the sum of a metric's series that have these labels; None if there is none."""
    name, wanted = full_name(metric), [f'{key}="{value}"' for key, value in (labels or {}).items()]
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((name + "{", name + " ")) and all(each in line for each in wanted)
    ]
    return sum(found) if found else None


def stalled_seconds(page: str) -> float | None:
    """Return the time during which requests have waited for blocks."""
    return value_of(page, m.KV_STALL_SECONDS)
