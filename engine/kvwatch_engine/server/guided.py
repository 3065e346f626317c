"""What a request says that its text must be: from its fields to one grammar, and what does not go together with it."""

from collections.abc import Iterator, Sequence

import msgspec

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance import Grammar, GuidanceLimits
from kvwatch_engine.guidance.grammar import INVALID_GRAMMAR, check_schema
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.protocol.guided import ResponseFormat, StructuredOutputs
from kvwatch_engine.server.protocol.request import GenerationFields

_ANY_OBJECT = {"type": "object"}
_NOT_SUPPORTED = (
    "disable_additional_properties",
    "disable_any_whitespace",
    "structural_tag",
    "whitespace_pattern",
)


def requested_grammar(
    request: GenerationFields, limits: GuidanceLimits, formats: Sequence[Grammar] = ()
) -> Grammar | None:
    """Return what the text of a request must be; none if it is free.

    Args:
        request: the decoded body.
        limits: how large grammars may be.
        formats: what fields say of it that are not among those that all APIs have.

    Raises:
        RequestInvalid: a field is wrong or too large, two contradict each other, or another one cannot be kept beside.
    """
    found = [*formats, *_grammars(request, limits)]
    if not found:
        return None
    if len(found) > 1:
        raise RequestInvalid(
            f"{found[0].param} and {found[1].param} both say what the text must be; send one of them",
            param=found[1].param,
        )
    [grammar] = found
    grammar.check_size(limits)
    refuse_beside(request, grammar)
    return grammar


def _grammars(request: GenerationFields, limits: GuidanceLimits) -> Iterator[Grammar]:
    if request.response_format is not None:
        name = "response_format"
        yield from format_grammars(request.response_format, limits, name, f"{name}.json_schema.schema")
    if request.guided_json is not None:
        yield _schema(request.guided_json, "guided_json", limits)
    if request.guided_regex is not None:
        yield Grammar("regex", request.guided_regex, "guided_regex")
    if request.guided_choice is not None:
        yield _choice(request.guided_choice, "guided_choice", limits)
    if request.guided_grammar is not None:
        yield Grammar("grammar", request.guided_grammar, "guided_grammar")
    if request.structured_outputs is not None:
        yield from _of_structured_outputs(request.structured_outputs, limits)


def format_grammars(wanted: ResponseFormat, limits: GuidanceLimits, param: str, schema_param: str) -> Iterator[Grammar]:
    """Give what a format says that the text must be; nothing if it is free.

    Args:
        wanted: the format.
        limits: how large schemas may be.
        param: where it stands in the request.
        schema_param: where its schema does.

    Raises:
        RequestInvalid: it is of an unknown type, or its schema is missing or too large.
    """
    match wanted.type:
        case "text":
            return
        case "json_object":
            yield _schema(_ANY_OBJECT if wanted.schema is None else wanted.schema, param, limits)
        case "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema is None:
                raise RequestInvalid(f"{schema_param} is missing", param=schema_param)
            yield _schema(wanted.json_schema.schema, schema_param, limits)
        case other:
            raise RequestInvalid(
                f"{param}.type is {shorten(other)!r}; supported are text, json_object and json_schema",
                param=f"{param}.type",
                code="unsupported",
            )


def _of_structured_outputs(wanted: StructuredOutputs, limits: GuidanceLimits) -> Iterator[Grammar]:
    name = "structured_outputs"
    for field in _NOT_SUPPORTED:
        if getattr(wanted, field) not in (None, False):
            raise RequestInvalid(
                f"{name}.{field} is not supported by this server; remove it",
                param=f"{name}.{field}",
                code="unsupported",
            )
    if wanted.json is not None:
        yield _schema(wanted.json, f"{name}.json", limits)
    if wanted.json_object:
        yield _schema(_ANY_OBJECT, f"{name}.json_object", limits)
    if wanted.regex is not None:
        yield Grammar("regex", wanted.regex, f"{name}.regex")
    if wanted.choice is not None:
        yield _choice(wanted.choice, f"{name}.choice", limits)
    if wanted.grammar is not None:
        yield Grammar("grammar", wanted.grammar, f"{name}.grammar")


def schema_grammar(schema: object, param: str, limits: GuidanceLimits) -> Grammar:
    """Return the grammar of a JSON Schema that was decoded already.

    Raises:
        RequestInvalid: it is too deep or too large.
    """
    check_schema(schema, param, limits)
    return Grammar("json_schema", msgspec.json.encode(schema).decode(), param)


def _schema(schema: object, param: str, limits: GuidanceLimits) -> Grammar:
    if isinstance(schema, str):
        Grammar("json_schema", schema, param).check_size(limits)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestInvalid(f"{param} is not JSON: {error}", param=param, code=INVALID_GRAMMAR) from error
    if not isinstance(schema, dict):
        raise RequestInvalid(f"{param} is no JSON Schema; send an object", param=param, code=INVALID_GRAMMAR)
    return schema_grammar(schema, param, limits)


def _choice(choices: list[str], param: str, limits: GuidanceLimits) -> Grammar:
    if not choices:
        raise RequestInvalid(f"{param} is empty; send at least one text", param=param, code=INVALID_GRAMMAR)
    if len(choices) > limits.max_choices:
        raise RequestInvalid(
            f"{param} has {len(choices)} texts, the limit is {limits.max_choices}", param=param, code=INVALID_GRAMMAR
        )
    return Grammar("choice", msgspec.json.encode(choices).decode(), param)


def refuse_beside(request: GenerationFields, grammar: Grammar) -> None:
    """Refuse what would have to break the grammar, or be broken by it.

    Raises:
        RequestInvalid: there is such a field.
    """
    if request.use_beam_search:
        reason = "a beam search cannot keep to a grammar"
        name = "use_beam_search"
    elif request.ignore_eos:
        reason, name = "a text that keeps to a grammar ends with it", "ignore_eos"
    elif request.min_tokens:
        reason, name = "a text that keeps to a grammar may have to end earlier", "min_tokens"
    else:
        return
    raise RequestInvalid(f"{name} does not go together with {grammar.param}: {reason}; remove one", param=name)
