"""Settings: declared once, read from flags, environment, a TOML file and defaults, in that order of precedence.

    class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
        port: Annotated[int, setting("Port of the API.", minimum=0, maximum=65_535)] = 8000
        dtype: Annotated[Literal["auto", "float32"], setting("Type to compute in.")] = "auto"
        api_key: Annotated[str | None, setting("Key that clients must send.", secret=True)] = None

    add_flags(parser, ServeSettings)
    resolved = resolve(ServeSettings, parser.parse_args())

A setting called `max_model_len` is the flag `--max-model-len`, the variable `KVWATCH_MAX_MODEL_LEN` and the key
`max_model_len` (or `max-model-len`) of the file that `--config` or `KVWATCH_CONFIG` names. A flag for true and false is
`--name` and `--no-name`. A setting of type `tuple[str, ...]` may be given several times: its flag is repeated, its
variable holds values separated by blanks, its key in the file holds a list, or a table of NAME = "VALUE" or of
`[key.NAME]` with a `value` (or `url`) and options. Whoever owns settings declares them; this module knows none by name.
"""

import argparse
import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlencode

import msgspec

from kvwatch.errors import ConfigError, SchemaError

ENV_PREFIX = "KVWATCH_"
CONFIG_NAME = "config"
HIDDEN = "********"
"""Stands for the value of a secret."""

# A Kubernetes service called "kvwatch" or "kvwatch-..." puts such variables into every pod of its namespace.
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_SERVICE_PORT, _SERVICE_URL = re.compile(r"(\w+_)?PORT"), re.compile(r"(tcp|udp|sctp)://\S+")
_BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTE_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}
_NONE = {"", "none", "null"}

S = TypeVar("S", bound=msgspec.Struct)


class SettingSpec(msgspec.Struct, frozen=True):
    """What is known of a setting beside its name, type and default."""

    brief: str
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False


def setting(
    brief: str, *, minimum: float | None = None, maximum: float | None = None, secret: bool = False
) -> SettingSpec:
    """Declare a setting; `minimum` and `maximum` are inclusive. The value of a secret is never printed."""
    return SettingSpec(brief, minimum, maximum, secret)


class Setting(msgspec.Struct, frozen=True):
    """One setting as its class declares it."""

    name: str
    kind: type
    """`str`, `int`, `float` or `bool`."""
    choices: tuple[str, ...]
    """Possible values of a Literal; empty when any will do."""
    is_optional: bool
    default: Any
    spec: SettingSpec
    is_repeated: bool = False
    """Whether it is a tuple of texts."""

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    def shown(self, value: object) -> str:
        """Return `value` as text for people; a secret that is set stays hidden."""
        if value is None or value == ():
            return "none"
        if self.spec.secret:
            return HIDDEN
        if isinstance(value, tuple):
            return " ".join(value)
        return str(value).lower() if isinstance(value, bool) else str(value)


class Resolved(msgspec.Struct, Generic[S], frozen=True):
    """Settings in effect, and where each comes from."""

    settings: S
    sources: dict[str, str]
    """Setting name to `flag`, `environment VARIABLE`, `file PATH` or `default`."""
    path: str | None = None
    """The configuration file; none if there is none."""


def declared_settings(cls: type[msgspec.Struct]) -> list[Setting]:
    """Return the settings of a class in their order.

    Raises:
        SchemaError: a field lacks its declaration, its default, or has a type that no flag can express.
    """
    hints = get_type_hints(cls, include_extras=True)
    return [_declared(cls, field, hints[field.name]) for field in msgspec.structs.fields(cls)]


def add_flags(parser: argparse.ArgumentParser, cls: type[msgspec.Struct]) -> None:
    """Add a flag for each setting of `cls`, and `--config`. Values stay text until `resolve` reads them."""
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help=f"TOML file with settings ({ENV_PREFIX}CONFIG)"
    )
    for each in declared_settings(cls):
        text = f"{each.spec.brief} (default: {each.shown(each.default)})".replace("%", "%%")
        if each.is_repeated:
            parser.add_argument(each.flag, action="append", metavar="TEXT", default=argparse.SUPPRESS, help=text)
        elif each.kind is bool:
            parser.add_argument(each.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            metavar = "{" + ",".join(each.choices) + "}" if each.choices else each.kind.__name__.upper()
            parser.add_argument(each.flag, metavar=metavar, default=argparse.SUPPRESS, help=text)


def resolve(cls: type[S], flags: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Resolved[S]:
    """Read the settings of `cls` from everywhere.

    Args:
        cls: Class that declares them.
        flags: What a parser prepared by `add_flags` returned; what it holds beside the settings is ignored.
        environment: Environment variables; default: those of the process.

    Raises:
        ConfigError: a value is wrong or out of range, a key is unknown, or the file cannot be read. The message says
            where the value comes from, what is allowed, and what to do.
    """
    declared = {each.name: each for each in declared_settings(cls)}
    env = os.environ if environment is None else environment
    given = vars(flags)
    path = given.get(CONFIG_NAME) or env.get(ENV_PREFIX + CONFIG_NAME.upper())
    layers: list[tuple[str, dict[str, object]]] = []
    if path:
        layers.append(("file", _read_file(Path(path), declared)))
    layers.append(("environment", _read_environment(env, declared)))
    layers.append(("flag", {name: given[name] for name in declared if name in given}))
    values: dict[str, object] = {}
    sources = dict.fromkeys(declared, "default")
    for layer, found in layers:
        for name, raw in found.items():
            place = {"file": f"file {path}", "environment": f"environment {declared[name].variable}"}.get(layer, layer)
            shown = {"file": f"{name} in {path}", "environment": declared[name].variable}
            values[name] = _convert(declared[name], raw, shown.get(layer, declared[name].flag))
            sources[name] = place
    return Resolved(cls(**values), sources, str(path) if path else None)


def unknown_name(name: str, known: Iterable[str], what: str) -> ConfigError:
    """Return the error for an unknown name; it suggests the nearest known one."""
    candidates = sorted(known)
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(candidates)}"
    return ConfigError(f"{what} {name} is unknown; {remedy}")


# ---------------------------------------------------------------- declarations


def _declared(cls: type[msgspec.Struct], field: msgspec.structs.FieldInfo, hint: Any) -> Setting:
    where = f"setting {cls.__name__}.{field.name}"
    spec = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, SettingSpec)), None)
    if spec is None:
        raise SchemaError(f"{where} lacks its declaration; write Annotated[type, setting(...)]")
    if field.default is msgspec.NODEFAULT:
        raise SchemaError(f"{where} lacks a default; every setting has one")
    plain = hint.__origin__
    is_optional = False
    if get_origin(plain) in {Union, UnionType}:
        members = [member for member in get_args(plain) if member is not NoneType]
        is_optional = len(members) < len(get_args(plain))
        plain = members[0] if len(members) == 1 else None
    if plain == tuple[str, ...]:
        return Setting(field.name, str, (), is_optional, field.default, spec, is_repeated=True)
    choices: tuple[str, ...] = ()
    if get_origin(plain) is Literal:
        choices = get_args(plain)
        plain = str if all(isinstance(choice, str) for choice in choices) else None
    if plain not in {str, int, float, bool}:
        raise SchemaError(
            f"{where} must be str, int, float, bool, tuple[str, ...], a Literal of strings, or one of these or None"
        )
    return Setting(field.name, plain, choices, is_optional, field.default, spec)


# ---------------------------------------------------------------- sources


def _read_file(path: Path, declared: Mapping[str, Setting]) -> dict[str, object]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read ({error.strerror}); check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}; correct it") from error
    found: dict[str, object] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in declared:
            raise unknown_name(key, declared, f"configuration file {path}: key")
        if name in found:
            raise ConfigError(f"configuration file {path}: {name} is set twice, with - and with _; keep one of them")
        found[name] = value
    return found


def _read_environment(env: Mapping[str, str], declared: Mapping[str, Setting]) -> dict[str, object]:
    found: dict[str, object] = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX)
        if _SERVICE_PORT.fullmatch(name) and _SERVICE_URL.fullmatch(value):
            continue  # Kubernetes' too: never the number of a port
        if name.lower() in declared and name.isupper():
            found[name.lower()] = value
        elif name != CONFIG_NAME.upper() and not _SERVICE_LINK.fullmatch(name):
            known = [each.variable for each in declared.values()] + [ENV_PREFIX + CONFIG_NAME.upper()]
            raise unknown_name(variable, known, "environment variable")
    return found


# ---------------------------------------------------------------- values


def _convert(each: Setting, raw: object, where: str) -> object:
    """Return `raw` (text of a flag or variable, or a value of the file) in the setting's type, checked."""
    if each.is_repeated:
        return _texts(each, raw, where)
    if raw is None or (each.is_optional and isinstance(raw, str) and raw.strip().lower() in _NONE):
        return None
    value = _parse(each, raw) if isinstance(raw, str) else _coerce(each, raw)
    if value is None:
        raise ConfigError(f"{where}: {_quoted(each, raw)} is not {_expected(each)}")
    if each.choices and value not in each.choices:
        raise ConfigError(f"{where}: {_quoted(each, raw)} is none of {', '.join(each.choices)}; choose one of them")
    _check_range(each, value, where)
    return value


def _texts(each: Setting, raw: object, where: str) -> tuple[str, ...]:
    """Return the values of a setting that may be given several times."""
    if isinstance(raw, str):
        values: list[object] = list(raw.split())
    elif isinstance(raw, dict):
        values = [_entry(name, value) for name, value in raw.items()]
    else:
        values = list(raw) if isinstance(raw, list) else [None]
    texts = tuple(value for value in values if isinstance(value, str) and _is_sendable(value))
    if len(texts) != len(values):
        raise ConfigError(
            f"{where}: {_quoted(each, raw)} is no list of texts and no table; write a list of NAME=VALUE, or tables"
        )
    return texts


def _entry(name: str, value: object) -> str | None:
    """Return an entry of a table as NAME=VALUE; a table of its own becomes its `value` or `url` with a query."""
    if isinstance(value, str):
        return f"{name}={value}"
    if not isinstance(value, dict):
        return None
    options = {key.replace("-", "_"): option for key, option in value.items()}
    text = options.pop("value", options.pop("url", None))
    if not isinstance(text, str) or any(isinstance(option, dict | list | float) for option in options.values()):
        return None
    shown = {key: str(option).lower() if isinstance(option, bool) else str(option) for key, option in options.items()}
    return f"{name}={text}{'?' if shown else ''}{urlencode(shown)}"


def _parse(each: Setting, text: str) -> object | None:
    if each.kind is str:
        return text if _is_sendable(text) else None
    if each.kind is bool:
        lowered = text.strip().lower()
        return lowered in _TRUE if lowered in _TRUE | _FALSE else None
    try:
        number: int | float = each.kind(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _coerce(each: Setting, raw: object) -> object | None:
    if isinstance(raw, str) and not _is_sendable(raw):
        return None
    if type(raw) is each.kind:
        return raw if each.kind is not float or math.isfinite(raw) else None  # type: ignore[arg-type]
    return float(raw) if each.kind is float and type(raw) is int else None


def _is_sendable(text: str) -> bool:
    """Whether a text can be a path, a label and a header: no NUL, and nothing that is not UTF-8."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _check_range(each: Setting, value: object, where: str) -> None:
    low, high = each.spec.minimum, each.spec.maximum
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if (low is not None and value < low) or (high is not None and value > high):
        if low is not None and high is not None:
            allowed = f"between {low:g} and {high:g}"
        else:
            allowed = f"at least {low:g}" if low is not None else f"at most {high:g}"
        raise ConfigError(f"{where}: {_quoted(each, value)} is out of range; it must be {allowed}")


def _expected(each: Setting) -> str:
    words = {str: "text in UTF-8 without NUL", int: "an integer", float: "a finite number", bool: "true or false"}
    return words[each.kind] + (" or none" if each.is_optional else "")


def _quoted(each: Setting, raw: object) -> str:
    return HIDDEN if each.spec.secret else repr(raw)


def parse_bytes(text: str, setting: str) -> int:
    """Read a size such as `4GiB`, `512M` or `1073741824`; units are powers of 1024.

    Raises:
        ConfigError: it is no size, or 0.
    """
    match = _BYTE_SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _BYTE_UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ConfigError(f"{setting}: {text!r} is no size above 0; write for instance 4GiB or 512MiB")
    return size


def shown_settings(settings: msgspec.Struct) -> dict[str, str]:
    """Return settings as text; secrets are hidden."""
    return {each.name: each.shown(getattr(settings, each.name)) for each in declared_settings(type(settings))}
