"""Events to bytes and back, also in the words of an older or a newer version."""

import struct
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.errors import RecordingError
from kvwatch.recorder.schema import (
    MAX_EVENTS,
    EventDecoder,
    EventEncoder,
    RecordedEvent,
    RecordedField,
    UnknownEvent,
    current_schema,
    fingerprint,
)
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.schema import REGISTRY, Event, EventSpec

SPECS = list(REGISTRY)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=4)
    if origin in {Union, UnionType}:
        (member,) = (argument for argument in arguments if argument is not NoneType)
        return st.none() | values_of(member)
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63 - 1), str: st.text(max_size=12), bytes: st.binary(max_size=40),
        float: st.floats(allow_nan=False), bool: st.booleans(),
    }  # fmt: skip
    return scalars[hint]


def events_of(spec: EventSpec) -> st.SearchStrategy[Event]:
    return st.builds(spec.cls, **{name: values_of(hint) for name, hint in spec.types.items()})


ANY_EVENTS = st.lists(st.sampled_from(SPECS).flatmap(events_of), max_size=8)


def changed(number: int, fields: list[RecordedField], name: str = "") -> list[RecordedEvent]:
    """Return today's schema with one event declared in another way."""
    return [
        RecordedEvent(event.number, name or event.name, fields) if event.number == number else event
        for event in current_schema()
    ]


def recorded(number: int) -> RecordedEvent:
    return next(event for event in current_schema() if event.number == number)


def pack(rows: list[Any]) -> bytes:
    body = msgspec.msgpack.encode(rows)
    return struct.pack("<I", len(body)) + body


@settings(max_examples=100, deadline=None)
@given(first=ANY_EVENTS, second=ANY_EVENTS)
def test_events_of_every_class_come_back_as_they_were(first: list[Event], second: list[Event]) -> None:
    encoder = EventEncoder(keep_token_ids=True)

    body = encoder.encode(first) + encoder.encode(second)

    assert EventDecoder(current_schema()).decode(body) == first + second


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_each_class_comes_back(spec: EventSpec, data: st.DataObject) -> None:
    event = data.draw(events_of(spec))

    assert EventDecoder(current_schema()).decode(EventEncoder(keep_token_ids=True).encode([event])) == [event]


def test_token_ids_are_left_out_unless_asked_for() -> None:
    event = ev.BlocksStored([b"h"], [1], None, request="r", token_ids=[[901, 902, 903]])

    without, with_ids = (EventEncoder(keep_token_ids=keep).encode([event]) for keep in (False, True))

    decoder = EventDecoder(current_schema())
    assert decoder.decode(without) == [msgspec.structs.replace(event, token_ids=None)]
    assert decoder.decode(with_ids) == [event]
    assert msgspec.msgpack.encode(902) not in without
    assert event.token_ids == [[901, 902, 903]]


def test_half_a_surrogate_pair_is_written_out_instead_of_ending_the_recording() -> None:
    event = ev.RequestRejected("bad \ud800 id", "invalid")

    (found,) = EventDecoder(current_schema()).decode(EventEncoder().encode([event]))

    assert found == ev.RequestRejected("bad \\ud800 id", "invalid")


def test_a_field_that_was_renamed_or_moved_is_found_by_its_number() -> None:
    event = ev.RequestRejected("r1", "invalid", seq=5, step=2, time_ns=9)
    fields = [msgspec.structs.replace(field, name=f"old_{field.name}") for field in reversed(recorded(41).fields)]
    values = list(reversed(msgspec.structs.astuple(event)))

    assert EventDecoder(changed(41, fields, "old.name")).decode(pack([[41, values]])) == [event]


def test_a_field_of_a_newer_version_is_passed_over_and_a_new_reason_is_kept() -> None:
    fields = [*recorded(41).fields, RecordedField(77, "news", "map<string, list<int64>>")]
    told = ev.RequestRejected("r1", "a reason of tomorrow", seq=5, step=2, time_ns=9)  # type: ignore[arg-type]
    values = [*msgspec.structs.astuple(told), {"a": [1]}]

    (found,) = EventDecoder(changed(41, fields)).decode(pack([[41, values]]))

    assert found == told


def test_a_field_that_is_younger_than_the_recording_has_its_default_or_says_nothing() -> None:
    fields = [field for field in recorded(47).fields if field.number in {1, 2, 101, 102, 103}]

    (found,) = EventDecoder(changed(47, fields)).decode(pack([[47, ["r1", "stop", 5, 2, 9]]]))

    assert isinstance(found, ev.RequestFinished)
    assert (found.request, found.reason, found.seq, found.error) == ("r1", "stop", 5, "")
    assert (found.prompt_tokens, found.peak_blocks, found.end_to_end_ns) == (0, None, None)


def test_an_event_of_a_newer_version_keeps_its_place_in_the_log() -> None:
    base = [field for field in recorded(41).fields if field.number > 100]
    schema = [*current_schema(), RecordedEvent(999, "news.arrived", [RecordedField(1, "what", "string"), *base])]

    (found,) = EventDecoder(schema).decode(pack([[999, ["anything", 5, 2, 9]]]))

    assert found == UnknownEvent(number=999, name="news.arrived", seq=5, step=2, time_ns=9)


def test_a_field_of_another_type_is_refused() -> None:
    fields = [msgspec.structs.replace(recorded(41).fields[0], type="int64"), *recorded(41).fields[1:]]

    with pytest.raises(RecordingError, match=r"request of event .* is int64 in the recording and string"):
        EventDecoder(changed(41, fields))


@pytest.mark.parametrize(
    "schema",
    [
        [*current_schema(), recorded(41)],
        changed(41, recorded(41).fields[:-1]),
        changed(41, [*recorded(41).fields, recorded(41).fields[0]]),
        [RecordedEvent(999, "x", [])],
    ],
    ids=["event twice", "no time", "field twice", "unknown without place"],
)
def test_a_schema_that_makes_no_sense_is_refused(schema: list[RecordedEvent]) -> None:
    with pytest.raises(RecordingError, match="damaged"):
        EventDecoder(schema)


@pytest.mark.parametrize(
    "body",
    [
        b"\x01",
        struct.pack("<I", 100) + b"short",
        pack([[41, ["r1"]]]),
        pack([[41, "no list"]]),
        pack([[12345, []]]),
        pack([[41, [1, 2, 3, 4, 5]]]),
        pack([[41, ["r", "invalid", 0, 0, 0]]] * (MAX_EVENTS + 1)),
        struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
    ],
)
def test_bytes_that_no_encoder_wrote_are_a_named_error(body: bytes) -> None:
    with pytest.raises(RecordingError):
        EventDecoder(current_schema()).decode(body)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_named_error_or_events(noise: bytes) -> None:
    try:
        found = EventDecoder(current_schema()).decode(struct.pack("<I", len(noise)) + noise)
    except RecordingError:
        return
    assert all(isinstance(event, Event) for event in found)


def test_equal_schemas_have_equal_fingerprints_and_others_do_not() -> None:
    assert fingerprint(current_schema()) == fingerprint(current_schema())
    assert fingerprint(current_schema()) != fingerprint(current_schema()[1:])
