"""The lock: what is a broken promise and what is not."""

import msgspec
import pytest

from kvwatch.derive.lock import (
    Lock,
    LockedEvent,
    LockedField,
    LockedMetric,
    broken_promises,
    decode_lock,
    encode_lock,
    make_lock,
    wire_type,
)
from kvwatch.errors import SchemaError
from kvwatch.telemetry import metrics
from kvwatch.telemetry.schema import REGISTRY

COUNT = LockedField("count", "int64", "blocks", "value")
REASON = LockedField("reason", "string", "", "label")


def lock_of(fields: dict[str, LockedField], number: str = "1", name: str = "test.one") -> Lock:
    return Lock({number: LockedEvent(name, fields)}, {"hits": LockedMetric("counter", "tokens", ["tier"])})


BEFORE = lock_of({"1": COUNT, "2": REASON})


def changed(field: LockedField, **changes: str | bool) -> LockedField:
    return msgspec.structs.replace(field, **changes)


@pytest.mark.parametrize(
    ("after", "promise"),
    [
        (lock_of({"1": changed(COUNT, type="double"), "2": REASON}), "field 1 of event test.one: type was 'int64'"),
        (lock_of({"1": changed(COUNT, unit="bytes"), "2": REASON}), "field 1 of event test.one: unit was 'blocks'"),
        (lock_of({"1": changed(COUNT, name="n"), "2": REASON}), "field 1 of event test.one: name was 'count'"),
        (lock_of({"1": changed(COUNT, cardinality="label")}), "field 1 of event test.one: cardinality was 'value'"),
        (lock_of({"1": REASON, "2": COUNT}), "field reason of event test.one had number 2"),
        (lock_of({"1": COUNT, "3": REASON}), "field reason of event test.one had number 2"),
        (lock_of({"1": COUNT}, name="test.two"), "event number 1 was test.one and is test.two"),
        (lock_of({"1": COUNT}, number="2"), "event test.one had number 1 and has 2"),
    ],
)
def test_renumbering_retyping_and_other_units_break_the_lock(after: Lock, promise: str) -> None:
    assert any(promise in sentence for sentence in broken_promises(BEFORE, after))


def test_new_fields_events_and_metrics_are_allowed() -> None:
    after = Lock(
        {**lock_of({"1": COUNT, "2": REASON, "3": changed(COUNT, name="more")}).events, "2": LockedEvent("x.y", {})},
        {**BEFORE.metrics, "misses": LockedMetric("counter", "tokens", [])},
    )

    assert broken_promises(BEFORE, after) == []


@pytest.mark.parametrize("changes", [{"kind": "gauge"}, {"unit": "1"}, {"labels": ["group"]}])
def test_a_metric_keeps_its_kind_unit_and_labels(changes: dict[str, object]) -> None:
    metric = msgspec.structs.replace(BEFORE.metrics["hits"], **changes)

    assert len(broken_promises(BEFORE, Lock(BEFORE.events, {"hits": metric}))) == 1


def test_what_was_removed_is_kept_as_retired_and_cannot_come_back_as_something_else() -> None:
    old = make_lock(REGISTRY, metrics.CATALOGUE, None)
    specs = [spec for spec in REGISTRY if spec.number != 80]
    catalogue = [metric for metric in metrics.CATALOGUE if metric is not metrics.PREEMPTIONS]

    shrunk = make_lock(specs, catalogue, old)

    assert shrunk.events["80"].retired
    assert shrunk.metrics["preemptions"].retired
    assert broken_promises(old, shrunk) == []
    assert [sentence.split(":")[0] for sentence in broken_promises(shrunk, old)] == [
        "event control.drain_started was retired",
        "metric preemptions was retired",
    ]


def test_a_removed_field_is_kept_as_retired_and_its_number_is_not_used_again() -> None:
    old = make_lock(REGISTRY, metrics.CATALOGUE, None)
    fields = {**old.events["80"].fields, "9": LockedField("gone", "string", "", "id")}
    with_more = msgspec.structs.replace(
        old, events={**old.events, "80": msgspec.structs.replace(old.events["80"], fields=fields)}
    )

    now = make_lock(REGISTRY, metrics.CATALOGUE, with_more)

    assert now.events["80"].fields["9"].retired
    assert broken_promises(now, with_more) == ["field 9 of event control.drain_started was retired: take a new number"]


def test_the_lock_file_survives_writing_and_reading() -> None:
    lock = make_lock(REGISTRY, metrics.CATALOGUE, None)

    assert decode_lock(encode_lock(lock)) == lock


def test_a_broken_lock_file_is_an_error_with_a_remedy() -> None:
    with pytest.raises(SchemaError, match="restore it from version control"):
        decode_lock("{")


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (str, "string"),
        (list[int], "list<int64>"),
        (list[bytes], "list<bytes>"),
        (bytes | None, "optional<bytes>"),
        (dict[str, int], "map<string, int64>"),
    ],
)
def test_types_have_names_that_do_not_depend_on_python(hint: object, name: str) -> None:
    assert wire_type(hint) == name


def test_a_type_that_no_other_language_has_is_refused() -> None:
    with pytest.raises(SchemaError, match="cannot be put on the wire"):
        wire_type(complex)


def test_a_retired_metric_that_is_still_gone_breaks_nothing() -> None:
    old = make_lock(REGISTRY, metrics.CATALOGUE, None)
    without = Lock(old.events, {name: metric for name, metric in old.metrics.items() if name != "preemptions"})

    assert broken_promises(old, without) == []
    assert broken_promises(without, old) == []
