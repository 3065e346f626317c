"""One view of all replicas: what each reported last. One actor; replicas call it, the gateway asks it.

Its methods are coroutines although they wait for nothing: so Ray calls them on the actor's loop, one at a time.
"""

import time
from dataclasses import asdict, dataclass

from kvwatch_ray.pages import merged

FORGET_SECONDS = 15.0
"""A replica that has not reported for so long is gone. Ray replaces it within that time, under the same name."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica tells of itself."""

    name: str
    node: str
    pid: int
    """Of the actor; the engine's process is its child."""
    engine_pid: int
    admin: str
    grpc: str
    signals: dict[str, float]
    page: str
    """Its metrics, in Prometheus' text format."""


class Fleet:
    """Keeps the reports."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Report]] = {}

    async def report(self, report: Report) -> None:
        """Take a report; it replaces the last one of its replica."""
        self._reports[report.name] = (time.monotonic(), report)

    async def page(self) -> str:
        """Return the metrics of all replicas as one page."""
        return merged(report.page for _, report in self._living())

    async def table(self) -> list[dict[str, object]]:
        """Return a row for each replica, by name."""
        now = time.monotonic()
        rows = [(at, {**asdict(report), "age_seconds": round(now - at, 3)}) for at, report in self._living()]
        for _, row in rows:
            del row["page"]
        return [row for _, row in rows]

    def _living(self) -> list[tuple[float, Report]]:
        horizon = time.monotonic() - FORGET_SECONDS
        self._reports = {name: entry for name, entry in self._reports.items() if entry[0] > horizon}
        return [self._reports[name] for name in sorted(self._reports)]
