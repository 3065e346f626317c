"""The lock: what may never change, since recordings, dashboards and readers of another version rely on it.

An event keeps its number, name and fields; a field keeps its number, name, type, unit and cardinality; a metric keeps
its kind, unit and labels. New ones may be added. What is removed stays in the lock for ever, marked as retired, so
that its number and name are never used for something else.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from kvwatch.errors import SchemaError
from kvwatch.telemetry.schema import EventSpec, Metric

_SCALARS: dict[object, str] = {str: "string", bytes: "bytes", int: "int64", float: "double", bool: "bool"}


class LockedField(msgspec.Struct, frozen=True):
    """One field as it was first released."""

    name: str
    type: str
    unit: str
    cardinality: str
    retired: bool = False


class LockedEvent(msgspec.Struct, frozen=True):
    """One event; fields by number."""

    name: str
    fields: dict[str, LockedField]
    retired: bool = False


class LockedMetric(msgspec.Struct, frozen=True):
    """One metric."""

    kind: str
    unit: str
    labels: list[str]
    retired: bool = False


class Lock(msgspec.Struct, frozen=True):
    """The whole lock file: events by number, metrics by name."""

    events: dict[str, LockedEvent]
    metrics: dict[str, LockedMetric]


def wire_type(hint: Any) -> str:
    """Return the name under which a field's type is locked; possible values of a Literal are not part of it.

    Raises:
        SchemaError: events must not have fields of this type.
    """
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return wire_type(type(arguments[0]))
    if origin is list:
        return f"list<{wire_type(arguments[0])}>"
    if origin is dict:
        return f"map<{wire_type(arguments[0])}, {wire_type(arguments[1])}>"
    if origin in {Union, UnionType} and NoneType in arguments:
        (member,) = (argument for argument in arguments if argument is not NoneType)
        return f"optional<{wire_type(member)}>"
    raise SchemaError(f"type {hint} cannot be put on the wire; use str, bytes, int, float, bool, list, dict, X | None")


def make_lock(specs: Iterable[EventSpec], catalogue: Iterable[Metric], old: Lock | None) -> Lock:
    """Return the lock of these declarations; what only `old` has is kept as retired."""
    events = {str(spec.number): _lock_event(spec, old) for spec in specs}
    metrics = {m.name: LockedMetric(str(m.kind), m.unit, list(m.labels)) for m in catalogue}
    if old is not None:
        for number, event in old.events.items():
            events.setdefault(number, msgspec.structs.replace(event, retired=True))
        for name, metric in old.metrics.items():
            metrics.setdefault(name, msgspec.structs.replace(metric, retired=True))
    return Lock(dict(sorted(events.items(), key=lambda item: int(item[0]))), dict(sorted(metrics.items())))


def broken_promises(old: Lock, new: Lock) -> list[str]:
    """Return a sentence for each change that the lock forbids; empty when there is none."""
    return [*_event_changes(old, new), *_reused_names(old, new), *_metric_changes(old, new)]


def encode_lock(lock: Lock) -> str:
    """Return the text of the lock file."""
    return msgspec.json.format(msgspec.json.encode(lock), indent=2).decode() + "\n"


def decode_lock(text: str) -> Lock:
    """Read a lock file.

    Raises:
        SchemaError: it is not a lock file.
    """
    try:
        return msgspec.json.decode(text.encode(), type=Lock)
    except msgspec.DecodeError as error:
        raise SchemaError(f"the lock file cannot be read ({error}); restore it from version control") from error


def _lock_event(spec: EventSpec, old: Lock | None) -> LockedEvent:
    fields = {
        str(field.number): LockedField(name, wire_type(spec.types[name]), field.unit, str(field.cardinality))
        for name, field in spec.fields.items()
    }
    before = old.events.get(str(spec.number)) if old else None
    for number, field in before.fields.items() if before else ():
        fields.setdefault(number, msgspec.structs.replace(field, retired=True))
    return LockedEvent(spec.name, dict(sorted(fields.items(), key=lambda item: int(item[0]))))


def _event_changes(old: Lock, new: Lock) -> Iterator[str]:
    for number, before in old.events.items():
        after = new.events.get(number)
        if after is None:
            continue
        if after.name != before.name:
            yield f"event number {number} was {before.name} and is {after.name}: take a new number"
            continue
        if before.retired and not after.retired:
            yield f"event {before.name} was retired: take a new number and name"
        yield from _changes_of_fields(before, after)


def _changes_of_fields(before: LockedEvent, after: LockedEvent) -> Iterator[str]:
    for number, field in before.fields.items():
        now = after.fields.get(number)
        if now is None:
            continue
        where = f"field {number} of event {before.name}"
        if field.retired and not now.retired:
            yield f"{where} was retired: take a new number"
        for what in ("name", "type", "unit", "cardinality"):
            if getattr(field, what) != getattr(now, what):
                yield f"{where}: {what} was {getattr(field, what)!r} and is {getattr(now, what)!r}: add a new field"
    names: Mapping[str, str] = {field.name: number for number, field in before.fields.items()}
    for number, field in after.fields.items():
        if names.get(field.name, number) != number:
            yield f"field {field.name} of event {before.name} had number {names[field.name]}: it keeps it"


def _reused_names(old: Lock, new: Lock) -> Iterator[str]:
    numbers = {event.name: number for number, event in old.events.items()}
    for number, event in new.events.items():
        if numbers.get(event.name, number) != number:
            yield f"event {event.name} had number {numbers[event.name]} and has {number}: it keeps its number"


def _metric_changes(old: Lock, new: Lock) -> Iterator[str]:
    for name, before in old.metrics.items():
        after = new.metrics.get(name)
        if after is None:
            continue
        if before.retired and not after.retired:
            yield f"metric {name} was retired: take a new name"
        for what in ("kind", "unit", "labels"):
            was, now = getattr(before, what), getattr(after, what)
            if was != now:
                yield f"metric {name}: {what} was {was!r} and is {now!r}: take a new name"
