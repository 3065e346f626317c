"""Fields that say what a text must be: OpenAI's `response_format`, vLLM's `guided_*` and `structured_outputs`."""

from msgspec import Struct


class JsonSchemaFormat(Struct):
    """`response_format.json_schema`. The schema is kept to whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: object = None
    """Not OpenAI's: some servers take a schema beside `json_object`."""


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """`structured_outputs`: exactly one of the first five. Another name would leave the text free, and is refused."""

    json: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    # Not implemented.
    disable_additional_properties: object = None
    disable_any_whitespace: object = None
    structural_tag: object = None
    whitespace_pattern: object = None
