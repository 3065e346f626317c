"""Events, snapshots and the contract's structs to protobuf messages and back. Any thread.

Works from the declared types; knows no event by name. What protobuf cannot hold (a lone surrogate in a request's name,
an integer of more than 64 bits) is mended, since a hostile name must not end a stream.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar, get_args, get_origin

import msgspec
from google.protobuf.message import DecodeError, Message

from kvwatch.derive.proto import (
    BOX_FIELD,
    ENVELOPE,
    ONEOF,
    AnyEvent,
    box_name,
    choice_name,
    is_sparse_bytes,
    is_struct,
    list_item,
    optional_member,
    own_fields,
)
from kvwatch.errors import ControlError
from kvwatch.stream.contract import Update
from kvwatch.stream.descriptors import message_class
from kvwatch.telemetry.schema import REGISTRY, Event
from kvwatch.telemetry.snapshot import EngineSnapshot, TierState

PART_ROWS = 8192
"""Blocks, sequences or requests in one part of a snapshot: some 300 kB, encoded without yielding."""

PROMPT_FIELDS: Final[dict[str, object]] = {"token_ids": None, "image_hashes": []}
"""Fields of events that say what users wrote, and what is told in their place."""

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

S = TypeVar("S", bound=msgspec.Struct)
Convert = Callable[[Any], Any]


class StreamError(ControlError):
    """The stream was refused, cannot be reached, or says what cannot be understood."""


class StructCodec(Generic[S]):
    """Converts one struct class to its message and back."""

    def __init__(self, cls: type[S]) -> None:
        self._cls = cls
        self._message = message_class(cls.__name__)
        hints = {name: hint for name, (hint, _, _) in own_fields(cls).items() if hint != list[AnyEvent]}
        self._names = tuple(hints)
        self._packers = tuple((name, pack) for name, hint in hints.items() if (pack := _packer(hint)))
        self._unpackers = tuple((name, _unpacker(hint)) for name, hint in hints.items())
        self._optional = frozenset(name for name, hint in hints.items() if optional_member(hint) is not None)

    def values(self, struct: S) -> dict[str, Any]:
        """Return what the message of a struct takes, by field."""
        return self._packed({name: getattr(struct, name) for name in self._names})

    def all_values(self, struct: S) -> dict[str, Any]:
        """Return the same with fields that are none of the message's, as an event has: one call for all of them."""
        return self._packed(msgspec.structs.asdict(struct))

    def _packed(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, pack in self._packers:
            values[name] = pack(values[name])
        return values

    def pack(self, struct: S) -> Message:
        """Return the message of a struct."""
        values = self.values(struct)
        try:
            return self._message(**values)
        except ValueError:  # UnicodeEncodeError is one
            return self._message(**{name: _mended(value) for name, value in values.items()})

    def unpack(self, message: Any, **more: Any) -> S:
        """Return the struct of a message; `more` are fields that the message does not have."""
        for name, unpack in self._unpackers:
            if name in self._optional and not message.HasField(name):
                more[name] = None
            else:
                more[name] = unpack(getattr(message, name))
        return self._cls(**more)

    def encode(self, struct: S) -> bytes:
        """Return the bytes of a struct's message."""
        return bytes(self.pack(struct).SerializeToString())

    def decode(self, content: bytes) -> S:
        """Return the struct in these bytes.

        Raises:
            StreamError: they are no such message.
        """
        return self.unpack(parse(self._message, content))


def parse(message: type[Message], content: bytes) -> Any:
    """Return the message in these bytes.

    Raises:
        StreamError: they are no such message.
    """
    try:
        return message.FromString(content)
    except DecodeError as error:
        raise StreamError(f"what came is no {message.DESCRIPTOR.name} ({error}); is it a kvwatch stream?") from error


# ---------------------------------------------------------------- fields


def _packer(hint: Any) -> Convert | None:
    """Return what turns a value into what the message takes, or none if it takes it as it is."""
    item, member = list_item(hint), optional_member(hint)
    if is_sparse_bytes(hint):
        return lambda values: [value or b"" for value in values]
    if member is not None:
        pack = _boxer(member) if list_item(member) is not None else _packer(member)
        return None if pack is None else lambda value: None if value is None else pack(value)
    if item is not None:
        each = _boxer(item) if list_item(item) is not None else _packer(item)
        return None if each is None else lambda values: [each(value) for value in values]
    return StructCodec(hint).pack if is_struct(hint) else None


def _boxer(hint: Any) -> Convert:
    """Return what puts a list into the message that stands for it."""
    message, pack = message_class(box_name(hint)), _packer(hint)
    return lambda values: message(**{BOX_FIELD: pack(values) if pack else values})


def _unpacker(hint: Any) -> Convert:
    item, member = list_item(hint), optional_member(hint)
    if is_sparse_bytes(hint):
        return lambda values: [value or None for value in values]
    if member is not None:
        return _unboxer(member) if list_item(member) is not None else _unpacker(member)
    if item is not None:
        if list_item(item) is not None:
            unbox = _unboxer(item)
            return lambda values: [unbox(value) for value in values]
        if is_struct(item):
            unpack = StructCodec(item).unpack
            return lambda values: [unpack(value) for value in values]
        return list
    if get_origin(hint) is dict:
        return dict
    return StructCodec(hint).unpack if is_struct(hint) else _same


def _unboxer(hint: Any) -> Convert:
    unpack = _unpacker(hint)
    return lambda message: unpack(getattr(message, BOX_FIELD))


def _same(value: Any) -> Any:
    return value


def _mended(value: Any) -> Any:
    """Return what can be put on the wire instead: text with escapes, the nearest integer."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, INT64_MIN), INT64_MAX)
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value


# ---------------------------------------------------------------- events


class EventCodec:
    """Converts events to and from envelopes.

    Args:
        with_token_ids: Whether token ids and digests of images are encoded; else the fields that hold them are empty.
    """

    def __init__(self, *, with_token_ids: bool = False) -> None:
        self._update = message_class(Update.__name__)
        self._envelope = message_class(ENVELOPE)
        self._codecs: dict[type[Event], tuple[str, StructCodec[Event]]] = {
            spec.cls: (choice_name(spec), StructCodec(spec.cls)) for spec in REGISTRY
        }
        self._blanks = {} if with_token_ids else _blanks()
        self._by_choice = dict(self._codecs.values())

    def encode(self, event: Event) -> bytes:
        """Return the bytes of an `Update` that holds this event alone."""
        return self.encode_all((event,))

    def encode_all(self, events: Sequence[Event]) -> bytes:
        """Return the bytes of an `Update` that holds these events.

        Messages may be concatenated: the bytes of several such updates are those of one that holds all their events.
        """
        try:
            # One call makes all messages, in their places: nothing is made alone and then copied.
            return bytes(self._update(events=[self._envelope_values(event) for event in events]).SerializeToString())
        except ValueError:  # one of them holds what the wire does not
            return b"".join(map(self._encode_mended, events))

    def _envelope_values(self, event: Event) -> dict[str, Any]:
        choice, codec = self._codecs[type(event)]
        values = codec.all_values(event)
        blanks = self._blanks.get(type(event))
        if blanks is not None:
            values.update(blanks)
        return {"seq": values.pop("seq"), "step": values.pop("step"), "time_ns": values.pop("time_ns"), choice: values}

    def _encode_mended(self, event: Event) -> bytes:
        choice, codec = self._codecs[type(event)]
        event = msgspec.structs.replace(event, **self._blanks.get(type(event), {}))
        envelope = self._envelope(seq=event.seq, step=event.step, time_ns=event.time_ns, **{choice: codec.pack(event)})
        return bytes(self._update(events=[envelope]).SerializeToString())

    def decode(self, envelope: Any) -> Event | None:
        """Return the event in an envelope; none if this version does not know it."""
        choice = envelope.WhichOneof(ONEOF)
        if choice is None:
            return None
        return self._by_choice[choice].unpack(
            getattr(envelope, choice), seq=envelope.seq, step=envelope.step, time_ns=envelope.time_ns
        )


def _blanks() -> dict[type[Event], dict[str, object]]:
    """Return the fields of each event that must not tell what users wrote, with what is told instead."""
    told = {spec.cls: {name: what for name, what in PROMPT_FIELDS.items() if name in spec.fields} for spec in REGISTRY}
    return {event: fields for event, fields in told.items() if fields}


# ---------------------------------------------------------------- snapshots


def snapshot_parts(snapshot: EngineSnapshot, rows: int = PART_ROWS) -> Iterator[EngineSnapshot]:
    """Yield snapshots of at most `rows` entries in each list, which joined give this one; at least one."""
    lists = _list_fields(EngineSnapshot) - {"tiers"}
    columns = _list_fields(TierState)
    empty_tiers = [_sliced(tier, columns, slice(0, 0)) for tier in snapshot.tiers]
    num_rows = max((len(getattr(snapshot, name)) for name in lists), default=0)
    yield msgspec.structs.replace(_sliced(snapshot, lists, slice(0, rows)), tiers=empty_tiers)
    for begin in range(rows, num_rows, rows):
        yield msgspec.structs.replace(_sliced(snapshot, lists, slice(begin, begin + rows)), tiers=[])
    nothing = _sliced(snapshot, lists, slice(0, 0))
    for tier in snapshot.tiers:
        for begin in range(0, max((len(getattr(tier, name)) for name in columns), default=0), rows):
            part = _sliced(tier, columns, slice(begin, begin + rows))
            yield msgspec.structs.replace(nothing, tiers=[part])


def join_parts(parts: list[EngineSnapshot]) -> EngineSnapshot:
    """Return the snapshot that was sent in these parts."""
    tiers: dict[str, list[TierState]] = {}
    for part in parts:
        for tier in part.tiers:
            tiers.setdefault(tier.tier, []).append(tier)
    whole = _joined(parts, _list_fields(EngineSnapshot) - {"tiers"})
    columns = _list_fields(TierState)
    return msgspec.structs.replace(whole, tiers=[_joined(of_tier, columns) for of_tier in tiers.values()])


def _list_fields(cls: type[msgspec.Struct]) -> set[str]:
    return {name for name, (hint, _, _) in own_fields(cls).items() if get_origin(hint) is list and get_args(hint)}


def _sliced(struct: S, lists: set[str], rows: slice) -> S:
    return msgspec.structs.replace(struct, **{name: getattr(struct, name)[rows] for name in lists})


def _joined(parts: list[S], lists: set[str]) -> S:
    columns = {name: [row for part in parts for row in getattr(part, name)] for name in lists}
    return msgspec.structs.replace(parts[0], **columns)
