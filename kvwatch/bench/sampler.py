"""Looks at the target's metrics while the run lasts."""

import asyncio
from collections.abc import Callable

import httpx

from kvwatch.bench.discovery import get_text
from kvwatch.bench.errors import RequestFailed
from kvwatch.bench.signals import Reading, read_signals
from kvwatch.bench.target import Target

INTERVAL_SECONDS = 1.0
"""kvwatch renders its page at most once a second; a faster look would see the same."""
_SCRAPE_SECONDS = 5.0


class Sampler:
    """Takes readings. Event loop only; a target without metrics gives none."""

    def __init__(self, http: httpx.AsyncClient, target: Target, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._http = http
        self._target = target
        self._interval_seconds = interval_seconds
        self.readings: list[Reading] = []
        self.num_failures = 0
        """Times that the page did not come in time or said nothing known."""

    async def take(self, seconds: float) -> Reading | None:
        """Take one reading, stamped with `seconds`; it is not kept."""
        if self._target.metrics_url is None:
            return None
        try:
            text = await get_text(self._http, self._target.metrics_url, _SCRAPE_SECONDS)
        except RequestFailed:
            self.num_failures += 1
            return None
        reading = read_signals(self._target.kind, text)
        if reading is None:
            self.num_failures += 1
            return None
        reading.seconds = seconds
        return reading

    async def run(self, now: Callable[[], float]) -> None:
        """Keep readings until cancelled."""
        while self._target.metrics_url is not None:
            await asyncio.sleep(self._interval_seconds)
            reading = await self.take(now())
            if reading is not None:
                self.readings.append(reading)
