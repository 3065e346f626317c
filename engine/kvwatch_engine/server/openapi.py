"""`/openapi.json`: the OpenAPI 3.1 document of the routes that are served, derived from the types of their bodies.

Fields that are not implemented are not in it: they are refused by name where they ask for something.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvwatch_engine.server.access import OPEN_PATHS
from kvwatch_engine.server.operations import MAX_PARAMETER_CHARS, OPERATIONS, ApiOperation
from kvwatch_engine.server.protocol.reply import ErrorBody
from kvwatch_engine.server.protocol.responses import ResponseRequest
from kvwatch_engine.server.responses.fields import NEVER_TAKEN

PATH: Final = "/openapi.json"
_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_CONVERTOR: Final = re.compile(r"{(\w+):\w+}")
_REASONS: Final[dict[int, str]] = {
    400: "The request can never run as it is.",
    401: "No API key, an unknown or an expired one.",
    403: "The key, or the server, does not allow it.",
    404: "There is no such model or response.",
    405: "Another method is allowed.",
    408: "The body did not arrive in time.",
    409: "The name is in use, or there is no room.",
    413: "The body is too long.",
    415: "The body is declared as something else than JSON.",
    429: "The queue is full; `retry-after` says when to come back.",
    500: "A defect of the server.",
    503: "The server shuts down, or its step loop is stuck.",
    504: "It was not complete in time.",
}
_INTRODUCTION: Final = """\
Generates text on a paged KV cache, in the shapes of OpenAI's API. docs/api.md tells ranges and defaults. A parameter
may be null, which means its default; fields that are unknown are ignored, those that change the answer refused."""


def document_route(routes: Sequence[BaseRoute], *, needs_key: bool) -> Route:
    """Return the route of the document that describes these routes and itself.

    Args:
        routes: all others that are served.
        needs_key: whether API keys are asked for.
    """

    async def show(_request: Request) -> Response:
        return Response(document, media_type=_JSON)

    own = Route(PATH, show, methods=["GET"])
    document = msgspec.json.encode(make_document([*routes, own], needs_key=needs_key))
    return own


def make_document(routes: Iterable[BaseRoute], *, needs_key: bool) -> dict[str, Any]:
    """Return the document; see `document_route`."""
    served = list(_served(routes))
    types: dict[type[Struct], None] = {ErrorBody: None}
    for _, _, described in served:
        types |= dict.fromkeys(each for each in (described.body, described.answer, *described.events) if each)
    schemas, components = msgspec.json.schema_components(types, schema_hook=_anything, ref_template=_REF)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, described in served:
        is_open = not needs_key or path in OPEN_PATHS
        paths.setdefault(path, {})[method.lower()] = _operation(path, described, refs, is_open=is_open)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvwatch",
            "version": version("kvwatch"),
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": {name: _implemented(name, schema) for name, schema in components.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _served(routes: Iterable[BaseRoute]) -> Iterable[tuple[str, str, ApiOperation]]:
    for route in routes:
        assert isinstance(route, Route), "no application is mounted"
        path = _CONVERTOR.sub(r"{\1}", route.path)
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            yield method, path, OPERATIONS[method, path]


def _operation(
    path: str, described: ApiOperation, refs: Mapping[type[Struct], dict[str, Any]], *, is_open: bool
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": described.name,
        "summary": described.brief,
        "tags": [described.tag],
        "parameters": [*_path_parameters(path), *_query_parameters(described)],
        "responses": _responses(described, refs, is_open=is_open),
        "security": [] if is_open else [{"key": []}],
    }
    if described.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": refs[described.body]}}}
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1, "maxLength": MAX_PARAMETER_CHARS}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in re.findall(r"{(\w+)}", path)]


def _query_parameters(described: ApiOperation) -> list[dict[str, Any]]:
    return [
        {"name": each.name, "in": "query", "description": each.brief, "schema": each.schema} for each in described.query
    ]


def _responses(
    described: ApiOperation, refs: Mapping[type[Struct], dict[str, Any]], *, is_open: bool
) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if described.answer is not None:
        content: dict[str, Any] = {_JSON: {"schema": refs[described.answer]}}
        if described.events:
            content[_EVENTS] = {"schema": _event_schema(refs[each] for each in described.events)}
        brief = (described.answer.__doc__ or described.brief).strip().splitlines()[0]
        responses["200"] = {"description": brief, "content": content, "links": dict(map(_link, described.links))}
    elif described.text_type:
        responses["200"] = {"description": described.brief, "content": {described.text_type: {}}}
    errors = {*described.errors, 500} | (set() if is_open else {401})
    for status in sorted(errors):
        responses[str(status)] = {
            "description": _REASONS[status],
            "content": {_JSON: {"schema": refs[ErrorBody]}},
        }
    return responses


def _link(name: str) -> tuple[str, dict[str, Any]]:
    return name, {"operationId": name, "parameters": {"response_id": "$response.body#/id"}}


def _event_schema(kinds: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of one event of a stream; what its data holds is told, and is no JSON where the stream ends."""
    data = {"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": list(kinds)}}
    return {
        "type": "object",
        "description": "An event of the stream that is sent with `stream`.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _anything(_kind: type) -> dict[str, Any]:
    """Return the schema of what is not looked into."""
    return {"description": "Anything."}


def _implemented(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type without the fields that have no type, which are those that are not implemented."""
    told = {**schema, "description": str(schema.get("description", "")).partition("\n")[0]}
    refused = NEVER_TAKEN if kind == ResponseRequest.__name__ else frozenset[str]()
    if "properties" in schema:
        told["properties"] = {
            name: field
            for name, field in schema["properties"].items()
            if set(field) - {"default", "description"} and name not in refused
        }
    return told
