"""Many engines on one thread: what fails for one does not touch the others, and everything ends in time."""

import asyncio
import time
from collections.abc import Iterable

import httpx
import pytest
from foreign_stage import ForeignEngine, block

from kvwatch.errors import ExporterError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.ledger.mirror import Mirror
from kvwatch.ledger.view import Sample
from kvwatch.observatory.fleet import Fleet
from kvwatch.observatory.watch import Watch, WatchOptions
from kvwatch.sources.source import FOREIGN_FEEDS
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog


class BadPart:
    """A part that fails where it is told to."""

    name = "bad"

    def __init__(self, where: str) -> None:
        self._where = where

    def open(self) -> None:
        self._fail("open", ExporterError("its port is taken"))

    def samples(self) -> Iterable[Sample]:
        self._fail("samples", RuntimeError("no samples"))
        return ()

    async def run(self, stop: asyncio.Event) -> None:
        self._fail("run", RuntimeError("it broke"))
        if self._where == "stuck":
            await asyncio.sleep(60)
        await stop.wait()

    def close(self) -> None:
        self._fail("close", RuntimeError("it does not close"))

    def _fail(self, where: str, error: Exception) -> None:
        if where == self._where:
            raise error


class CountingPart(BadPart):
    """A part that follows the log into a ledger of its own, and never fails."""

    name = "counting"
    period_seconds = 0.02

    def __init__(self, log: EventLog) -> None:
        super().__init__("nowhere")
        self.follower = Mirror(log.clock, 0, foreign=FOREIGN_FEEDS)


def watch_of(engine: ForeignEngine, *parts: BadPart) -> Watch:
    options = WatchOptions(parts=parts, feeds=FOREIGN_FEEDS, view_interval_seconds=0)
    return Watch(engine.log, engine, lambda: EngineIdentity(engine.name), options)


def test_a_part_that_follows_the_log_is_brought_what_happens_and_another_is_not() -> None:
    engine = ForeignEngine("a")
    engine.store(block(1))
    part = CountingPart(engine.log)
    watch = watch_of(engine, BadPart("nowhere"), part)

    watch.attach()
    for collector in watch.collectors:
        assert collector.heal()
    engine.store(block(2))
    watch.finish()

    assert [collector.name for collector in watch.collectors] == ["ledger", "counting"]
    assert part.follower.view.seq == engine.log.head - 1


def adding(fleet_of: list[Fleet], *watches: Watch) -> list:  # type: ignore[type-arg]
    async def run(stop: asyncio.Event) -> None:
        for watch in watches:
            fleet_of[0].add(watch)
        await stop.wait()

    return [run]


def indexed(fleet: Fleet, engine: str) -> float | None:
    for family in fleet.families():
        if family.name == f"kvwatch_{m.KV_INDEXED_BLOCKS.name}":
            for labels, value in family.series:
                if labels[0] == engine and isinstance(value, int | float):
                    return value
    return None


@pytest.mark.parametrize("where", ["open", "samples", "run", "close", "stuck"])
def test_what_fails_for_one_engine_leaves_the_others_alone(where: str) -> None:
    bad, good = ForeignEngine("bad"), ForeignEngine("good")
    good.store(block(1), block(2))
    fleets: list[Fleet] = []
    fleet = Fleet(
        metrics_listen="127.0.0.1:0", runners=adding(fleets, watch_of(bad, BadPart(where)), watch_of(good)),
        render_interval_seconds=0,
    )  # fmt: skip
    fleets.append(fleet)
    fleet.start()
    try:
        deadline = time.monotonic() + 60
        while indexed(fleet, "good") != 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        address = fleet.metrics_address
        assert address is not None
        for path in ("metrics", "health", "ready"):
            assert httpx.get(f"http://{address[0]}:{address[1]}/{path}").status_code == 200
    finally:
        began = time.monotonic()
        fleet.stop()
    assert time.monotonic() - began < 20
    assert fleet.metrics_address is None
    assert not good.log.active


def test_a_runner_that_fails_does_not_end_the_fleet() -> None:
    async def broken(_: asyncio.Event) -> None:
        raise RuntimeError("a source broke")

    engine = ForeignEngine("a")
    engine.store(block(1))
    fleets: list[Fleet] = []
    fleet = Fleet(runners=[broken, *adding(fleets, watch_of(engine))])
    fleets.append(fleet)
    fleet.start()
    try:
        deadline = time.monotonic() + 60
        while indexed(fleet, "a") != 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        fleet.stop()
    fleet.stop()  # a second time is harmless


def test_a_shared_part_that_cannot_open_is_an_error_of_the_start() -> None:
    fleet = Fleet(metrics_listen="127.0.0.1:0", parts=[BadPart("open")])
    with pytest.raises(ExporterError, match="its port is taken"):
        fleet.start()
    assert fleet.metrics_address is None
