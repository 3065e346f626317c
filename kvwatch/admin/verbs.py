"""The verbs of `kvwatch admin`, derived from the operations: one for each, with a flag for each parameter.

getPool        pool                 pauseAdmission  pause-admission --reason TEXT --seconds N
listBlocks     blocks --state used  changeConfig    change-config KEY=VALUE ... --reason TEXT --dry-run
getRequest     request REQUEST      revertChange    revert-change ID --reason TEXT
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from msgspec import inspect

from kvwatch.admin.operation import Operation
from kvwatch.control import LIVE_SETTINGS, SettingValue
from kvwatch.errors import ConfigError

CHANGES = "changes"
"""The field of bodies that is written as KEY=VALUE ..."""

_TYPES: Mapping[type[inspect.Type], type] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.BoolType: bool,
    inspect.ListType: list,
}
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that a verb means."""

    method: str
    path: str
    """With its query."""
    body: dict[str, Any] | None
    needs_etag_of: str | None
    """Path whose ETag goes into `If-Match`; none if it needs none."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb."""

    operation: Operation

    @property
    def name(self) -> str:
        """The word on the command line."""
        plain = re.sub(r"^(get|list|stream)(?=[A-Z])", "", self.operation.name)
        return re.sub(r"(?<!^)(?=[A-Z])", "-", plain).lower()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add what the operation takes."""
        for name in self.operation.parameters:
            parser.add_argument(name, metavar=name.upper())
        for each in _fields(self.operation.query):
            _add_flag(parser, each, is_required=False)
        for each in _fields(self.operation.body):
            if each.encode_name == CHANGES:
                parser.add_argument(CHANGES, nargs="+", metavar="KEY=VALUE", help="settings and their new values")
            else:
                _add_flag(parser, each, is_required=each.required)
        for header in self.operation.headers:
            if not header.is_required:
                flag = "--" + header.name.lower()
                parser.add_argument(flag, dest=_dest(header.name), help=header.brief)

    def prepare(self, args: argparse.Namespace) -> Prepared:
        """Return the request.

        Raises:
            ConfigError: a value cannot be what it should be.
        """
        given = vars(args)
        path = self.operation.path
        for name in self.operation.parameters:
            path = path.replace("{" + name + "}", quote(given[name], safe=""))
        query = {
            each.encode_name: _query_text(given[each.encode_name])
            for each in _fields(self.operation.query)
            if given.get(each.encode_name) not in (None, False)
        }
        body = None
        if self.operation.body is not None:
            body = {
                each.encode_name: _value(each, given[each.encode_name])
                for each in _fields(self.operation.body)
                if given.get(each.encode_name) not in (None, False)
            }
        needs_etag = any(header.is_required for header in self.operation.headers)
        if not query:
            return Prepared(self.operation.method, path, body, path if needs_etag else None)
        which = {name: value for name, value in query.items() if name in {"engine", "dp_rank"}}
        etag_path = f"{path}?{urlencode(which)}"
        return Prepared(self.operation.method, f"{path}?{urlencode(query)}", body, etag_path if needs_etag else None)


def verbs(operations: Sequence[Operation]) -> Mapping[str, Verb]:
    """Return all verbs by name."""
    return {verb.name: verb for verb in map(Verb, operations)}


def _fields(struct: Any) -> Sequence[inspect.Field]:
    if struct is None:
        return ()
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType)
    return described.fields


def _add_flag(parser: argparse.ArgumentParser, each: inspect.Field, *, is_required: bool) -> None:
    flag = "--" + each.encode_name.replace("_", "-")
    kind, text = _plain(each.type)
    if isinstance(kind, inspect.BoolType):
        parser.add_argument(flag, dest=each.encode_name, action="store_true", help=text)
        return
    choices = [str(value) for value in kind.values] if isinstance(kind, inspect.LiteralType) else None
    parser.add_argument(
        flag, dest=each.encode_name, required=is_required, choices=choices, help=text,
        metavar=None if choices else each.encode_name.upper(),
    )  # fmt: skip


def _plain(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """Return a type without what surrounds it, and what is said of it."""
    text = ""
    while True:
        if isinstance(kind, inspect.Metadata):
            text = text or str((kind.extra_json_schema or {}).get("description", ""))
            kind = kind.type
        elif isinstance(kind, inspect.UnionType):
            kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
        else:
            return kind, text.replace("%", "%%")


def _value(each: inspect.Field, text: Any) -> Any:
    """Return the value of a body's field."""
    if each.encode_name == CHANGES:
        return dict(map(_setting, text))
    kind, _ = _plain(each.type)
    wanted: Any = _TYPES.get(type(kind), str)
    if wanted is list:
        text, wanted = text.split(","), list[int]
    try:
        return msgspec.convert(text, wanted, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--{each.encode_name.replace('_', '-')}: {text!r} cannot be understood ({error})") from error


def _setting(word: str) -> tuple[str, SettingValue]:
    """Return key and value of KEY=VALUE; the server says what it thinks of unknown ones."""
    key, has_value, text = word.partition("=")
    key = key.replace("-", "_")
    if not has_value:
        raise ConfigError(f"{word!r} is not KEY=VALUE; write for instance num_blocks=4000")
    known = LIVE_SETTINGS.get(key)  # type: ignore[call-overload]  # any text may be asked for
    if known is not None and known.type in {"text", "choice"}:
        return key, None if known.is_optional and text == "none" else text
    if text.lower() in _WORDS:
        return key, _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return key, kind(text)
        except ValueError:
            continue
    return key, text


def _query_text(value: object) -> str:
    return "true" if value is True else str(value)


def _dest(header: str) -> str:
    return header.lower().replace("-", "_")
