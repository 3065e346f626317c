"""What a sidecar is told to watch: NAME=URL, with options in the URL's query.

    chat=vllm+http://127.0.0.1:8000?token_file=/run/secrets/vllm&kv_events=tcp://127.0.0.1:5557
    code=sglang+https://10.0.0.7:30000?ca_file=/etc/ssl/own.pem
    ours=grpc://10.0.0.8:9402?token_file=/run/secrets/kvwatch

Checked before anything is opened. The module that reads an engine is imported when the first engine of its kind is
made, so that ZeroMQ is loaded only by who needs it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import parse_qsl, urlsplit

from kvwatch.config import unknown_name
from kvwatch.errors import ConfigError
from kvwatch.sources.source import Source

SETTING = "--engine"
Kind = Literal["kvwatch", "vllm", "sglang"]
MODULES: dict[str, str] = {
    "kvwatch": "kvwatch.sources.remote",
    "vllm": "kvwatch.sources.vllm",
    "sglang": "kvwatch.sources.sglang",
}
"""For each kind of engine the module whose `make_source` makes its source."""

_SCHEMES: dict[str, tuple[Kind, str]] = {
    "grpc": ("kvwatch", "grpc"),
    "grpcs": ("kvwatch", "grpcs"),
    "vllm+http": ("vllm", "http"),
    "vllm+https": ("vllm", "https"),
    "sglang+http": ("sglang", "http"),
    "sglang+https": ("sglang", "https"),
}
"""Schemes of a URL: the kind of engine, and the scheme under which it is reached."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
MAX_ENGINES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine to watch. Fields from `token_file` on are options of the URL."""

    name: str
    kind: Kind
    url: str
    """`http(s)://HOST:PORT[/PATH]` or `grpc(s)://HOST:PORT`, without query."""
    token_file: str | None = None
    """File with the token or API key to send, on the first line that is no comment; read again at every connection."""
    admin_token_file: str | None = None
    """File with the token for the admin API of a kvwatch engine, likewise; none to leave it alone."""
    ca_file: str | None = None
    """PEM certificates to trust instead of the system's."""
    kv_events: str | None = None
    """Endpoint of rank 0's live KV events; none to ask the engine for it."""
    replay: str | None = None
    """Endpoint of rank 0's replays; none to ask the engine, `off` for no replays."""
    mode: Literal["auto", "bind", "connect"] = "auto"
    """Whether the sidecar binds the endpoint of live events, since the engine connects to it; auto: where the engine
    tells an address of this machine at which nobody listens."""
    topic: str = ""
    """Topic of KV events."""
    dp_ranks: int = 1
    """Data-parallel ranks of which endpoints are known by `kv_events`; those that the engine tells are found anyway."""
    token_ids: bool = False
    """Whether token ids, which are what users wrote, are kept."""
    max_blocks: int = 2_000_000
    """Most resident hashes that are remembered for each rank; details are given up before counts are."""

    def token(self) -> str | None:
        """Return the token to send, as its file says now; none if none is to be sent.

        Raises:
            ConfigError: the file cannot be read or holds none.
        """
        return None if self.token_file is None else read_token(self.token_file, f"{SETTING} {self.name}: token_file")

    def admin_token(self) -> str:
        """Return the token for the engine's admin API, as its file says now.

        Raises:
            ConfigError: there is no such file, or it holds none.
        """
        where = f"{SETTING} {self.name}: admin_token_file"
        if self.admin_token_file is None:
            raise ConfigError(f"{where} is not given; add ?admin_token_file=FILE to the URL")
        token = read_token(self.admin_token_file, where)
        if len(token.split()) > 1:
            raise ConfigError(
                f"{where}: a line of {self.admin_token_file} has several words, as in the engine's own file; give a "
                "file with the token alone"
            )
        return token

    def ca(self) -> bytes | None:
        """Return the certificates to trust, as their file says now; none for the system's.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.ca_file is None:
            return None
        return _read(self.ca_file, f"{SETTING} {self.name}: ca_file").encode()


_OPTIONS = {each.name: each for each in fields(EngineSpec) if each.name not in {"name", "kind", "url"}}


def parse_engines(texts: Sequence[str]) -> list[EngineSpec]:
    """Read and check NAME=URL of each engine; files that they name must be readable.

    Raises:
        ConfigError: one is malformed, none is given, or two have the same name.
    """
    if not texts:
        raise ConfigError(
            f"no engine to watch is given; add {SETTING} NAME=URL, for instance {SETTING} chat=vllm+http://127.0.0.1:8000"
        )
    if len(texts) > MAX_ENGINES:
        raise ConfigError(f"{len(texts)} engines are given with {SETTING}; one sidecar watches at most {MAX_ENGINES}")
    specs = [parse_engine(text) for text in texts]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{SETTING}: the name {name} is given twice; every engine needs its own")
    for spec in specs:
        spec.token()
        spec.ca()
        if spec.admin_token_file is not None:
            spec.admin_token()
    return specs


def parse_engine(text: str) -> EngineSpec:
    """Read NAME=URL.

    Raises:
        ConfigError: it is malformed; says what, and how it should look.
    """
    name, equals, url = text.partition("=")
    name = name.strip()
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{SETTING}: {_shown(text)} does not begin with a name; write NAME=URL, the name of up to 64 letters, "
            "digits, . _ and -, for instance chat=vllm+http://127.0.0.1:8000"
        )
    where = f"{SETTING} {name}"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{where}: {_shown(url)} is no URL ({error})") from error
    if parts.scheme not in _SCHEMES:
        raise unknown_name(f"{parts.scheme}://", [f"{scheme}://" for scheme in _SCHEMES], f"{where}: scheme")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{where}: the URL holds a user or a password; give a file instead, with ?token_file=FILE")
    kind, scheme = _SCHEMES[parts.scheme]
    if not parts.hostname or (kind == "kvwatch" and (port is None or parts.path not in {"", "/"})):
        raise ConfigError(
            f"{where}: {_shown(url)} lacks host and port, or has too much; write {parts.scheme}://HOST:PORT"
        )
    path = "" if kind == "kvwatch" else parts.path.rstrip("/")
    return EngineSpec(name=name, kind=kind, url=f"{scheme}://{parts.netloc}{path}", **_options(parts.query, where))


def make_source(spec: EngineSpec) -> Source:
    """Make the source of an engine; imports what reads its kind.

    Raises:
        ConfigError: an option cannot be used.
    """
    make: Callable[[EngineSpec], Source] = import_module(MODULES[spec.kind]).make_source
    return make(spec)


def read_token(path: str, where: str) -> str:
    """Return the first line of a file that is neither blank nor a comment.

    Raises:
        ConfigError: it cannot be read, or has no such line.
    """
    lines = [line.strip() for line in _read(path, where).splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"{where}: {path} holds no token; write one on a line of its own")
    return tokens[0]


def _options(query: str, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    hints = get_type_hints(EngineSpec)
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"{where}: {query!r} are no options; write ?option=value&option=value") from error
    for key, text in pairs:
        option = key.replace("-", "_")
        if option not in _OPTIONS:
            raise unknown_name(key, _OPTIONS, f"{where}: option")
        if option in found:
            raise ConfigError(f"{where}: option {key} is given twice; keep one")
        found[option] = _value(option, hints[option], text, where)
    return found


def _value(option: str, hint: Any, text: str, where: str) -> Any:
    choices = get_args(hint) if option == "mode" else ()
    if choices and text not in choices:
        raise ConfigError(f"{where}: {option} {text!r} is none of {', '.join(choices)}; choose one of them")
    if hint is bool:
        if text.lower() not in {"true", "false"}:
            raise ConfigError(f"{where}: {option} {text!r} is neither true nor false")
        return text.lower() == "true"
    if hint is int:
        if not (text.isascii() and text.isdigit()) or not 0 < int(text[:12]) < 10**9:
            raise ConfigError(f"{where}: {option} {text!r} is no number from 1 to 999999999")
        return int(text)
    if not text and option != "topic":
        raise ConfigError(f"{where}: {option} is empty; give a value or leave it out")
    return text


def _read(path: str, where: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path} cannot be read ({error}); give a readable text file") from error


def _shown(text: str) -> str:
    """Return what is safe to print of a malformed URL: it may hold a password."""
    return repr(re.sub(r"//[^/@]*@", "//...@", text))
