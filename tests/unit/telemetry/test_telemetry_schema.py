"""Declarations: what is refused at import."""

import pytest

from kvwatch.errors import SchemaError
from kvwatch.telemetry import events, metrics
from kvwatch.telemetry.schema import (
    REGISTRY,
    Cardinality,
    Event,
    EventSpec,
    FieldSpec,
    MetricKind,
    Registry,
    amount_of,
    event,
    identity,
    label_values,
    size_of,
    value,
)


class Plain(Event):
    pass


def spec(number: int = 1, name: str = "test.one", **more: FieldSpec) -> EventSpec:
    return EventSpec(number, name, "Brief.", Plain, dict(more), dict.fromkeys(more, int), ())


def test_every_event_class_is_registered_under_a_unique_number_and_name() -> None:
    specs = list(REGISTRY)

    assert {s.cls.__name__ for s in specs} == set(events.__all__)
    assert len({s.number for s in specs}) == len({s.name for s in specs}) == len(specs)
    assert {s.family for s in specs} == {"block", "control", "request", "source", "step", "transfer"}
    assert [s.number for s in specs] == sorted(s.number for s in specs)


def test_a_number_cannot_be_used_twice() -> None:
    registry = Registry()
    registry.add(spec())

    with pytest.raises(SchemaError, match=r"event number 1 of test\.two is taken by test\.one"):
        registry.add(spec(name="test.two"))


def test_a_name_cannot_be_used_twice() -> None:
    registry = Registry()
    registry.add(spec())

    with pytest.raises(SchemaError, match=r"test\.one is declared twice"):
        registry.add(spec(number=2))


def test_field_numbers_are_unique() -> None:
    with pytest.raises(SchemaError, match=r"field numbers \[1, 1\] are not unique"):
        Registry().add(spec(a=value(1, "A.", "1"), b=value(1, "B.", "1")))


def test_an_id_can_never_become_a_label() -> None:
    declared = EventSpec(
        1, "test.one", "Brief.", Plain, {"reason": identity(1, "An id.")}, {}, (metrics.REQUESTS_REJECTED.count(),)
    )

    with pytest.raises(SchemaError, match="whose label reason is no label field"):
        Registry().add(declared)


@pytest.mark.parametrize("amount", [size_of("nothing"), amount_of("nothing")])
def test_a_metric_cannot_be_fed_from_a_field_that_is_not_there(amount: object) -> None:
    feed = metrics.GENERATED_TOKENS.count(amount)  # type: ignore[arg-type]
    declared = EventSpec(1, "test.one", "Brief.", Plain, {}, {}, (feed,))

    with pytest.raises(SchemaError, match="from nothing, which it does not have"):
        Registry().add(declared)


def test_a_field_without_its_declaration_is_refused() -> None:
    class Bare(Event):
        count: int

    with pytest.raises(SchemaError, match="count lacks its declaration"):
        event(9_999, "test.bare", "Brief.")(Bare)


def test_values_of_a_label_are_known_when_its_type_lists_them() -> None:
    declared = REGISTRY.of(events.BlocksEvicted)

    assert label_values(declared, "reason") == ("pressure", "reset", "resize", "removed", "unreadable")
    assert label_values(declared, "request") == ()
    assert declared.fields["request"].cardinality is Cardinality.ID


def test_every_metric_says_what_it_means_and_when_it_moves() -> None:
    for metric in metrics.CATALOGUE:
        assert metric.brief.endswith("."), metric.name
        assert metric.moves.endswith("."), metric.name
        assert metric.action.endswith((".", "?")), metric.name
        assert metric.aggregate, metric.name
        assert metric.unit, metric.name
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_names_follow_the_conventions_of_prometheus() -> None:
    names = [metric.name for metric in metrics.CATALOGUE]

    assert len(set(names)) == len(names)
    for metric in metrics.CATALOGUE:
        assert metric.name.replace("_", "").isalnum(), metric.name
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket")), metric.name
        if metric.unit in {"seconds", "ratio"}:
            assert metric.name.removesuffix("_min").removesuffix("_max").endswith(f"_{metric.unit}"), metric.name


def test_labels_that_belong_to_prometheus_or_to_every_series_are_never_declared() -> None:
    forbidden = {"job", "instance", "pod", "host", "engine", "dp_rank", "model_name", "le", "quantile", "request"}

    assert all(forbidden.isdisjoint(metric.labels) for metric in metrics.CATALOGUE)
