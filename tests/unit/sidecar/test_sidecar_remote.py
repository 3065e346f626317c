"""A sidecar beside a naive kvwatch engine, real sockets: what it shows must be what the engine itself shows."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from math import isclose
from pathlib import Path

import httpx
import pytest
from sidecar_stage import OF_A_SIDECAR, Series, SidecarStage, of_engine, parse_page, sidecar_stage, wait_until
from stream_stage import StreamStage, stream_stage

from kvwatch.sockets import bind
from kvwatch.sources.remote import RemoteSource
from kvwatch.stream.access import StreamOptions
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.schema import Event

RANK = ("dp_rank", "0")
OWN = ("kvwatch_telemetry_", "kvwatch_source_", "kvwatch_build_info", "kvwatch_ledger_update", *OF_A_SIDECAR)
"""What tells of an observatory itself, not of an engine."""


def own_page(stage: StreamStage) -> Series:
    """Return what the engine's own observatory shows, as a page."""
    return parse_page(stage.observatory._page.render(fresh=True).body.decode())


def engines_series(page: Series, engine: str) -> Series:
    return {key: value for key, value in of_engine(page, engine).items() if not key[0].startswith(OWN)}


def is_quiet(stage: StreamStage) -> bool:
    return stage.observatory.view.seq == stage.log.head - 1


def settled(stage: StreamStage, sidecar: SidecarStage, name: str) -> tuple[Series, Series]:
    """Wait until engine and sidecar have seen everything; return what each shows of it."""
    deadline = time.monotonic() + 60
    source = next(each for each in sidecar.sidecar.sources if each.name == name)
    watch = next(watch for watch in sidecar.sidecar.fleet.watches if watch.identity().engine == name)
    assert isinstance(source, RemoteSource)
    while not (is_quiet(stage) and source.next_seq == stage.log.head and watch.mirror.view.seq == watch.log.head - 1):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return engines_series(own_page(stage), "test"), engines_series(sidecar.page(), name)


def is_up(name: str) -> Callable[[Series], bool]:
    return lambda page: of_engine(page, name).get(("kvwatch_source_up", (("dp_rank", "0"),))) == 1


def moved(before: Series, after: Series) -> Series:
    """Return by how much each counter, and each part of a histogram, has moved."""
    suffixes = ("_total", "_bucket", "_sum", "_count")
    return {key: value - before.get(key, 0) for key, value in after.items() if key[0].endswith(suffixes)}


def counters(page: Series) -> Series:
    return moved({}, page)


def gauges(page: Series) -> Series:
    suffixes = ("_total", "_bucket", "_sum", "_count")
    return {key: value for key, value in page.items() if not key[0].endswith(suffixes)}


def test_a_sidecar_that_joins_late_moves_every_series_as_the_engine_does() -> None:
    with stream_stage() as stage:
        stage.step(60)
        with sidecar_stage(f"near=grpc://{stage.address}") as sidecar:
            wait_until(sidecar.page, is_up("near"))
            theirs_before, mine_before = settled(stage, sidecar, "near")
            stage.step(200)
            theirs, mine = settled(stage, sidecar, "near")

            assert_moved_alike((theirs_before, mine_before), (theirs, mine))
            assert_same_gauges(theirs, mine)


def assert_moved_alike(before: tuple[Series, Series], after: tuple[Series, Series]) -> None:
    """Compare what the engine's own observatory and the sidecar say by how much everything moved."""
    theirs, mine = (moved(before[side], after[side]) for side in (0, 1))
    assert mine.keys() == theirs.keys()
    assert {key: (mine[key], theirs[key]) for key in mine if not isclose(mine[key], theirs[key], abs_tol=1e-9)} == {}
    assert sum(mine.values()) > 100


def assert_same_gauges(theirs: Series, mine: Series) -> None:
    ours, engines = gauges(mine), gauges(theirs)
    assert ours.keys() == engines.keys()
    tolerance = {key: 0.05 if "timestamp" in key[0] else 0 for key in ours}
    assert {key: (ours[key], engines[key]) for key in ours if abs(ours[key] - engines[key]) > tolerance[key]} == {}


def test_an_engine_that_starts_anew_is_followed_and_counters_never_fall() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(stream_stage())
        address = first.address
        sidecar = stack.enter_context(sidecar_stage(f"near=grpc://{address}"))
        wait_until(sidecar.page, is_up("near"))
        first.step(50)
        _, before = settled(first, sidecar, "near")
        first.observatory.stop()
        page = wait_until(sidecar.page, lambda page: not is_up("near")(page))
        assert counters(engines_series(page, "near")) == counters(before)
        assert gauges(engines_series(page, "near")) == {}  # nobody knows what the engine holds now

        second = stack.enter_context(stream_stage(options=StreamOptions(listen=address), num_blocks=17))
        page = wait_until(sidecar.page, is_up("near"), 40)
        assert of_engine(page, "near")["kvwatch_source_resets_total", (RANK,)] == 1
        theirs_before, mine_before = settled(second, sidecar, "near")
        second.step(100)
        theirs, mine = settled(second, sidecar, "near")
        assert_moved_alike((theirs_before, mine_before), (theirs, mine))
        assert_same_gauges(theirs, mine)
        assert all(mine[key] >= value for key, value in counters(before).items())


def test_what_the_engine_forgot_while_nobody_read_is_a_gap_and_gauges_are_true_again() -> None:
    with stream_stage(capacity=64) as stage, sidecar_stage(f"near=grpc://{stage.address}") as sidecar:
        wait_until(sidecar.page, is_up("near"))
        for _ in range(20):
            stage.step(40)  # several times the engine's log between two looks at it
        theirs, mine = settled(stage, sidecar, "near")
        page = of_engine(sidecar.page(), "near")
        assert page["kvwatch_source_gaps_total", (RANK,)] > 0
        assert_same_gauges(theirs, mine)
        watch = sidecar.sidecar.fleet.watches[0]
        assert watch.mirror.ledger.differences(watch.control.snapshot()) == []
        state, truth = watch.control.snapshot(), stage.engine.snapshot()
        assert state.tiers == truth.tiers
        assert sorted(map(str, state.sequences)) == sorted(map(str, truth.sequences))


def test_a_sidecar_is_ready_whatever_its_engines_do_and_finds_those_that_come_late() -> None:
    with bind("127.0.0.1:0", "test") as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ExitStack() as stack:
        alive = stack.enter_context(stream_stage())
        sidecar = stack.enter_context(sidecar_stage(f"dead=grpc://{address}", f"alive=grpc://{alive.address}"))
        assert httpx.get(f"{sidecar.url}/ready").status_code == 200
        assert httpx.get(f"{sidecar.url}/health").status_code == 200
        page = wait_until(sidecar.page, is_up("alive"))
        assert of_engine(page, "dead")["kvwatch_source_up", (RANK,)] == 0
        assert not [name for name, _ in of_engine(page, "dead") if not name.startswith("kvwatch_source_")]

        late = stack.enter_context(stream_stage(options=StreamOptions(listen=address)))
        late.step(20)
        alive.step(5)
        wait_until(sidecar.page, is_up("dead"), 40)
        for stage, name in ((late, "dead"), (alive, "alive")):
            assert_same_gauges(*settled(stage, sidecar, name))


def test_a_token_that_is_refused_is_tried_again_as_its_file_says_then(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.write_text("right\n")
    mine.write_text("# ours\nwrong\n")
    with (
        stream_stage(options=StreamOptions(listen="127.0.0.1:0", token_file=str(theirs))) as stage,
        sidecar_stage(f"near=grpc://{stage.address}?token_file={mine}") as sidecar,
    ):
        page = sidecar.page()
        assert of_engine(page, "near")["kvwatch_source_up", (RANK,)] == 0
        mine.write_text("right\n")
        wait_until(sidecar.page, is_up("near"), 60)


def test_stopping_does_not_wait_for_engines_that_are_not_there() -> None:
    with sidecar_stage("a=grpc://127.0.0.1:1", "b=grpc://192.0.2.1:9") as sidecar:
        sidecar.page()
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert not [thread for thread in threading.enumerate() if thread.name == "kvwatch-observatory"]


def test_evictions_that_came_too_early_and_shapes_of_prefixes_are_told_of_our_engines_too() -> None:
    with stream_stage() as stage, sidecar_stage(f"near=grpc://{stage.address}") as sidecar:
        wait_until(sidecar.page, is_up("near"))

        def tell(*events: Event) -> Series:
            with stage.engine.lock:
                for event in events:
                    stage.log.append(event)
            settled(stage, sidecar, "near")
            return of_engine(sidecar.page(), "near")

        place = (RANK, ("group", "0"), ("tier", "device"))
        page = tell(stored(1, 2, 3), stored(4, parent=1), stored(5, parent=1))
        assert page["kvwatch_kv_prefix_depth_max", place] == 3
        assert page["kvwatch_kv_prefix_fan_out_max", place] == 3
        assert page["kvwatch_kv_prefix_roots", place] == 1
        page = tell(ev.BlocksEvicted([key(3)], [3], [1], [1], [0], "pressure", ""))
        assert page["kvwatch_kv_premature_eviction_away_seconds_count", (RANK, ("tier", "device"))] == 0
        page = tell(stored(3, parent=2))
        assert page["kvwatch_kv_premature_eviction_away_seconds_count", (RANK, ("tier", "device"))] == 1
        assert page["kvwatch_source_lag_seconds_count", (RANK,)] >= 3


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(*numbers: int, parent: int | None = None) -> ev.BlocksStored:
    return ev.BlocksStored([key(number) for number in numbers], list(numbers), None if parent is None else key(parent))


@pytest.mark.slow
def test_extremes_of_the_last_minute_are_the_engines_once_a_minute_was_seen() -> None:
    with stream_stage() as stage, sidecar_stage(f"near=grpc://{stage.address}") as sidecar:
        wait_until(sidecar.page, is_up("near"))
        end = time.monotonic() + 63
        while time.monotonic() < end:
            stage.step(3)
            time.sleep(0.5)
        theirs, mine = settled(stage, sidecar, "near")
        assert_same_gauges(theirs, mine)
        assert [name for name, _ in mine if name == "kvwatch_kv_free_blocks_min"]
