"""Where the admin API listens and what it demands; checked before anything is opened. Knows no request."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import BinaryIO

from kvwatch.admin.tokens import TOKEN_SETTING, TokenFile
from kvwatch.errors import ConfigError
from kvwatch.sockets import bind
from kvwatch.telemetry.clock import Clock, SystemClock

LISTEN_SETTING = "--admin-listen"
HOSTS_SETTING = "--admin-hosts"
AUDIT_SETTING = "--admin-audit-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminOptions:
    """Address, access and bounds of the admin listener."""

    listen: str = "127.0.0.1:9401"
    """`HOST:PORT`, port 0 for any free one."""
    token_file: str | None = None
    """Without one nothing can be changed, and only loopback is listened on."""
    hosts: frozenset[str] = frozenset()
    """Names, in lower case, under which it may be addressed beside `localhost` and addresses."""
    audit_file: str | None = None
    """File to which every change is appended, beside the log."""
    config_file: str | None = None
    """File that values may be declared in; none where that is not allowed."""
    changes_per_minute: float = 60.0
    """Changes that one token may ask for in the long run, refused ones included."""
    changes_at_once: int = 30
    failures_per_minute: float = 30.0
    """Refused callers that are answered one by one, for each address; beyond that they are told to wait."""
    failures_at_once: int = 20
    max_streams: int = 16
    """Event streams at a time."""


def is_loopback(host: str) -> bool:
    """Whether an address that a socket is bound to can be reached from this machine only."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def reserve(options: AdminOptions) -> socket.socket:
    """Bind the address on the caller's thread, so that a taken port is an error of the start.

    Raises:
        ConfigError: it is no address, or one that may not be offered without tokens.
        ExporterError: it cannot be bound.
    """
    bound = bind(options.listen, LISTEN_SETTING)
    if options.token_file is None and not is_loopback(bound.getsockname()[0]):
        bound.close()
        raise ConfigError(
            f"{LISTEN_SETTING}: {options.listen} can be reached from other machines and anybody could look into this "
            f"engine; give {TOKEN_SETTING} FILE, or listen on 127.0.0.1"
        )
    return bound


def check_options(options: AdminOptions, clock: Clock | None = None) -> None:
    """Find out now what would be refused at the start; nothing stays open.

    Raises:
        ConfigError: an option is wrong, or others could look in without a token.
        ExporterError: the address cannot be bound.
    """
    if options.token_file is not None:
        TokenFile(options.token_file, clock or SystemClock())
    if options.audit_file is not None:
        open_audit_file(options.audit_file).close()
    reserve(options).close()


def open_audit_file(path: str) -> BinaryIO:
    """Open the file that changes are appended to; only its owner may read a new one.

    Raises:
        ConfigError: it cannot be written to.
    """
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab", 0)
    except OSError as error:
        raise ConfigError(
            f"{AUDIT_SETTING}: {path} cannot be written to ({error.strerror}); give a file in a folder that is there"
        ) from error


def parse_hosts(text: str | None) -> frozenset[str]:
    """Read `A,B` as names of hosts.

    Raises:
        ConfigError: one of them cannot be a host's name.
    """
    names = [name.strip().lower() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if not all(letter.isascii() and (letter.isalnum() or letter in "-._") for letter in name):
            raise ConfigError(f"{HOSTS_SETTING}: {name!r} is no name of a host; write names without ports, as A,B")
    return frozenset(names)
