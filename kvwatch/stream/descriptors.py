"""Message classes of the stream, made at import from the same description as the `.proto` file.

Generated code would be tied to the version of the compiler that wrote it; a description is not. The classes live in a
pool of their own, so that nobody who compiles the `.proto` file himself gets in their way.
"""

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvwatch.derive.proto import FILE, ONEOF, PACKAGE, ProtoField, ProtoFile, ProtoMessage
from kvwatch.stream.contract import SCHEMA

_KINDS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "bool": FieldDescriptorProto.TYPE_BOOL,
}


def file_descriptor(file: ProtoFile) -> Any:
    """Return the `FileDescriptorProto` that a compiler would make of the `.proto` file."""
    made = FileDescriptorProto(name=FILE, package=PACKAGE, syntax="proto3")
    for message in file.messages:
        _add_message(made.message_type.add(name=message.name), message)
    service = made.service.add(name=file.service.name)
    for method in file.service.methods:
        service.method.add(
            name=method.name,
            input_type=f".{PACKAGE}.{method.request}",
            output_type=f".{PACKAGE}.{method.reply}",
            server_streaming=True,
        )
    return made


def _add_message(made: DescriptorProto, message: ProtoMessage) -> None:
    if any(field.is_choice for field in message.fields):
        made.oneof_decl.add(name=ONEOF)
    for field in message.fields:
        if field.key:
            _add_map(made, message, field)
            continue
        label = (
            FieldDescriptorProto.LABEL_REPEATED if field.label == "repeated" else FieldDescriptorProto.LABEL_OPTIONAL
        )
        added = made.field.add(name=field.name, number=field.number, label=label, **_kind(field.type))
        if field.is_choice:
            added.oneof_index = 0
        elif field.label == "optional":
            # What protobuf calls a synthetic oneof: the way in which proto3 remembers whether a scalar was set.
            added.proto3_optional, added.oneof_index = True, len(made.oneof_decl)
            made.oneof_decl.add(name=f"_{field.name}")


def _add_map(made: DescriptorProto, message: ProtoMessage, field: ProtoField) -> None:
    name = "".join(word.capitalize() for word in field.name.split("_")) + "Entry"
    entry = made.nested_type.add(name=name)
    entry.options.map_entry = True
    optional = FieldDescriptorProto.LABEL_OPTIONAL
    entry.field.add(name="key", number=1, label=optional, **_kind(field.key))
    entry.field.add(name="value", number=2, label=optional, **_kind(field.type))
    made.field.add(
        name=field.name,
        number=field.number,
        label=FieldDescriptorProto.LABEL_REPEATED,
        type=FieldDescriptorProto.TYPE_MESSAGE,
        type_name=f".{PACKAGE}.{message.name}.{name}",
    )


def _kind(name: str) -> dict[str, Any]:
    if name in _KINDS:
        return {"type": _KINDS[name]}
    return {"type": FieldDescriptorProto.TYPE_MESSAGE, "type_name": f".{PACKAGE}.{name}"}


POOL = DescriptorPool()
POOL.AddSerializedFile(file_descriptor(SCHEMA).SerializeToString())


def message_class(name: str) -> type[Message]:
    """Return the class of the message with this name."""
    found: type[Message] = GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    return found
