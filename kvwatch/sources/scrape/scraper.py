"""Asks an engine for its metrics, again and again, and keeps the last answer."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.complaints import Complaints
from kvwatch.sources.engine_http import EngineHTTP, EngineUnreachableError
from kvwatch.sources.engines import EngineSpec
from kvwatch.sources.scrape.page import Page, read_page
from kvwatch.sources.scrape.rules import Dialect
from kvwatch.sources.scrape.totals import Totals
from kvwatch.telemetry import metrics as m

SCRAPE_SECONDS = 2.0
"""Between two pages: a rendering costs an engine milliseconds."""

MAX_READING_SHARE = 0.05
"""Of a core, for reading one engine's pages: a page of megabytes is asked for less often."""


class MetricsScraper:
    """One engine's metrics. Event loop only, but for properties and `samples`, which any thread may ask."""

    def __init__(self, spec: EngineSpec, dialect: Dialect, interval_seconds: float = SCRAPE_SECONDS) -> None:
        self._spec = spec
        self._dialect = dialect
        self._interval_seconds = interval_seconds
        self._complaints = Complaints(engine=spec.name)
        self._totals: dict[int, Totals] = {}
        self._shown: dict[int, list[Sample | HistogramSample]] = {}
        self._read_seconds = 0.0
        self.is_up = False
        """Whether the last scrape succeeded."""
        self.model_name = ""
        """Name of the model as the metrics say it; empty while it is not known."""
        self.num_refused = 0
        """Pages that were no pages of metrics."""

    async def run(self, stop: asyncio.Event) -> None:
        """Scrape until `stop` is set."""
        http = EngineHTTP(self._spec)
        try:
            while not stop.is_set():
                await self.scrape(http)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self.pause_seconds)
        finally:
            self.is_up = False
            await http.close()

    async def scrape(self, http: EngineHTTP) -> None:
        """Ask once. What goes wrong is logged at most once a minute; gauges are absent then, counters stay."""
        try:
            body = await http.get("/metrics")
            # Off the loop: a large page takes milliseconds to read.
            page = await asyncio.to_thread(self._read, body or b"")
        except EngineUnreachableError as error:
            self._fail("an engine's metrics cannot be read; trying again", error)
        except Exception as error:  # `PageError`, or what a parser did not expect: none of it is a page
            self.num_refused += 1
            self._fail("what an engine calls its metrics is left out", error)
        else:
            self._adopt(page)

    def samples(self, dp_rank: int) -> Iterable[Sample | HistogramSample]:
        """Return a rank's metrics. Any thread."""
        shown = self._shown.get(dp_rank, [])
        # One page is shared by all ranks: its faults are counted with the first.
        return shown if dp_rank else [*shown, Sample(m.SOURCE_DECODE_ERRORS, ("metrics",), self.num_refused)]

    def capacity(self, dp_rank: int) -> int | None:
        """Return the blocks of a rank's pool; None while the engine has not said it."""
        for sample in self._shown.get(dp_rank, []):
            if isinstance(sample, Sample) and sample.metric is m.KV_BLOCK_CAPACITY:
                return round(sample.value)
        return None

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next page, for how long it took to read the last one."""
        return max(self._interval_seconds, self._read_seconds / MAX_READING_SHARE)

    def _read(self, body: bytes) -> Page:
        began = time.thread_time()
        try:
            return read_page(body.decode("utf-8", "replace"), self._dialect)
        finally:
            self._read_seconds = time.thread_time() - began

    def _adopt(self, page: Page) -> None:
        self.model_name = page.model_name or self.model_name
        for rank, samples in page.ranks.items():
            self._shown[rank] = self._totals.setdefault(rank, Totals()).update(samples)
        for rank in self._totals.keys() - page.ranks.keys():
            self._shown[rank] = self._totals[rank].counters()
        self.is_up = True

    def _fail(self, message: str, error: Exception) -> None:
        self.is_up = False
        self._shown = {rank: totals.counters() for rank, totals in self._totals.items()}
        self._complaints.warn(message, error=str(error) or repr(error))
