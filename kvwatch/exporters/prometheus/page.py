"""The rendered page: at most one rendering in a while, shared by everybody who asks.

Rendering takes milliseconds of the interpreter; scrapers, curious people and load balancers must not be able to take
them from the engine as often as they like.
"""

import threading
import time
from collections.abc import Iterable
from typing import Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from kvwatch.exporters.prometheus.families import Family
from kvwatch.exporters.prometheus.writer import Format, PageWriter
from kvwatch.telemetry.clock import Clock

CONTENT_TYPES: dict[Format, str] = {"text": CONTENT_TYPE_PLAIN_0_0_4, "openmetrics": CONTENT_TYPE_LATEST}


class FamilySource(Protocol):
    """What a page shows."""

    def families(self) -> Iterable[Family]:
        """Return the families as they are now. Any thread."""
        ...


class Rendered(msgspec.Struct, frozen=True):
    """One page."""

    body: bytes
    content_type: str
    rendered_ns: int
    """Monotonic time of the rendering in ns."""


def negotiate(accept: str) -> Format:
    """Choose the format that an Accept header asks for: OpenMetrics if it is named, else text."""
    for part in accept.split(","):
        media_type, *parameters = (token.strip() for token in part.split(";"))
        is_refused = any(parameter in {"q=0", "q=0.0"} for parameter in parameters)
        if media_type.lower() == "application/openmetrics-text" and not is_refused:
            return "openmetrics"
    return "text"


class MetricsPage:
    """Renders a collector. Any thread: one renders, the others wait for it and share the bytes.

    Args:
        collector: What to render.
        clock: Decides when a page is old.
        interval_seconds: Age in seconds up to which a page is shared; 0 renders for everybody.
    """

    def __init__(self, collector: FamilySource, clock: Clock, interval_seconds: float = 1.0) -> None:
        self._collector = collector
        self._clock = clock
        self._interval_ns = round(interval_seconds * 1e9)
        self._writer = PageWriter()
        self._lock = threading.Lock()
        self._pages: dict[Format, Rendered] = {}
        self.num_renderings = 0
        self.cpu_seconds = 0.0
        """Processor time that rendering took."""

    def shared(self, accept: str = "") -> Rendered | None:
        """Return the page if it is young enough, without blocking."""
        page = self._pages.get(negotiate(accept))
        is_young = page is not None and self._clock.monotonic_ns() - page.rendered_ns < self._interval_ns
        return page if is_young else None

    def render(self, accept: str = "", *, fresh: bool = False) -> Rendered:
        """Return the page, rendering it if it is too old or `fresh` is asked for. Takes milliseconds: not on a loop."""
        with self._lock:
            page = None if fresh else self.shared(accept)
            if page is None:
                started = time.thread_time()
                page = self._render(negotiate(accept))
                self.cpu_seconds += time.thread_time() - started
            return page

    def _render(self, form: Format) -> Rendered:
        now = self._clock.monotonic_ns()
        page = Rendered(self._writer.write(self._collector.families(), form), CONTENT_TYPES[form], now)
        self._pages[form] = page
        self.num_renderings += 1
        return page
