"""`kvwatch.v1.Control`: the admin API over gRPC, both directions. Knows no operation.

    rpc Call(CallRequest) returns (CallReply)

One call is one request of the admin API: the same paths, bodies, roles, audit and answers as over HTTP, which its
OpenAPI document describes. A missing or wrong token is the status `UNAUTHENTICATED`, a missing role
`PERMISSION_DENIED`, too many calls `RESOURCE_EXHAUSTED`; everything else that is refused is a reply with its HTTP
status and a problem in its body.
"""

from typing import Any

import msgspec
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "kvwatch.v1"
SERVICE = f"{PACKAGE}.Control"
METHOD = "Call"
METHOD_PATH = f"/{SERVICE}/{METHOD}"

_KINDS = {
    str: FieldDescriptorProto.TYPE_STRING,
    bytes: FieldDescriptorProto.TYPE_BYTES,
    int: FieldDescriptorProto.TYPE_INT64,
}


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Fields keep their order: their numbers follow from it."""

    method: str = "GET"
    path: str
    """As in HTTP, with its query: `/admin/v1/config?dry_run=true`."""
    if_match: str = ""
    """ETag of what a change was decided on."""
    body: bytes = b""
    """JSON; empty for none."""
    on_behalf_of: str = ""
    """Who asked whoever calls; for the audit."""


class CallReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    status: int
    """As in HTTP."""
    content_type: str = ""
    etag: str = ""
    body: bytes = b""


def _file() -> FileDescriptorProto:
    made = FileDescriptorProto(name="kvwatch/v1/control.proto", package=PACKAGE, syntax="proto3")
    for struct in (CallRequest, CallReply):
        message = made.message_type.add(name=struct.__name__)
        for number, field in enumerate(msgspec.structs.fields(struct), 1):
            message.field.add(
                name=field.name, number=number, type=_KINDS[field.type], label=FieldDescriptorProto.LABEL_OPTIONAL
            )
    made.service.add(name="Control").method.add(
        name=METHOD, input_type=f".{PACKAGE}.CallRequest", output_type=f".{PACKAGE}.CallReply"
    )
    return made


def proto_text() -> str:
    """Return the `.proto` file of the service."""
    lines = [
        "// The admin API over gRPC; docs/admin.md. Derived from kvwatch/wire/control.py: run `make derive`.",
        'syntax = "proto3";',
        f"package {PACKAGE};",
        "",
        "service Control {",
        f"  rpc {METHOD}(CallRequest) returns (CallReply);",
        "}",
    ]
    names = {str: "string", bytes: "bytes", int: "int64"}
    for struct in (CallRequest, CallReply):
        lines += ["", f"message {struct.__name__} {{"]
        lines += [
            f"  {names[field.type]} {field.name} = {number};"
            for number, field in enumerate(msgspec.structs.fields(struct), 1)
        ]
        lines.append("}")
    return "\n".join(lines) + "\n"


DESCRIPTOR: bytes = _file().SerializeToString()
"""The description of the service, for reflection."""

_POOL = DescriptorPool()
_POOL.AddSerializedFile(DESCRIPTOR)
_REQUEST: Any = GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.CallRequest"))
_REPLY: Any = GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.CallReply"))


def encode_request(request: CallRequest) -> bytes:
    """Return the bytes of a request."""
    encoded: bytes = _REQUEST(**msgspec.structs.asdict(request)).SerializeToString()
    return encoded


def decode_request(content: bytes) -> CallRequest:
    """Return the request that bytes say.

    Raises:
        ValueError: they say none.
    """
    return CallRequest(**_fields(_REQUEST, CallRequest, content))


def encode_reply(reply: CallReply) -> bytes:
    """Return the bytes of an answer."""
    encoded: bytes = _REPLY(**msgspec.structs.asdict(reply)).SerializeToString()
    return encoded


def decode_reply(content: bytes) -> CallReply:
    """Return the answer that bytes say.

    Raises:
        ValueError: they say none.
    """
    return CallReply(**_fields(_REPLY, CallReply, content))


def _fields(message_class: Any, struct: type[msgspec.Struct], content: bytes) -> dict[str, Any]:
    try:
        message = message_class.FromString(content)
    except DecodeError as error:
        raise ValueError(f"the bytes are no {struct.__name__} ({error})") from error
    return {field.name: getattr(message, field.name) for field in msgspec.structs.fields(struct)}
