"""A sidecar in this process, for tests: real listeners on free ports, read as a scraper reads them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.sidecar import SidecarSettings
from kvwatch.sidecar_run import Sidecar
from kvwatch.sources.engines import EngineSpec, make_source
from kvwatch.sources.source import Source

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Name and labels (without `model_name`, empty ones left out) to value."""

OF_A_SIDECAR = ("kvwatch_kv_prefix_", "kvwatch_kv_premature_")
"""What a sidecar makes of an engine's events and the engine itself does not show."""


def parse_page(text: str) -> Series:
    """Return all series of a metrics page; one that is there twice is an error."""
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if v and k != "model_name"))
            assert (sample.name, labels) not in series, f"{sample.name} {labels} is there twice"
            series[sample.name, labels] = sample.value
    return series


def of_engine(series: Series, engine: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the series of one engine, without the label that says so."""
    return {
        (name, tuple(label for label in labels if label[0] != "engine")): value
        for (name, labels), value in series.items()
        if ("engine", engine) in labels
    }


class SidecarStage:
    """A running sidecar."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.sidecar = sidecar

    @property
    def url(self) -> str:
        address = self.sidecar.fleet.metrics_address
        assert address is not None
        return "http://{}:{}".format(*address)

    @property
    def grpc(self) -> str:
        assert self.sidecar.stream is not None
        assert self.sidecar.stream.address is not None
        return "{}:{}".format(*self.sidecar.stream.address)

    def wait_until_watched(self, number: int, seconds: float = 60) -> None:
        """Wait until so many ranks are known and every follower of theirs knows their state."""
        deadline = time.monotonic() + seconds
        while not (
            len(self.sidecar.fleet.watches) == number
            and all(not each.needs_snapshot for watch in self.sidecar.fleet.watches for each in watch.collectors)
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def page(self) -> Series:
        """Return what the page says now; waits out the second for which a page is shared."""
        time.sleep(1.05)
        return parse_page(httpx.get(f"{self.url}/metrics", timeout=10).text)

    def wait_for(self, name: str, value: float, engine: str, seconds: float = 60) -> Series:
        """Wait until a series of an engine has this value; return the page."""
        return wait_until(
            self.page, lambda page: of_engine(page, engine).get((name, (("dp_rank", "0"),))) == value, seconds
        )


def wait_until(read: Callable[[], Series], is_good: Callable[[Series], bool], seconds: float = 60) -> Series:
    """Read again and again until the page is as it should be; return it."""
    deadline = time.monotonic() + seconds
    while True:
        page = read()
        if is_good(page):
            return page
        assert time.monotonic() < deadline, sorted(page.items())[:400]


@contextmanager
def sidecar_stage(
    *engines: str, make: Callable[[EngineSpec], Source] = make_source, **more: Any
) -> Iterator[SidecarStage]:
    """Run a sidecar beside these engines for as long as the block lasts."""
    options = {"metrics_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "flight_dir": "off"} | more
    options.setdefault("admin_listen", "127.0.0.1:0")
    sidecar = Sidecar(SidecarSettings(engine=engines, **options), make)
    sidecar.start()
    try:
        yield SidecarStage(sidecar)
    finally:
        sidecar.stop()
