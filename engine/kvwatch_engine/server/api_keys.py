"""The file of API keys: who may use the API, on whose behalf, and whose blocks they share.

    [keys.laptop]
    key = "..."               # at least 16 characters; or sha256 = "..." of the key, in hexadecimal
    tenant = "blue"           # the key's own name by default
    expires = 2027-01-01      # never by default
    admin = true              # may load and unload LoRA adapters; false by default

    [tenants.blue]
    salt = "..."              # tenants of equal salt share prefix blocks; by default each tenant has its own

Knows nothing of HTTP.
"""

import errno
import hashlib
import hmac
import re
import stat
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from kvwatch.errors import ConfigError
from kvwatch_engine.contracts.tenant import tenant_salt

SETTING: Final = "--api-key-file"
MAX_FILE_BYTES: Final = 1 << 20
MAX_KEYS: Final = 1000
"""Every request is compared with all of them."""
MIN_KEY_CHARS: Final = 16
MAX_KEY_CHARS: Final = 256
MAX_NAME_CHARS: Final = 128
MAX_SALT_CHARS: Final = 256
_KEY = re.compile(r"[!-~]+")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a key that is known."""

    key_name: str
    tenant: str
    tenant_salt: str
    """Part of the block hashes of all requests of this tenant; empty for none."""
    is_admin: bool = False
    """Whether it may change what is served."""


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key in the file."""

    key: str | None = None
    sha256: str | None = None
    tenant: str | None = None
    expires: object = None
    """A TOML date or time; msgspec knows no type that is either."""
    admin: bool = False


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant in the file."""

    salt: str | None = None


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    keys: dict[str, KeyEntry] = {}
    tenants: dict[str, TenantEntry] = {}


class _Known(NamedTuple):
    digest: bytes
    caller: Caller
    expires: float | None
    """Unix time."""


class ApiKeys:
    """The keys of a file, read again when it changes. One thread at a time, but for `salt_of`.

    A file that vanishes, or is wrong after a change, lets nobody in until it is right again: a key that was taken out
    of it must not live on.

    Raises:
        ConfigError: at first it cannot be read, is wrong, or holds no key.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, int, int] | None = None
        self._known: tuple[_Known, ...] = ()
        self._salts: Mapping[str, str] = {}
        try:
            self._stamp = self._stat()
            self._adopt(read_key_file(self._path))
        except OSError as error:
            raise ConfigError(
                f"{SETTING}: {path} cannot be read ({error.strerror}); give a readable TOML file"
            ) from error

    def caller(self, key: str) -> Caller | None:
        """Return who has this key; None for an unknown or expired one. Takes the same time whichever it is."""
        self._refresh()
        given = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found = [known for known in self._known if hmac.compare_digest(given, known.digest)]
        if len(found) != 1 or (found[0].expires is not None and time.time() >= found[0].expires):
            return None
        return found[0].caller

    def salt_of(self, tenant: str) -> str:
        """Return the salt of a tenant's blocks, as of the last request. Any thread."""
        return self._salts.get(tenant, tenant_salt(tenant))

    # ------------------------------------------------------------------ parts

    def _refresh(self) -> None:
        """Read the file if it is another one than last time."""
        stamp: tuple[int, int, int] | None = None
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._adopt(read_key_file(self._path))
            logger.info("API keys were read anew", keys=len(self._known))
        except (OSError, ConfigError) as error:
            if stamp != self._stamp or self._known:
                logger.error(  # noqa: TRY400 - the operator's file is wrong, not this code
                    "the file of API keys is of no use, nobody is let in", error=str(error)
                )
            self._known, self._salts = (), {}
        self._stamp = stamp

    def _stat(self) -> tuple[int, int, int]:
        found = self._path.stat()
        if not stat.S_ISREG(found.st_mode):  # to read a pipe could take for ever
            raise OSError(errno.EINVAL, "it is no regular file")
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _adopt(self, found: KeyFile) -> None:
        salts = {name: tenant_salt(name, entry.salt) for name, entry in found.tenants.items()}
        self._salts = salts
        self._known = tuple(_known(name, entry, salts) for name, entry in found.keys.items())


def read_key_file(path: Path) -> KeyFile:
    """Read and check a file.

    Raises:
        OSError: it cannot be read.
        ConfigError: something in it is wrong; the message names the entry and never shows a key.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{SETTING}: {path} is larger than {MAX_FILE_BYTES} bytes; it should hold keys only")
    try:
        found = msgspec.convert(tomllib.loads(content.decode()), KeyFile)
    except UnicodeDecodeError:
        raise ConfigError(f"{SETTING}: {path} is not UTF-8; write it as a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{SETTING}: {path} is not valid TOML ({error}); correct it") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SETTING}: {path} is wrong ({error}); known are [keys.NAME] and [tenants.NAME]") from None
    _check(path, found)
    return found


def _check(path: Path, found: KeyFile) -> None:
    if not found.keys:
        raise ConfigError(f"{SETTING}: {path} holds no key; write a table [keys.NAME] with key = ...")
    if len(found.keys) > MAX_KEYS:
        raise ConfigError(f"{SETTING}: {path} holds {len(found.keys)} keys, the limit is {MAX_KEYS}; take some out")
    for name, entry in found.keys.items():
        problem = _problem_of_key(entry) or _problem_of_name(name) or _problem_of_name(entry.tenant or name)
        if problem:
            raise ConfigError(f"{SETTING}: {path}: keys.{name[:MAX_NAME_CHARS]}: {problem}")
    for name, tenant in found.tenants.items():
        problem = _problem_of_name(name)
        if tenant.salt is not None and len(tenant.salt) > MAX_SALT_CHARS:
            problem = f"the salt has {len(tenant.salt)} characters, the limit is {MAX_SALT_CHARS}; shorten it"
        if problem:
            raise ConfigError(f"{SETTING}: {path}: tenants.{name[:MAX_NAME_CHARS]}: {problem}")
    digests: dict[bytes, str] = {}
    for name, entry in found.keys.items():
        other = digests.setdefault(_digest(entry), name)
        if other != name:
            raise ConfigError(f"{SETTING}: {path}: keys.{name} and keys.{other} are the same key; give each its own")


def _problem_of_name(name: str) -> str:
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        return f"a name must have 1 to {MAX_NAME_CHARS} printable characters; rename it"
    return ""


def _problem_of_key(entry: KeyEntry) -> str:
    """Return what is wrong with an entry; never shows the key."""
    if (entry.key is None) == (entry.sha256 is None):
        return "give either key or sha256"
    if entry.expires is not None and not isinstance(entry.expires, date):
        return "expires is no date; write it without quotes, such as 2027-01-01 or 2027-01-01T12:00:00Z"
    if entry.sha256 is not None:
        return "" if _DIGEST.fullmatch(entry.sha256) else "sha256 must be 64 hexadecimal digits"
    assert entry.key is not None, "one of the two is given"
    if not MIN_KEY_CHARS <= len(entry.key) <= MAX_KEY_CHARS:
        return (
            f"the key has {len(entry.key)} characters, it must have {MIN_KEY_CHARS} to {MAX_KEY_CHARS}; "
            "for instance: openssl rand -hex 32"
        )
    return "" if _KEY.fullmatch(entry.key) else "a key may hold printable ASCII characters without spaces only"


def _digest(entry: KeyEntry) -> bytes:
    if entry.sha256 is not None:
        return bytes.fromhex(entry.sha256)
    assert entry.key is not None, "checked before"
    return hashlib.sha256(entry.key.encode()).digest()


def _known(name: str, entry: KeyEntry, salts: Mapping[str, str]) -> _Known:
    tenant = entry.tenant or name
    salt = salts.get(tenant, tenant_salt(tenant))
    return _Known(_digest(entry), Caller(name, tenant, salt, entry.admin), _unix_time(entry.expires))


def _unix_time(moment: object) -> float | None:
    """Return when a key expires; a date is its first moment, and a time without a zone is UTC."""
    if moment is None:
        return None
    assert isinstance(moment, date), "checked before; a datetime is a date as well"
    if not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day, tzinfo=UTC)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
