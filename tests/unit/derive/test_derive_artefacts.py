"""What is generated: scenario, docs tables, and the command that writes them."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from kvwatch.config import setting
from kvwatch.derive.__main__ import artefacts, main
from kvwatch.derive.docs import replace_section, table
from kvwatch.derive.foreign_scenario import opening_foreign_snapshot, play_foreign
from kvwatch.derive.metrics import full_name, metric_specs
from kvwatch.derive.scenario import ScenarioClock, opening_snapshot, play, play_end
from kvwatch.derive.settings import settings_section
from kvwatch.derive.tier_scenario import opening_tier_snapshot, play_tiers
from kvwatch.errors import SchemaError
from kvwatch.ledger.ledger import Ledger
from kvwatch.ledger.mirror import Mirror
from kvwatch.sources.source import FOREIGN_FEEDS
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.metrics import KV_INDEXED_BLOCKS
from kvwatch.telemetry.schema import REGISTRY, Event, MetricKind

ROOT = Path(__file__).resolve().parents[3]


def scenario() -> tuple[ScenarioClock, list[Event]]:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    play(log, clock)
    return clock, cursor.read(1024)


def test_the_scenario_to_its_end_holds_every_event_and_obeys_the_law() -> None:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    play(log, clock)
    play_end(log, clock)
    events = cursor.read(1024)
    mirror = Mirror(clock, 0)
    mirror.load(opening_snapshot())

    mirror.apply(events)

    elsewhere = {type(event) for event in tier_scenario()[1]}
    assert {type(event) for event in events} | elsewhere == {spec.cls for spec in REGISTRY if spec.family != "source"}
    assert mirror.num_violations == 0
    assert mirror.ledger.requests == {}
    assert mirror.ledger.pool("device").num_used == 0


def test_the_scenario_moves_every_series_family_that_events_feed() -> None:
    """LMCache#2574: a counter stuck at 0 that nobody noticed, since nothing in the tests moved it."""
    clock, events = scenario()
    mirror = Mirror(clock, 0)
    mirror.load(opening_snapshot())
    mirror.apply(events)
    view = mirror.view

    tiers = tier_mirror().view

    moved = {sample.metric.name for sample in (*view.counters, *tiers.counters) if sample.value}
    moved |= {histogram.metric.name for histogram in (*view.histograms, *tiers.histograms) if histogram.count}
    fed = {feed.metric.name for spec in REGISTRY for feed in spec.feeds}
    assert fed | {"kv_stall_seconds"} <= moved


def tier_scenario() -> tuple[ScenarioClock, list[Event]]:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    play_tiers(log, clock)
    return clock, cursor.read(1024)


def tier_mirror() -> Mirror:
    clock, events = tier_scenario()
    mirror = Mirror(clock, 0)
    mirror.load(opening_tier_snapshot())
    mirror.apply(events)
    return mirror


def test_the_scenario_of_an_engine_with_tiers_holds_every_event_of_a_transfer_and_obeys_the_law() -> None:
    mirror = tier_mirror()

    assert {spec.cls for spec in REGISTRY if spec.family == "transfer"} <= {type(e) for e in tier_scenario()[1]}
    assert mirror.num_violations == 0
    ledger = mirror.ledger
    assert (ledger.requests, ledger.transfers.to_states()) == ({}, [])
    free = {tier: (pool.num_used, pool.num_cached, pool.num_empty) for tier, pool in ledger.pools.items()}
    assert free == {"device": (0, 0, 8), "host": (0, 0, 4), "disk": (0, 0, 2)}
    assert mirror.view.value(m.KV_TIER_IGNORED_FILES, "disk", "stale") == 2
    assert mirror.view.value(m.KV_BLOCKS_IN_TRANSFER, "host") == 0
    assert mirror.view.value(m.SWAP_BLOCKS, "out") == mirror.view.value(m.SWAP_BLOCKS, "in") == 3
    assert mirror.view.value(m.TRANSFER_FAILURES, "corrupt") == 1


def test_series_of_tiers_exist_only_in_an_engine_that_has_them() -> None:
    clock, events = scenario()
    plain = Mirror(clock, 0)
    plain.load(opening_snapshot())
    plain.apply(events)

    def tiers_of(mirror: Mirror) -> set[str]:
        samples = (*mirror.view.gauges, *mirror.view.counters)
        return {dict(zip(s.metric.labels, s.labels, strict=True)).get("tier", "device") for s in samples}

    assert tiers_of(plain) == {"device"}
    assert plain.view.value(m.KV_BLOCKS_IN_TRANSFER, "device") is None
    assert tiers_of(tier_mirror()) == {"device", "host", "disk"}


def test_the_scenario_of_a_foreign_engine_holds_every_event_of_a_source() -> None:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    play_foreign(log, clock)
    events = cursor.read(1024)
    mirror = Mirror(clock, 0, foreign=FOREIGN_FEEDS)
    mirror.load(opening_foreign_snapshot())
    assert not [sample for sample in mirror.view.gauges if sample.metric is KV_INDEXED_BLOCKS]

    mirror.apply(events)
    mirror.publish()

    assert {spec.cls for spec in REGISTRY if spec.family == "source"} <= {type(event) for event in events}
    indexed = {s.labels: s.value for s in mirror.view.gauges if s.metric is KV_INDEXED_BLOCKS}
    assert indexed == {("device", "0"): 2, ("host", "0"): 1}
    moved = {sample.metric for sample in mirror.view.counters if sample.value and sample.metric in FOREIGN_FEEDS}
    moved |= {histogram.metric for histogram in mirror.view.histograms if histogram.count}
    assert moved == FOREIGN_FEEDS


def test_the_scenario_is_the_same_every_time() -> None:
    assert scenario()[1] == scenario()[1]


def test_the_last_view_of_the_scenario_is_of_a_busy_engine() -> None:
    _, events = scenario()
    ledger = Ledger()
    ledger.load(opening_snapshot())
    for event in events:
        ledger.apply(event)

    pool = ledger.pool("device")
    assert pool.num_used
    assert pool.num_cached
    assert pool.num_empty
    assert pool.num_shared
    assert ledger.num_running
    assert ledger.num_waiting


def test_counters_end_in_total_and_histograms_have_three_series_names() -> None:
    specs = {spec.name: spec for spec in metric_specs(REGISTRY)}

    assert full_name(m.PREEMPTIONS) == "kvwatch_preemptions_total"
    assert specs["kvwatch_kv_blocks"].series_names == ("kvwatch_kv_blocks",)
    assert specs["kvwatch_queue_seconds"].series_names == (
        "kvwatch_queue_seconds_bucket",
        "kvwatch_queue_seconds_sum",
        "kvwatch_queue_seconds_count",
    )
    assert specs["kvwatch_kv_block_evictions_total"].fed_by == ("block.evicted",)


def test_every_histogram_and_every_fed_counter_is_in_the_catalogue() -> None:
    fed = {id(feed.metric) for spec in REGISTRY for feed in spec.feeds}
    observed = {m.SOURCE_LAG, m.KV_PREMATURE_EVICTION_AWAY, m.KV_PREMATURE_EVICTION_EXTRA}
    """What a sidecar observes itself (`kvwatch/sources/insight`): no event says it."""

    assert fed <= {id(metric) for metric in m.CATALOGUE}
    assert not fed & {id(metric) for metric in observed}
    assert all(id(metric) in fed or metric in observed for metric in m.CATALOGUE if metric.kind is MetricKind.HISTOGRAM)


def test_a_section_is_replaced_between_its_markers_only() -> None:
    page = "top\n<!-- derived:x begin: run `make derive` -->\nold\n<!-- derived:x end -->\nbottom"

    once = replace_section(page, "x", "new")

    assert once.startswith("top\n")
    assert once.endswith("\nbottom")
    assert "new" in once
    assert "old" not in once
    assert replace_section(once, "x", "new") == once


def test_a_page_without_markers_is_an_error_that_says_which() -> None:
    with pytest.raises(SchemaError, match="markers of section metrics"):
        replace_section("nothing here", "metrics", "new")


def test_a_bar_in_a_cell_does_not_break_the_table() -> None:
    assert table(("a",), [("x | y",)]).splitlines()[2] == "| x \\| y |"


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    port: Annotated[int, setting("Port.", minimum=0, maximum=65_535)] = 8000
    ratio: Annotated[float | None, setting("Ratio.", minimum=0)] = None
    key: Annotated[str, setting("Key.", secret=True)] = "hidden"
    mode: Annotated[Literal["a", "b"], setting("Mode.")] = "a"


def test_the_table_of_settings_shows_ranges_and_choices_but_no_secrets() -> None:
    section = settings_section(Demo)

    assert "| `--port` | `KVWATCH_PORT` | int, 0 to 65535 | `8000` | Port. |" in section
    assert "| `--ratio` | `KVWATCH_RATIO` | float, at least 0 or none | `none` | Ratio. |" in section
    assert "`a` or `b`" in section
    assert "hidden" not in section


def copy_of_artefacts(folder: Path) -> Path:
    for name in artefacts():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_check_passes_on_what_derive_wrote_and_fails_with_a_diff_on_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copy_of_artefacts(tmp_path)
    assert main([], root) == 0
    assert main(["--check"], root) == 0
    page = root / "docs/metrics.md"
    page.write_text(page.read_text().replace("kvwatch_preemptions_total` | counter", "kvwatch_preempted` | counter"))
    capsys.readouterr()

    assert main(["--check"], root) == 1

    out, err = capsys.readouterr()
    assert "kvwatch_preempted" in out
    assert "run `make derive`" in err
    assert main([], root) == 0
    assert main(["--check"], root) == 0


def test_derive_does_not_write_over_a_broken_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = copy_of_artefacts(tmp_path)
    lock = root / "kvwatch/telemetry/events.lock.json"
    lock.write_text(lock.read_text().replace('"block.allocated"', '"block.taken"'))

    assert main([], root) == 2

    assert "event number 10 was block.taken and is block.allocated" in capsys.readouterr().err


def test_without_a_lock_file_a_first_one_is_written(tmp_path: Path) -> None:
    root = copy_of_artefacts(tmp_path)
    lock = root / "kvwatch/telemetry/events.lock.json"
    lock.unlink()

    assert main([], root) == 0

    assert lock.read_text() == (ROOT / "kvwatch/telemetry/events.lock.json").read_text()


def test_without_the_engine_the_page_of_its_settings_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy_of_artefacts(tmp_path)
    page = (root / "docs/configuration.md").read_text()
    for name in [name for name in sys.modules if name.startswith("kvwatch_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kvwatch_engine", None)  # makes its import fail, as without the package

    assert main(["--check"], root) == 0

    assert (root / "docs/configuration.md").read_text() == page
