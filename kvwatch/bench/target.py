"""What is known of the server that is measured."""

from urllib.parse import urlsplit

import msgspec

from kvwatch.bench.signals import Kind
from kvwatch.errors import ConfigError

OFF = "off"
"""Stands for an address that is not to be used."""
ASSUMED_LIMIT_TOKENS = 2048
"""Longest sequence assumed of a server that tells no limit."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the user said of the target."""

    url: str
    """Root, as `root_of` gives it."""
    model: str | None = None
    endpoint: str = "completions"
    metrics_url: str | None = None
    """None: at the usual place; `off`: nowhere."""
    reset_url: str | None = None
    """None: at the usual place of its kind; `off`: nowhere."""
    ready_seconds: float = 0.0
    """How long to wait for a target that is not there yet."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One server, as it described itself before the run."""

    url: str
    """Its root, without `/v1` and without a slash at the end."""
    kind: Kind
    model: str
    """Served name that requests ask for."""
    models: tuple[str, ...]
    """All served names, LoRA adapters among them; the run's model first."""
    endpoint: str
    """`completions` or `chat`."""
    max_model_len: int | None = None
    token_capacity: int | None = None
    """Tokens that fit its pool; None where it does not say."""
    metrics_url: str | None = None
    """None when there is no page that says something known."""
    reset_url: str | None = None
    """Empties the prefix cache; None where the target does not offer that."""

    @property
    def has_limit(self) -> bool:
        """Whether it told how long a sequence may be."""
        return self.max_model_len is not None or self.token_capacity is not None

    @property
    def limit_tokens(self) -> int:
        """Longest sequence that can run: the smaller of the model's and the pool's limit."""
        known = [each for each in (self.max_model_len, self.token_capacity) if each is not None]
        return min(known, default=ASSUMED_LIMIT_TOKENS)


def root_of(url: str) -> str:
    """Return a server's root from what a user calls its address: with or without a scheme, `/v1`, a slash at the end.

    Raises:
        ConfigError: it is no http address.
    """
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(given)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        port_is_fine, parts = False, urlsplit("")
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_is_fine or parts.query or parts.fragment:
        raise ConfigError(f"--url: {url!r} is no address; write for instance http://127.0.0.1:8000")
    return given.rstrip("/").removesuffix("/v1").rstrip("/")
