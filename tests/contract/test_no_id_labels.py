"""No request, block or hash ever becomes a label: that would be one series for each."""

from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.derive.scenario import ScenarioClock, opening_snapshot, play
from kvwatch.exporters.prometheus.sample_page import sample_page
from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import REGISTRY, Cardinality, EventSpec, label_values

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "exposition.txt"


@pytest.mark.parametrize("spec", list(REGISTRY), ids=lambda spec: spec.name)
def test_labels_of_fed_metrics_are_label_fields_and_known_in_advance_but_for_those_with_allow_lists(
    spec: EventSpec,
) -> None:
    for feed in spec.feeds:
        for name in set(feed.metric.labels) - {name for name, _ in feed.constants}:
            assert spec.fields[name].cardinality is Cardinality.LABEL
            assert label_values(spec, name) or name in {"lora", "tenant"}


def test_no_id_of_the_scenario_is_on_the_page() -> None:
    clock = ScenarioClock()
    log = EventLog(1024, clock)
    cursor = log.subscribe("test")
    play(log, clock)
    ids: set[str] = set()
    for event in cursor.read(1024):
        spec = REGISTRY.of(type(event))
        for name, field in spec.fields.items():
            if field.cardinality is Cardinality.ID and name in {"request", "hashes", "beneficiary", "error"}:
                found = getattr(event, name)
                ids |= {each.hex() for each in found} if isinstance(found, list) else {found}
    ids.discard("")

    values = {
        value
        for family in text_string_to_metric_families(sample_page("text").decode())
        for sample in family.samples
        for value in sample.labels.values()
    }
    assert len(ids) > 8
    assert ids.isdisjoint(values)


def test_the_number_of_series_does_not_grow_with_the_number_of_requests() -> None:
    clock = ScenarioClock()
    log = EventLog(8192, clock)
    cursor = log.subscribe("test")
    mirror = Mirror(clock, 0)
    sizes = []
    for _ in range(3):
        mirror.load(opening_snapshot())
        play(log, clock)
        mirror.apply(cursor.read(8192))
        view = mirror.view
        sizes.append(len(view.counters) + len(view.histograms) + len(view.gauges))

    assert all(before == after for before, after in pairwise(sizes))
