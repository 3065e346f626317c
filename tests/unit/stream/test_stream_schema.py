"""The `.proto` file: what is derived is what a compiler understands, and numbers stay."""

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from grpc_tools import protoc

import kvwatch
from kvwatch.derive.__main__ import artefacts
from kvwatch.derive.proto import FILE, ProtoFile, ProtoMessage, moved_numbers, proto_text
from kvwatch.errors import SchemaError
from kvwatch.stream.contract import SCHEMA
from kvwatch.stream.descriptors import file_descriptor
from kvwatch.telemetry.schema import REGISTRY

ROOT = Path(kvwatch.__file__).resolve().parents[1]
PROTO = ROOT / "kvwatch" / "stream" / "telemetry.proto"


def without_json_names(message: DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        without_json_names(nested)


def test_the_compiler_makes_of_the_file_what_the_server_speaks(tmp_path: Path) -> None:
    source, compiled = tmp_path / FILE, tmp_path / "out"
    source.parent.mkdir(parents=True)
    source.write_text(PROTO.read_text(encoding="utf-8"), encoding="utf-8")

    status = protoc.main(["protoc", f"-I{tmp_path}", f"--descriptor_set_out={compiled}", FILE])

    assert status == 0
    (by_compiler,) = FileDescriptorSet.FromString(compiled.read_bytes()).file
    for message in by_compiler.message_type:
        without_json_names(message)
    assert by_compiler == file_descriptor(SCHEMA)


def test_every_field_has_the_number_of_its_declaration() -> None:
    messages = {message.name: message for message in SCHEMA.messages}
    envelope = {field.type: field.number for field in messages["Envelope"].fields if field.is_choice}

    for spec in REGISTRY:
        numbers = {field.name: field.number for field in messages[spec.cls.__name__].fields}
        assert numbers == {name: field.number for name, field in spec.fields.items() if field.number < 100}
        assert envelope[spec.cls.__name__] == spec.number


def renumbered(name: str) -> ProtoFile:
    """The schema with the first two fields of a message the other way round."""
    messages = []
    for message in SCHEMA.messages:
        if message.name == name:
            first, second, *rest = message.fields
            swapped = [first.__class__(second.name, 1, second.type), second.__class__(first.name, 2, first.type)]
            message = ProtoMessage(message.name, message.brief, (*swapped, *rest))  # noqa: PLW2901
        messages.append(message)
    return ProtoFile(tuple(messages), SCHEMA.service)


def test_a_field_that_moved_is_noticed_and_a_new_one_is_not() -> None:
    text = proto_text(SCHEMA)

    assert moved_numbers(text, SCHEMA) == []
    assert moved_numbers("", SCHEMA) == []
    assert moved_numbers(text.replace("  string wait_reason = 4;\n", ""), SCHEMA) == []
    assert moved_numbers(text, renumbered("TierState")) == [
        "field num_blocks of TierState had number 2 and has 1",
        "field tier of TierState had number 1 and has 2",
    ]


def test_derive_does_not_write_over_moved_numbers() -> None:
    generate = artefacts()[str(PROTO.relative_to(ROOT))]
    text = PROTO.read_text(encoding="utf-8")
    moved = text.replace("  string tier = 1;\n  int64 num_blocks", "  string tier = 9;\n  int64 num_blocks")

    with pytest.raises(SchemaError, match="field tier of TierState had number 9 and has 1"):
        generate(moved)

    assert generate(text) == proto_text(SCHEMA)
