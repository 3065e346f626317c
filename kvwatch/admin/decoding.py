"""Turns parameters and bodies into the types of an operation; what is wrong with them is said with the remedy.

A name that is not known is refused with the nearest one that is. Knows no operation by name.
"""

import difflib
import re
from typing import Any

import msgspec
from msgspec import inspect
from starlette.requests import Request

from kvwatch.admin import problems
from kvwatch.admin.problems import Problem

MAX_QUERY_BYTES = 8 * 1024
MAX_WHOLE = 2.0**53
"""Whole numbers below this are exact as floats."""
MAX_SHOWN_NAME = 64
"""Letters of an unknown name that are said again."""
MAX_SHOWN_ERROR = 300
"""Letters of any other error, which may have a value in it."""
UNKNOWN_NOTE = "UNKNOWN_NOTE"
"""Attribute of a struct: what else may be the matter with a name that it does not know."""

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>[\w.]*)`)?", re.DOTALL)
_NO_CHOICE = re.compile(r"Invalid enum value .* - at `\$\.(?P<path>[\w.]+)`", re.DOTALL)


def decode_query(kind: type[msgspec.Struct], request: Request) -> Any:
    """Return the parameters of a request as `kind`.

    Raises:
        Problem: one is given twice, unknown, or not what it should be.
    """
    if len(request.scope["query_string"]) > MAX_QUERY_BYTES:
        raise Problem(problems.MALFORMED, f"the query has more than {MAX_QUERY_BYTES} bytes; ask for less")
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            shown = name[:MAX_SHOWN_NAME]
            raise Problem(problems.MALFORMED, f"the parameter {shown!r} is given twice; give it once")
        given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(problems.INVALID, _what_is_wrong(error, kind, "parameter")) from error


def decode_body(content: bytes, kind: Any) -> Any:
    """Return a JSON body as `kind`.

    Raises:
        Problem: it is no JSON, or not what it should be.
    """
    try:
        return msgspec.convert(_whole(msgspec.json.decode(content)), kind)
    except msgspec.ValidationError as error:
        raise Problem(problems.INVALID, _what_is_wrong(error, kind, "field")) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(problems.MALFORMED, f"the body is no JSON: {error}; send a JSON object") from error
    except RecursionError as error:
        raise Problem(problems.MALFORMED, "the body is nested too deeply; send a flat JSON object") from error


def _whole(value: Any) -> Any:
    """Return a decoded value with its whole numbers as such: for JSON 1.0 is the number 1, wherever one is allowed."""
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def _what_is_wrong(error: msgspec.ValidationError, kind: Any, what: str) -> str:
    unknown = _UNKNOWN.fullmatch(str(error))
    if unknown is None:
        where = "a parameter" if what == "parameter" else "the body"
        wrong = _NO_CHOICE.fullmatch(str(error))
        choices = _choices(_type_at(kind, wrong["path"].split("."))) if wrong is not None else ()
        remedy = f"give one of {', '.join(map(str, choices))}" if choices else "see /openapi.json"
        return f"{where} is wrong: {str(error)[:MAX_SHOWN_ERROR]}; {remedy}"
    path = [name for name in (unknown["path"] or "").split(".") if name]
    struct, name = _type_at(kind, path), unknown["name"][:MAX_SHOWN_NAME]
    assert isinstance(struct, inspect.StructType)
    known = [each.encode_name for each in struct.fields]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return f"{' of '.join((what, *path))} {name!r} is unknown{getattr(struct.cls, UNKNOWN_NOTE, '')}; {remedy}"


def _type_at(kind: Any, path: list[str]) -> inspect.Type:
    """Return what is expected at a path of a type."""
    found = _plain(inspect.type_info(kind))
    for name in path:
        assert isinstance(found, inspect.StructType)
        found = _plain(next(each.type for each in found.fields if each.encode_name == name))
    return found


def _plain(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def _choices(kind: inspect.Type) -> tuple[object, ...]:
    """Return the values that a type allows, if it lists them."""
    kinds = [_plain(each) for each in kind.types] if isinstance(kind, inspect.UnionType) else [kind]
    return tuple(value for each in kinds if isinstance(each, inspect.LiteralType) for value in each.values)
