"""The OpenAPI 3.1 document, derived from the operations and the types of their handlers. Knows no operation by name."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvwatch import __version__
from kvwatch.admin import problems
from kvwatch.admin.app import JSON_TYPE, MAX_BODY_BYTES
from kvwatch.admin.engines import EngineQuery
from kvwatch.admin.operation import EVENT_STREAM, Operation, RequestHeader
from kvwatch.admin.problems import PROBLEM_TYPE, ProblemBody, ProblemKind
from kvwatch.admin.routing import MAX_PARAMETER_LENGTH
from kvwatch.admin.tokens import Role

REF = "#/components/schemas/{name}"

_EVERYWHERE = (
    problems.MALFORMED, problems.UNAUTHENTICATED, problems.FOREIGN_HOST, problems.FOREIGN_ORIGIN, problems.INVALID,
    problems.TOO_MANY, problems.LONG_HEADERS, problems.DEFECT,
)  # fmt: skip
_WITH_BODY = (problems.SLOW_BODY, problems.TOO_LARGE, problems.NOT_JSON)
_WITH_ENGINE = (
    problems.NOT_FOUND,
    problems.SEVERAL_ENGINES,
    problems.UNSUPPORTED,
    problems.CONFLICT,
    problems.UNAVAILABLE,
)

_ETAG = {"ETag": {"required": True, "schema": {"type": "string"}}}

_MESSAGE = {
    "type": "object",
    "description": "One message of the stream.",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}

_INTRODUCTION = f"""\
Looks into a running engine and changes it. Reading is open on loopback; every change needs a token with the role
`{Role.OPERATE}`, and so does everything off loopback. Errors are `{PROBLEM_TYPE}`. Every JSON answer has an `ETag`;
long lists come in pages, and `next_cursor` asks for the next. Bodies have at most {MAX_BODY_BYTES} bytes."""


def make_document(offered: Sequence[Operation], *, is_reading_open: bool) -> bytes:
    """Return the document as JSON.

    Args:
        offered: All operations that are served.
        is_reading_open: Whether reading needs no token here.
    """
    operations = [each for each in offered if each.is_described]
    types = _types(operations)
    _, components = msgspec.json.schema_components(types, ref_template=REF)
    for each in operations:
        components.pop(each.query.__name__, None)
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, is_reading_open=is_reading_open)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "kvwatch admin API",
            "version": __version__,
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": "read", "description": "Looks at things."},
            {"name": "change", "description": "Changes settings."},
            {"name": "act", "description": "Does things."},
        ],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _types(operations: Iterable[Operation]) -> list[Any]:
    found: dict[Any, None] = {ProblemBody: None}
    for each in operations:
        found[each.query] = None
        if each.answer is not None:
            found[each.answer] = None
        if each.body is not None:
            found[each.body] = None
    return list(found)


def _operation(each: Operation, *, is_reading_open: bool) -> dict[str, Any]:
    needs_token = each.is_change or each.role is not Role.READ or not is_reading_open
    described: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.brief,
        "tags": [each.tag],
        "parameters": _parameters(each),
        "responses": _responses(each),
        "security": [{"token": []}] if needs_token else [{}, {"token": []}],
    }
    if needs_token:
        described["description"] = f"Needs a token with the role `{each.role}`."
    if each.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": _schema(each.body)}}}
    return described


def _parameters(each: Operation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_PARAMETER_LENGTH},
        }
        for name in each.parameters
    ]
    _, components = msgspec.json.schema_components([each.query], ref_template=REF)
    for name, schema in components[each.query.__name__]["properties"].items():
        plain = dict(schema)
        description = plain.pop("description", "")
        found.append({"name": name, "in": "query", "description": description, "schema": plain})
    found += [
        {
            "name": header.name,
            "in": "header",
            "required": header.is_required,
            "description": header.brief,
            "schema": {"type": "string"} | ({"pattern": header.pattern} if header.pattern else {}),
        }
        for header in _headers(each)
    ]
    return found


def _headers(each: Operation) -> Iterable[RequestHeader]:
    yield from each.headers
    if each.answer is not None and not each.is_change:
        yield RequestHeader(name="If-None-Match", brief="ETag of what is known; it is not sent again unchanged.")


def _responses(each: Operation) -> dict[str, Any]:
    if each.answer is None:
        good: dict[str, Any] = {"description": "The stream.", "content": {EVENT_STREAM: {"schema": _MESSAGE}}}
    else:
        good = {
            "description": (each.answer.__doc__ or each.brief).strip().splitlines()[0],
            "content": {JSON_TYPE: {"schema": _schema(each.answer)}},
        }
        if not each.is_change:
            good["headers"] = _ETAG
    if each.links:
        good["links"] = dict(each.links)
    responses: dict[str, Any] = {"200": good}
    if each.answer is not None and not each.is_change:
        responses["304"] = {"description": "It has not changed.", "headers": _ETAG}
    by_status: dict[int, list[ProblemKind]] = {}
    for kind in _problems(each):
        if kind not in by_status.setdefault(kind.status, []):
            by_status[kind.status].append(kind)
    for status, kinds in sorted(by_status.items()):
        responses[str(status)] = {
            "description": " ".join(kind.title for kind in kinds),
            "content": {PROBLEM_TYPE: {"schema": _schema(ProblemBody)}},
        }
    return responses


def _problems(each: Operation) -> Iterable[ProblemKind]:
    yield from _EVERYWHERE
    yield problems.FORBIDDEN
    if issubclass(each.query, EngineQuery):
        yield from _WITH_ENGINE
    if each.parameters:
        yield problems.NOT_FOUND
    if each.body is not None:
        yield from _WITH_BODY
    if any(header.is_required for header in each.headers):
        yield problems.PRECONDITION_REQUIRED
    yield from each.problems


def _schema(kind: Any) -> Any:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=REF)
    return schema
