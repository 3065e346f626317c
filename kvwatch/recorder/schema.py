"""Which events and fields a recording holds, and events to bytes and back.

An event is stored as `[event number, [values]]`. The order of the values is written in the recording's header, as
field numbers with names, types and units: so a recording is small, and stays readable when events or fields are
added, renamed or retired. Owns that form; does not know files.

Text and token ids are left out unless asked for, whatever the engine puts into its events.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

import kvwatch.telemetry.events  # noqa: F401 - fills the registry
from kvwatch.derive.lock import wire_type
from kvwatch.errors import RecordingError
from kvwatch.telemetry.schema import REGISTRY, Event, EventSpec

PRIVATE_FIELDS = frozenset({"token_ids", "image_hashes", "prompt_token_ids", "prompt", "text"})
"""Fields that may hold what users wrote or read."""

MAX_EVENTS = 4096
"""Most events in one chunk; a collector brings at most 256."""

_AT_MOST = msgspec.Meta(max_length=MAX_EVENTS)
_LENGTH = struct.Struct("<I")
_BASE_FIELDS = ("seq", "step", "time_ns")


class RecordedField(msgspec.Struct, frozen=True, array_like=True):
    """One field; its place in the event's list is its place among the values."""

    number: int
    name: str
    type: str
    """As in the lock file: `int64`, `list<string>`, `optional<int64>`, ..."""
    unit: str = ""


class RecordedEvent(msgspec.Struct, frozen=True, array_like=True):
    """One event class."""

    number: int
    name: str
    fields: list[RecordedField]


class UnknownEvent(Event):
    """An event of a version that knows more than this one. It changes nothing that this version keeps."""

    number: int
    name: str


def current_schema() -> list[RecordedEvent]:
    """Return the events that this version knows, by number."""
    return [
        RecordedEvent(
            spec.number,
            spec.name,
            [RecordedField(f.number, name, wire_type(spec.types[name]), f.unit) for name, f in spec.fields.items()],
        )
        for spec in REGISTRY
    ]


def fingerprint(schema: Sequence[RecordedEvent]) -> str:
    """Return a short name for a schema: equal fingerprints mean equal schemas."""
    return hashlib.sha256(msgspec.msgpack.encode(schema)).hexdigest()[:16]


class EventEncoder:
    """Events to bytes. One thread at a time.

    Args:
        keep_token_ids: Whether token ids and texts are stored if the events carry them.
    """

    def __init__(self, *, keep_token_ids: bool = False) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._numbers = {spec.cls: spec.number for spec in REGISTRY}
        self._blanks = {} if keep_token_ids else _blanks()

    def encode(self, events: Iterable[Event]) -> bytes:
        """Return one chunk: its length, then its events."""
        numbers, blanks, as_tuple = self._numbers, self._blanks, msgspec.structs.astuple
        rows: list[tuple[int, tuple[Any, ...]]] = []
        for event in events:
            number = numbers[type(event)]
            values = as_tuple(event)
            rows.append((number, _without(values, blanks[number]) if number in blanks else values))
        try:
            body = self._encode(rows)
        except UnicodeEncodeError:  # half a surrogate pair, which JSON bodies may bring
            body = self._encode(encodable(rows))
        return _LENGTH.pack(len(body)) + body


def encodable(value: Any) -> Any:
    """Return plain data with text that UTF-8 cannot express written out as escapes, at any depth."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [encodable(each) for each in value]
    if isinstance(value, dict):
        return {encodable(name): encodable(each) for name, each in value.items()}
    return value


class EventDecoder:
    """Bytes to events, in the classes of this version.

    Args:
        schema: What the recording's header says.

    Raises:
        RecordingError: the recording contradicts the events of this version.
    """

    def __init__(self, schema: Sequence[RecordedEvent]) -> None:
        self._rows = msgspec.msgpack.Decoder(Annotated[list[tuple[int, msgspec.Raw]], _AT_MOST])
        specs = {spec.number: spec for spec in REGISTRY}
        self._layouts: dict[int, _Layout] = {}
        for recorded in schema:
            if recorded.number in self._layouts:
                raise RecordingError(f"the recording declares event number {recorded.number} twice; it is damaged")
            self._layouts[recorded.number] = _Layout(recorded, specs.get(recorded.number))

    def decode(self, body: bytes) -> list[Event]:
        """Return the events of a frame's body: one or more chunks.

        Raises:
            RecordingError: it is not what an encoder wrote.
        """
        events: list[Event] = []
        position = 0
        try:
            while position < len(body):
                (length,) = _LENGTH.unpack_from(body, position)
                start = position + _LENGTH.size
                position = start + length
                if position > len(body):
                    raise RecordingError("a chunk of events is longer than its frame; the recording is damaged")
                for number, values in self._rows.decode(memoryview(body)[start:position]):
                    layout = self._layouts.get(number)
                    if layout is None:
                        raise RecordingError(f"event number {number} is not declared in the recording's header")
                    events.append(layout.make(values))
        except (msgspec.DecodeError, struct.error) as error:
            raise RecordingError(f"events cannot be decoded ({error}); the recording is damaged") from error
        return events


class _Layout:
    """How the values of one recorded event become an event of this version."""

    def __init__(self, recorded: RecordedEvent, spec: EventSpec | None) -> None:
        self._recorded = recorded
        self._class: type[Event] | None = spec.cls if spec else None
        by_number = {f.number: name for name, f in (spec.fields if spec else _base_fields()).items()}
        types = spec.types if spec else dict.fromkeys(_BASE_FIELDS, int)
        names = [by_number.get(field.number) for field in recorded.fields]
        known = [name for name in names if name is not None]
        if len(set(known)) != len(known) or not set(_BASE_FIELDS) <= set(known):
            raise RecordingError(f"the recording declares the fields of event {recorded.name} wrongly; it is damaged")
        for name, field in zip(names, recorded.fields, strict=True):
            if name is not None and wire_type(types[name]) != field.type:
                raise RecordingError(
                    f"field {field.name} of event {recorded.name} is {field.type} in the recording and "
                    f"{wire_type(types[name])} in this version; use the version that recorded it"
                )
        self._names = names
        # What this version does not know stays undecoded: it costs no memory.
        kinds = tuple(msgspec.Raw if name is None else _open_type(types[name]) for name in names)
        self._values = msgspec.msgpack.Decoder(tuple[kinds])  # type: ignore[valid-type]
        self._missing = _missing(spec, set(known)) if spec else {}

    def make(self, values: msgspec.Raw) -> Event:
        """Return the event."""
        found = {
            name: value
            for name, value in zip(self._names, self._values.decode(values), strict=True)
            if name is not None
        }
        if self._class is None:
            return UnknownEvent(number=self._recorded.number, name=self._recorded.name, **found)
        return self._class(**found, **self._missing)


def _base_fields() -> dict[str, Any]:
    spec = next(iter(REGISTRY))
    return {name: spec.fields[name] for name in _BASE_FIELDS}


def _missing(spec: EventSpec, known: set[str]) -> dict[str, Any]:
    """Return values for required fields that are younger than the recording."""
    required = {f.name for f in msgspec.structs.fields(spec.cls) if f.required}
    return {name: _zero(spec.types[name]) for name in required - known}


def _blanks() -> dict[int, dict[int, Any]]:
    """Return, by event number, which places are emptied and with what."""
    return {
        spec.number: blanks
        for spec in REGISTRY
        if (
            blanks := {
                place: _zero(spec.types[name])
                for place, name in enumerate(spec.cls.__struct_fields__)
                if name in PRIVATE_FIELDS
            }
        )
    }


def _without(values: tuple[Any, ...], blanks: dict[int, Any]) -> tuple[Any, ...]:
    return tuple(blanks.get(place, value) for place, value in enumerate(values))


def _open_type(hint: Any) -> Any:
    """Return the type to decode: a Literal may have got values that this version does not know."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return type(arguments[0])
    if origin is list:
        return list[_open_type(arguments[0])]  # type: ignore[misc]
    if origin is dict:
        return dict[_open_type(arguments[0]), _open_type(arguments[1])]  # type: ignore[misc]
    if origin in {Union, UnionType}:
        (member,) = (argument for argument in arguments if argument is not NoneType)
        return _open_type(member) | None
    return hint


def _zero(hint: Any) -> Any:
    """Return the value that says nothing."""
    origin = get_origin(hint)
    if origin in {Union, UnionType}:
        return None
    kind = origin or hint
    return "" if kind is Literal else kind()
