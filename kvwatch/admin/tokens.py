"""Named tokens with roles and an expiry, in a file that is read again when it changes.

Each line is `NAME ROLES TOKEN [EXPIRES]`, separated by blanks; blank lines and lines that begin with # are left out:

    # who        may               token                                     until
    grafana      read              9f0c...                                  2027-01-31
    alice        prompts,operate   sha256:6b86...                           2027-01-31T12:00:00Z

`read` is contained in every other role. `prompts` shows token ids, `operate` changes things; neither contains the
other. A token may be given as the SHA-256 of it, so that the file holds nothing that lets anybody in. Knows no HTTP.
"""

import errno
import hashlib
import hmac
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import structlog

from kvwatch.errors import ConfigError
from kvwatch.telemetry.clock import Clock

TOKEN_SETTING = "--admin-token-file"  # noqa: S105 - a flag
MIN_TOKEN_LENGTH, MAX_TOKEN_LENGTH = 16, 1024
MAX_FILE_BYTES = 1 << 20
DIGEST_PREFIX = "sha256:"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMEDY = "write NAME ROLES TOKEN [EXPIRES]"

T = TypeVar("T")

logger = structlog.get_logger(__name__)


class Role(StrEnum):
    """What a token allows."""

    READ = "read"
    PROMPTS = "prompts"
    OPERATE = "operate"


@dataclass(frozen=True, slots=True)
class Token:
    """One line of the file, without the token itself."""

    name: str
    roles: frozenset[Role]
    digest: bytes
    expires_ns: int | None
    """Unix time in ns from which on it lets nobody in."""


@dataclass(frozen=True, slots=True)
class Found:
    """The token that was sent, and whether its time is over."""

    token: Token
    is_expired: bool


class TokenFile:
    """The tokens of a file. One thread at a time.

    A file that vanishes, or of which a line cannot be understood, lets nobody in until it is mended.

    Raises:
        ConfigError: at first it cannot be read, holds no token, or has a line that is wrong.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = Path(path)
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = self._try(self._stat)
        self._tokens = self._try(self._read)

    def find(self, sent: str) -> Found | None:
        """Return the token that was sent; none if it is not in the file. Takes as long whichever it is."""
        self._refresh()
        return self._find(hashlib.sha256(sent.encode("utf-8", "surrogatepass")).digest())

    def still_allows(self, token: Token) -> bool:
        """Whether a token that was found is in the file yet, its time is not over, and it has lost no role."""
        self._refresh()
        found = self._find(token.digest)
        return found is not None and not found.is_expired and found.token.roles >= token.roles

    def _find(self, digest: bytes) -> Found | None:
        matches = [token for token in self._tokens if hmac.compare_digest(digest, token.digest)]
        if not matches:
            return None
        token = matches[0]
        return Found(token, token.expires_ns is not None and token.expires_ns <= self._clock.wall_ns())

    # ------------------------------------------------------------ the file

    def _try(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{TOKEN_SETTING}: {self._path} cannot be read ({error}); give a readable text file"
            ) from error

    def _refresh(self) -> None:
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._tokens, self._stamp = self._read(), stamp
                logger.info("the admin tokens were read again", tokens=[token.name for token in self._tokens])
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if self._stamp is not None:
                logger.warning("the admin tokens cannot be read, nobody is let in", error=str(error))
            self._tokens, self._stamp = (), None

    def _stat(self) -> tuple[int, int, int]:
        found = self._path.stat()
        if not stat.S_ISREG(found.st_mode):  # to read a pipe could take for ever
            raise OSError(errno.EINVAL, "it is no regular file")
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[Token, ...]:
        with self._path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{TOKEN_SETTING}: {self._path} has more than {MAX_FILE_BYTES} bytes; it is no token file"
            )
        lines = enumerate(content.decode("utf-8").splitlines(), 1)
        tokens = tuple(
            self._parse(number, line) for number, line in lines if line.strip() and not line.lstrip().startswith("#")
        )
        if not tokens:
            raise ConfigError(f"{TOKEN_SETTING}: {self._path} holds no token; {_REMEDY}")
        names = [token.name for token in tokens]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or len({token.digest for token in tokens}) < len(tokens):
            what = f"the name {twice}" if twice else "the same token"
            raise ConfigError(f"{TOKEN_SETTING}: {self._path} has {what} twice; the audit must tell who it was")
        return tokens

    def _parse(self, number: int, line: str) -> Token:
        words = line.split()
        where = f"{TOKEN_SETTING}: line {number} of {self._path}"  # never the line itself: it holds a token
        if len(words) not in {3, 4}:
            raise ConfigError(f"{where} has {len(words)} words; {_REMEDY}")
        name, roles, token = words[:3]
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: a name has up to 64 letters, digits and ._@-; choose another")
        unknown = set(roles.split(",")) - set(Role)
        if unknown:
            raise ConfigError(f"{where}: role {sorted(unknown)[0]!r} is unknown; known: {', '.join(Role)}")
        held = frozenset({Role.READ, *map(Role, roles.split(","))})
        return Token(name, held, _digest(token, where), _expiry(words[3], where) if len(words) > 3 else None)


def _digest(token: str, where: str) -> bytes:
    if token.startswith(DIGEST_PREFIX):
        digits = token.removeprefix(DIGEST_PREFIX)
        if not _DIGEST.fullmatch(digits):
            raise ConfigError(f"{where}: {DIGEST_PREFIX} must be followed by 64 hexadecimal digits in lower case")
        return bytes.fromhex(digits)
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH:
        raise ConfigError(
            f"{where}: the token has {len(token)} characters; it must have {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH}: "
            "make one with `openssl rand -hex 32`"
        )
    return hashlib.sha256(token.encode()).digest()


def _expiry(text: str, where: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {text!r} is no time; write for instance 2027-01-31T12:00:00Z") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1e9)
