"""Events and snapshots as protobuf bytes and back: nothing is lost, nothing changes."""

import typing
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvwatch.derive.proto import own_fields
from kvwatch.stream.codec import EventCodec, StreamError, StructCodec, join_parts, parse, snapshot_parts
from kvwatch.stream.contract import Gap, SnapshotPart, Started, SubscribeRequest, Update
from kvwatch.stream.descriptors import message_class
from kvwatch.telemetry.events import BlocksStored, RequestQueued, StepFailed
from kvwatch.telemetry.schema import REGISTRY, Event, EventSpec
from kvwatch.telemetry.snapshot import EngineSnapshot, TierState

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
SCALARS: dict[object, SearchStrategy[Any]] = {
    str: TEXT,
    bytes: st.binary(max_size=40),
    int: INTEGERS,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
}


def values(hint: Any) -> SearchStrategy[Any]:
    """Any value of a declared type."""
    if hint in SCALARS:
        return SCALARS[hint]
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return st.sampled_from(arguments)
    if hint == list[bytes | None]:  # what is known has a hash that is not empty
        return st.lists(st.none() | st.binary(min_size=1, max_size=32), max_size=12)
    if get_origin(hint) is list:
        return st.lists(values(arguments[0]), max_size=12)
    if get_origin(hint) is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=5)
    if get_origin(hint) in {Union, UnionType}:
        (member,) = (argument for argument in arguments if argument is not NoneType)
        return st.none() | values(member)
    return structs(hint)


def structs(cls: type[msgspec.Struct]) -> SearchStrategy[Any]:
    return st.builds(cls, **{name: values(hint) for name, (hint, _, _) in own_fields(cls).items()})


def events_of(spec: EventSpec) -> SearchStrategy[Event]:
    """Any event of a class, as if a log had stamped it."""
    common = {name: values(typing.get_type_hints(Event)[name]) for name in Event.__struct_fields__}
    own = {name: values(hint) for name, (hint, _, _) in own_fields(spec.cls).items()}
    return st.builds(spec.cls, **own, **common)


EVENTS = st.one_of([events_of(spec) for spec in REGISTRY])
CODEC = EventCodec(with_token_ids=True)
UPDATE = message_class("Update")


def decoded(content: bytes) -> list[Event | None]:
    return [CODEC.decode(envelope) for envelope in parse(UPDATE, content).events]


@pytest.mark.parametrize("spec", list(REGISTRY), ids=lambda spec: spec.name)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_event_survives_with_all_its_fields(spec: EventSpec, data: st.DataObject) -> None:
    event = data.draw(events_of(spec))

    (back,) = decoded(CODEC.encode(event))

    assert type(back) is spec.cls
    assert back == event
    # `==` takes True for 1 and a float for an int.
    assert [type(getattr(back, name)) for name in spec.fields] == [type(getattr(event, name)) for name in spec.fields]


@settings(max_examples=50, deadline=None)
@given(events=st.lists(EVENTS, max_size=8))
def test_bytes_of_single_events_may_be_put_one_after_the_other(events: list[Event]) -> None:
    assert decoded(b"".join(map(CODEC.encode, events))) == events


@settings(max_examples=50, deadline=None)
@given(events=st.lists(EVENTS, min_size=1, max_size=8), is_hostile=st.booleans())
def test_many_events_at_once_are_the_same_bytes_as_one_by_one(events: list[Event], is_hostile: bool) -> None:
    if is_hostile:
        events[0] = RequestQueued(request="\ud800", prompt_tokens=2**70, num_sequences=1, queued_ns=0)

    assert CODEC.encode_all(events) == b"".join(map(CODEC.encode, events))


@settings(max_examples=50, deadline=None)
@given(snapshot=structs(EngineSnapshot), rows=st.integers(1, 5))
def test_a_snapshot_survives_whatever_the_size_of_its_parts(snapshot: EngineSnapshot, rows: int) -> None:
    names = [tier.tier for tier in snapshot.tiers]
    if len(set(names)) < len(names):
        snapshot = msgspec.structs.replace(snapshot, tiers=snapshot.tiers[:1])
    codec = StructCodec(SnapshotPart)

    parts = [SnapshotPart(snapshot=part, is_last=False, epoch="e") for part in snapshot_parts(snapshot, rows)]
    back = join_parts([codec.decode(codec.encode(part)).snapshot for part in parts])

    assert back == snapshot
    assert all(
        len(part.snapshot.requests) <= rows and all(len(t.hashes) <= rows for t in part.snapshot.tiers)
        for part in parts
    )


@settings(max_examples=50, deadline=None)
@given(request=structs(SubscribeRequest), started=structs(Started), gap=structs(Gap), seq=st.none() | INTEGERS)
def test_requests_and_answers_survive(request: SubscribeRequest, started: Started, gap: Gap, seq: int | None) -> None:
    requests, updates = StructCodec(SubscribeRequest), StructCodec(Update)
    update = Update(started=started, gap=gap, next_seq=seq)

    assert requests.decode(requests.encode(request)) == request
    assert updates.decode(updates.encode(update)) == update
    assert updates.decode(updates.encode(Update())) == Update()


def test_none_and_empty_are_told_apart() -> None:
    choices: list[list[list[int]] | None] = [None, [], [[]], [[1, 2], []]]
    for token_ids in choices:
        event = BlocksStored(hashes=[b""], block_ids=[1], parent=b"", token_ids=token_ids)
        assert decoded(CODEC.encode(event)) == [event]


def test_token_ids_are_left_out_unless_they_are_asked_for() -> None:
    event = BlocksStored(hashes=[b"h"], block_ids=[1], parent=None, token_ids=[[1, 2]], seq=4)

    (back,) = decoded(EventCodec().encode(event))

    assert back == msgspec.structs.replace(event, token_ids=None)
    assert event.token_ids == [[1, 2]]


def test_a_tier_without_blocks_survives() -> None:
    tiers = [TierState(name, 0, [], [], []) for name in ("device", "host")]
    snapshot = EngineSnapshot(1, 2, 3, 4, 5, 6, 7, 8, tiers, [], [])

    assert join_parts(list(snapshot_parts(snapshot))) == snapshot


def test_a_hostile_name_or_number_does_not_end_the_stream() -> None:
    event = RequestQueued(request="a\ud800b", prompt_tokens=2**70, num_sequences=1, queued_ns=-(2**70))

    (back,) = decoded(CODEC.encode(event))

    assert isinstance(back, RequestQueued)
    assert back.request == "a\\ud800b"
    assert (back.prompt_tokens, back.queued_ns) == (2**63 - 1, -(2**63))


def test_an_event_of_a_newer_version_is_passed_over_and_the_next_one_is_read() -> None:
    known = StepFailed(error="X", seq=8)
    later = b"\xca\x3e\x02\x08\x01"  # field 1001, of length 2
    content = CODEC.encode(known)
    newer = message_class("Envelope").FromString(later + b"\xa8\x06\x07")  # and seq 7
    update = UPDATE(events=[newer]).SerializeToString() + content

    assert decoded(update) == [None, known]


def test_what_is_no_message_is_an_error_with_a_reason() -> None:
    with pytest.raises(StreamError, match="is it a kvwatch stream"):
        StructCodec(SubscribeRequest).decode(b"\xff\xff\xff")
