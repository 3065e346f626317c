"""The protobuf schema of the event stream, as it follows from the declarations.

Owns the mapping from declared types to proto3, and the text of the `.proto` file. Does not know what is sent when, nor
the protobuf library: `kvwatch.stream` makes message classes from the same description, so that nothing is compiled.

    str, bytes, int, float, bool    string, bytes, int64, double, bool
    X | None                        optional X, or X when that is a message; of a list: a message that holds it
    list[X]                         repeated X; of a list: repeated messages that hold one list each
    list[bytes | None]              repeated bytes, where empty stands for none
    dict[K, V]                      map<K, V>
    a struct                        the message of that name

Numbers: an event's fields have those of their declaration, and so have structs whose fields are declared likewise;
fields of other structs are numbered by their place, so that such a struct may only grow at its end.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from kvwatch.errors import SchemaError
from kvwatch.telemetry.schema import Cardinality, Event, EventSpec, FieldSpec

PACKAGE = "kvwatch.v1"
FILE = "kvwatch/v1/telemetry.proto"
ONEOF = "event"
ENVELOPE = "Envelope"
BOX_FIELD = "values"
"""The one field of a message that stands for a list."""

SCALARS: dict[object, str] = {str: "string", bytes: "bytes", int: "int64", float: "double", bool: "bool"}


class AnyEvent(msgspec.Struct):
    """Stands in declarations for the message that holds one event of any class, the envelope."""


class ProtoField(msgspec.Struct, frozen=True):
    """One field of a message."""

    name: str
    number: int
    type: str
    """Name of a scalar or of a message."""
    brief: str = ""
    label: Literal["", "optional", "repeated"] = ""
    key: str = ""
    """Type of the keys when the field is a map, whose values have `type`."""
    is_choice: bool = False
    """Whether it is one of the alternatives of the message's oneof."""


class ProtoMessage(msgspec.Struct, frozen=True):
    """One message."""

    name: str
    brief: str
    fields: tuple[ProtoField, ...]


class ProtoMethod(msgspec.Struct, frozen=True):
    """One call that answers with a stream of messages."""

    name: str
    brief: str
    request: str
    reply: str


class ProtoService(msgspec.Struct, frozen=True):
    """The service."""

    name: str
    brief: str
    methods: tuple[ProtoMethod, ...]

    @property
    def full_name(self) -> str:
        """Its name with the package's."""
        return f"{PACKAGE}.{self.name}"


class ProtoFile(msgspec.Struct, frozen=True):
    """The whole schema."""

    messages: tuple[ProtoMessage, ...]
    service: ProtoService


def proto_file(specs: Iterable[EventSpec], structs: Iterable[type[msgspec.Struct]], service: ProtoService) -> ProtoFile:
    """Return the schema of all events, of `structs` with all that they hold, and of the service.

    Raises:
        SchemaError: a field has a type that cannot be put on the wire.
    """
    events = list(specs)
    messages = [_struct_message(cls) for cls in _with_parts(structs)]
    messages.append(_envelope(events))
    messages += [_event_message(spec) for spec in events]
    return ProtoFile((*messages, *_boxes(messages)), service)


def proto_text(file: ProtoFile) -> str:
    """Return the text of the `.proto` file."""
    lines = [
        "// Derived from the declarations; run `make derive`.",
        'syntax = "proto3";',
        "",
        f"package {PACKAGE};",
        "",
    ]
    lines += [*_comment(file.service.brief, ""), f"service {file.service.name} {{"]
    for method in file.service.methods:
        lines += _comment(method.brief, "  ")
        lines.append(f"  rpc {method.name}({method.request}) returns (stream {method.reply});")
    lines.append("}")
    for message in file.messages:
        lines += ["", *_comment(message.brief, ""), *_message_lines(message)]
    return "\n".join(lines) + "\n"


def moved_numbers(old: str, file: ProtoFile) -> list[str]:
    """Return a sentence for each field whose number the text `old` gives differently; empty when there is none."""
    found = []
    for name, body in re.findall(r"^message (\w+) \{\n(.*?)^\}", old, re.DOTALL | re.MULTILINE):
        before = {field: int(number) for field, number in re.findall(r" (\w+) = (\d+);", body)}
        now = next((message.fields for message in file.messages if message.name == name), ())
        for field in now:
            if before.get(field.name, field.number) != field.number:
                found.append(f"field {field.name} of {name} had number {before[field.name]} and has {field.number}")
            elif field.name not in before and field.number in before.values():
                found.append(f"field {field.name} of {name} took the number {field.number} of another")
    return found


def list_item(hint: Any) -> Any | None:
    """Return what a list type holds, or none if the type is no list."""
    return get_args(hint)[0] if get_origin(hint) is list else None


def optional_member(hint: Any) -> Any | None:
    """Return X of `X | None`, or none if the type is not of that form."""
    if get_origin(hint) not in {Union, UnionType} or NoneType not in get_args(hint):
        return None
    members = [member for member in get_args(hint) if member is not NoneType]
    return members[0] if len(members) == 1 else None


def is_struct(hint: Any) -> bool:
    """Whether the type is a struct, so a message of its own."""
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def is_sparse_bytes(hint: Any) -> bool:
    """Whether the type is a list of byte strings some of which may be none."""
    item = list_item(hint)
    return item is not None and optional_member(item) is bytes


def box_name(hint: Any) -> str:
    """Return the name of the message that holds a list of this type, or of the message or scalar of any other type."""
    item = list_item(hint)
    if item is not None:
        return f"{box_name(item)}Array"
    name = _type_name(hint)
    return name[0].upper() + name[1:]


def own_fields(cls: type[msgspec.Struct]) -> dict[str, tuple[Any, int, str]]:
    """Return type, number and meaning of each field of a struct; of an event only those that the envelope lacks."""
    hints = get_type_hints(cls, include_extras=True)
    common = set(Event.__struct_fields__) if issubclass(cls, Event) else set()
    fields: dict[str, tuple[Any, int, str]] = {}
    for place, name in enumerate(cls.__struct_fields__, start=1):
        if name in common:
            continue
        hint = hints[name]
        declared = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, FieldSpec)), None)
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        fields[name] = (plain, declared.number, _brief(declared)) if declared else (plain, place, "")
    return fields


# ---------------------------------------------------------------- messages


def _with_parts(structs: Iterable[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """Return the structs and those in their fields, each once, in the order in which they are found."""
    found: list[type[msgspec.Struct]] = []
    for cls in structs:
        if cls is AnyEvent or cls in found:
            continue
        found.append(cls)
        parts = [part for hint, _, _ in own_fields(cls).values() for part in _structs_of(hint)]
        found += [part for part in _with_parts(parts) if part not in found]
    return found


def _structs_of(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if is_struct(hint):
        yield hint
    for argument in get_args(hint):
        yield from _structs_of(argument)


def _struct_message(cls: type[msgspec.Struct]) -> ProtoMessage:
    fields = tuple(_field(name, *rest) for name, rest in own_fields(cls).items())
    return ProtoMessage(cls.__name__, " ".join((cls.__doc__ or "").split()), fields)


def _event_message(spec: EventSpec) -> ProtoMessage:
    fields = tuple(_field(name, *rest) for name, rest in own_fields(spec.cls).items())
    ordered = tuple(sorted(fields, key=lambda field: field.number))
    return ProtoMessage(spec.cls.__name__, f"{spec.name}: {spec.brief}", ordered)


def _envelope(events: Sequence[EventSpec]) -> ProtoMessage:
    choices = tuple(
        ProtoField(choice_name(spec), spec.number, spec.cls.__name__, is_choice=True)
        for spec in sorted(events, key=lambda spec: spec.number)
    )
    hints = get_type_hints(Event, include_extras=True)
    common = []
    for name in Event.__struct_fields__:
        plain, declared = get_args(hints[name])[:2]
        common.append(_field(name, plain, declared.number, _brief(declared)))
    return ProtoMessage(
        ENVELOPE, "One event; a reader that does not know it still knows its place.", (*choices, *common)
    )


def choice_name(spec: EventSpec) -> str:
    """Return the name of an event's field in the envelope."""
    return spec.name.replace(".", "_")


def _boxes(messages: Iterable[ProtoMessage]) -> list[ProtoMessage]:
    """Return a message for each kind of list that a field cannot hold directly."""
    names = {field.type for message in messages for field in message.fields if field.type.endswith("Array")}
    while inner := {name.removesuffix("Array") for name in names if name.endswith("ArrayArray")} - names:
        names |= inner
    boxes = []
    for name in sorted(names):
        item = name.removesuffix("Array")
        kind = item.lower() if item.lower() in SCALARS.values() else item
        field = ProtoField(BOX_FIELD, 1, kind, label="repeated")
        boxes.append(ProtoMessage(name, "A list.", (field,)))
    return boxes


def _field(name: str, hint: Any, number: int, brief: str) -> ProtoField:
    item, member = list_item(hint), optional_member(hint)
    if is_sparse_bytes(hint):
        return ProtoField(name, number, "bytes", f"{brief} Empty stands for none.".strip(), "repeated")
    if item is not None:
        kind = box_name(item) if list_item(item) is not None else _type_name(item)
        return ProtoField(name, number, kind, brief, "repeated")
    if member is not None:
        kind = box_name(member) if list_item(member) is not None else _type_name(member)
        # Whether a message is there is known without a word for it.
        return ProtoField(name, number, kind, brief, "optional" if kind in SCALARS.values() else "")
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        return ProtoField(name, number, _type_name(value), brief, key=_type_name(key))
    return ProtoField(name, number, _type_name(hint), brief)


def _type_name(hint: Any) -> str:
    if hint in SCALARS:
        return SCALARS[hint]
    if get_origin(hint) is Literal:
        return _type_name(type(get_args(hint)[0]))
    if hint is AnyEvent:
        return ENVELOPE
    if is_struct(hint):
        return str(hint.__name__)
    raise SchemaError(f"type {hint} has no form in protobuf; see kvwatch.derive.proto for those that have one")


def _brief(field: FieldSpec) -> str:
    has_unit = field.cardinality is Cardinality.VALUE and field.unit not in {"", "1"}
    return f"{field.brief} Unit: {field.unit}." if has_unit else field.brief


# ---------------------------------------------------------------- text


def _message_lines(message: ProtoMessage) -> Iterator[str]:
    if not message.fields:
        yield f"message {message.name} {{}}"
        return
    yield f"message {message.name} {{"
    choices = [field for field in message.fields if field.is_choice]
    if choices:
        yield f"  oneof {ONEOF} {{"
        yield from (f"    {field.type} {field.name} = {field.number};" for field in choices)
        yield "  }"
    for field in message.fields:
        if not field.is_choice:
            yield from _comment(field.brief, "  ")
            kind = f"map<{field.key}, {field.type}>" if field.key else field.type
            yield f"  {f'{field.label} ' if field.label else ''}{kind} {field.name} = {field.number};"
    yield "}"


def _comment(text: str, indent: str) -> list[str]:
    """Break a sentence into comment lines of at most 110 characters."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + len(word) < 110:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}// {word}")
    return lines
