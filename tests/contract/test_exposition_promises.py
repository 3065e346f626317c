"""What every page promises to those who query it, whatever an engine does."""

from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import ManualClock, NaiveEngine
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.prometheus.families import ViewCollector
from kvwatch.exporters.prometheus.page import MetricsPage
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry.log import EventLog

Labels = tuple[tuple[str, str], ...]
ACTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), max_size=10)


class Scraped:
    """Pages of an engine under random load, parsed as Prometheus would."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = EventLog(8192, self.clock)
        self.engine = NaiveEngine(self.log)
        self.cursor = self.log.subscribe("test")
        self.mirror = Mirror(self.clock, 0)
        self.mirror.load(self.engine.snapshot())
        collector = ViewCollector(lambda: self.mirror.view, [], EngineIdentity("test"))
        self.page = MetricsPage(collector, self.clock, 0)

    def step(self, acts: list[tuple[int, int]]) -> dict[tuple[str, Labels], float]:
        self.clock.advance(0.01)
        self.engine.step(acts)
        self.mirror.apply(self.cursor.read(8192))
        families = text_string_to_metric_families(self.page.render().body.decode())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def total(page: dict[tuple[str, Labels], float], name: str, **labels: str) -> float:
    """Sum over all series of a name that have these labels, as a query would."""
    return sum(
        value for (series, found), value in page.items() if series == name and labels.items() <= dict(found).items()
    )


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(ACTS, min_size=1, max_size=8))
def test_on_every_page_the_law_holds_and_ratios_lie_between_0_and_1(steps: list[list[tuple[int, int]]]) -> None:
    """sglang#22726: 2 % usage was shown while 72 % of the pool was held."""
    scraped = Scraped()
    for acts in steps:
        page = scraped.step(acts)

        used = total(page, "kvwatch_kv_blocks", state="used")
        cached = total(page, "kvwatch_kv_blocks", state="cached")
        empty = total(page, "kvwatch_kv_blocks", state="empty")
        assert total(page, "kvwatch_kv_block_capacity") == used + cached + empty
        assert total(page, "kvwatch_kv_free_blocks") == cached + empty
        assert total(page, "kvwatch_kv_filled_slots") <= total(page, "kvwatch_kv_held_slots")
        assert total(page, "kvwatch_kv_orphaned_blocks") == 0
        assert all(0 <= value <= 1 for (name, _), value in page.items() if name.endswith("_ratio"))
        assert all(value >= 0 for value in page.values())


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(ACTS, min_size=2, max_size=8))
def test_counters_never_fall_and_series_never_vanish(steps: list[list[tuple[int, int]]]) -> None:
    """vllm#6642: a counter with a negative increment killed the engine's loop."""
    scraped = Scraped()
    before: dict[tuple[str, Labels], float] = {}
    for acts in steps:
        page = scraped.step(acts)

        for series, value in before.items():
            if series[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert page[series] >= value
        before = page


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(ACTS, min_size=1, max_size=8))
def test_what_was_taken_and_not_given_back_is_what_is_held(steps: list[list[tuple[int, int]]]) -> None:
    """Allocations, hits and forks on one side, releases on the other: the difference is the table entries."""
    scraped = Scraped()
    page: dict[tuple[str, Labels], float] = {}
    for acts in steps:
        page = scraped.step(acts)

    pool = scraped.mirror.ledger.pool("device")
    released = total(page, "kvwatch_kv_block_releases_total")
    allocated = total(page, "kvwatch_kv_block_allocations_total")
    assert allocated - released <= pool.num_entries
    assert page_used(page) == pool.num_entries - total(page, "kvwatch_kv_sharing_saved_blocks")


def page_used(page: dict[tuple[str, Labels], float]) -> float:
    return total(page, "kvwatch_kv_blocks", state="used")
