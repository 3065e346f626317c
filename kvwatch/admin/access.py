"""Who may ask: Host and Origin, tokens, roles. Everything that is not allowed is refused. Knows no route by name.

On loopback reading is open, since whoever is on this machine could read the metrics as well; a change needs a token
even there, since all containers of a pod share its loopback. A token that is sent must be valid,
whatever it is sent for.
"""

import functools
import ipaddress
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

import structlog
from starlette.requests import Request

from kvwatch.admin import problems
from kvwatch.admin.problems import Problem
from kvwatch.admin.rate import RateLimit
from kvwatch.admin.settings import HOSTS_SETTING, AdminOptions
from kvwatch.admin.tokens import TOKEN_SETTING, Role, TokenFile
from kvwatch.telemetry.clock import Clock

Refusal = Literal["missing", "unknown", "expired", "role", "host", "origin"]
REFUSALS: tuple[Refusal, ...] = ("missing", "unknown", "expired", "role", "host", "origin")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ANONYMOUS = "anonymous"
ON_BEHALF_OF = "kvwatch.on_behalf_of"
"""Key of the scope of a request: for whom a sidecar asks."""
NEEDS_TOKEN = "kvwatch.needs_token"  # noqa: S105 - a key
"""Key of the scope of a request: whether it needs a token whatever it is for, and wherever it comes from."""
LOG_NS = 10_000_000_000
"""At most one refusal is logged in this time, in ns; all are counted."""

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="kvwatch"'}

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    name: str
    """Name of the token, or `anonymous`."""
    address: str
    roles: frozenset[Role]
    is_still_allowed: Callable[[], bool] = lambda: True
    """Whether the token lets its holder in yet, for whoever is answered for long. The listener's loop."""

    def may(self, role: Role) -> bool:
        """Whether the caller has a role."""
        return role in self.roles


class AccessGuard:
    """Decides who may do what. The listener's loop only, except `num_refused`.

    Args:
        options: What is demanded.
        tokens: Who is known; none if nobody is.
        is_loopback: Whether only this machine can reach the listener.
        clock: Tells the time.
    """

    def __init__(self, options: AdminOptions, tokens: TokenFile | None, clock: Clock, *, is_loopback: bool) -> None:
        self._hosts = options.hosts | {"localhost"}
        self._tokens = tokens
        self._is_loopback = is_loopback
        self._clock = clock
        self._failures = RateLimit(options.failures_per_minute, options.failures_at_once, clock)
        self._changes = RateLimit(options.changes_per_minute, options.changes_at_once, clock)
        self._logged_ns: int | None = None
        self.num_refused: Counter[Refusal] = Counter()
        """Refused requests by why."""

    def check_addressing(self, request: Request) -> None:
        """Refuse what a page of another origin, or a name that only points here, makes a browser send.

        Raises:
            Problem: it is such a request.
        """
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self._is_known_host(hosts[0]):
            detail = (
                f"the header Host must name this server: localhost, an address, or a name given with {HOSTS_SETTING}"
            )
            self._refuse(request, "host", Problem(problems.FOREIGN_HOST, detail))
        origins = request.headers.getlist("origin")
        site = request.headers.get("sec-fetch-site", "none")
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins) or site not in {
            "none",
            "same-origin",
        }:
            detail = "a page of another origin sent this; only programs and pages of this server may call it"
            self._refuse(request, "origin", Problem(problems.FOREIGN_ORIGIN, detail))

    def identify(self, request: Request) -> Caller:
        """Return who asks.

        Raises:
            Problem: the token that was sent lets nobody in, or one is needed and none was sent.
        """
        sent = request.headers.getlist("authorization")
        address = request.client.host if request.client else ""
        if not sent:
            is_open = self._is_loopback and not request.scope.get(NEEDS_TOKEN, False)
            if is_open and request.method in SAFE_METHODS:
                return Caller(ANONYMOUS, address, frozenset({Role.READ}))
            self._refuse(request, "missing", Problem(problems.UNAUTHENTICATED, self._how_to_identify(), _CHALLENGE))
        scheme, _, token = sent[0].partition(" ")
        is_bearer = len(sent) == 1 and scheme.lower() == "bearer"
        found = self._tokens.find(token.strip()) if self._tokens is not None and is_bearer else None
        if found is None or self._tokens is None:
            detail = f"the token that was sent is not known here; {self._how_to_identify()}"
            self._refuse(request, "unknown", Problem(problems.UNAUTHENTICATED, detail, _CHALLENGE))
        if found.is_expired:
            detail = f"the token {found.token.name} has expired; ask for a new one"
            self._refuse(request, "expired", Problem(problems.UNAUTHENTICATED, detail, _CHALLENGE))
        asker = request.scope.get(ON_BEHALF_OF, "")
        return Caller(
            found.token.name,
            f"{address} for {asker}" if asker else address,
            found.token.roles,
            functools.partial(self._tokens.still_allows, found.token),
        )

    def check_role(self, request: Request, caller: Caller, role: Role) -> None:
        """Refuse a caller who lacks a role.

        Raises:
            Problem: the caller lacks it.
        """
        if caller.may(role):
            return
        if caller.name == ANONYMOUS:
            self._refuse(request, "missing", Problem(problems.UNAUTHENTICATED, self._how_to_identify(), _CHALLENGE))
        held = ", ".join(sorted(caller.roles))
        detail = f"this needs the role {role}, and the token {caller.name} has {held}; use a token with that role"
        self._refuse(request, "role", Problem(problems.FORBIDDEN, detail))

    def take_change(self, caller: Caller) -> None:
        """Count a change against the caller's rate.

        Raises:
            Problem: the caller has asked for too many.
        """
        wait = self._changes.take(caller.name)
        if wait:
            raise _too_many(f"{caller.name} has asked for too many changes", wait)

    # ------------------------------------------------------------ inside

    def _is_known_host(self, value: str) -> bool:
        name, is_address = _host_name(value)
        if not is_address:
            return name in self._hosts
        # Another name can be made to point here, an address cannot; but a loopback listener has loopback addresses.
        return not self._is_loopback or ipaddress.ip_address(name).is_loopback

    def _how_to_identify(self) -> str:
        if self._tokens is None:
            return f"this server knows no token: start it with {TOKEN_SETTING} FILE"
        return "send the header Authorization: Bearer TOKEN"

    def _refuse(self, request: Request, why: Refusal, problem: Problem) -> NoReturn:
        self.num_refused[why] += 1
        address = request.client.host if request.client else ""
        now = self._clock.monotonic_ns()
        if self._logged_ns is None or now - self._logged_ns >= LOG_NS:
            self._logged_ns = now
            logger.warning(
                "refused on the admin listener", reason=why, method=request.method, address=address,
                num_refused=self.num_refused.total(),
            )  # fmt: skip
        wait = self._failures.take(address)
        raise _too_many("too many requests from this address were refused", wait) if wait else problem


def _host_name(value: str) -> tuple[str, bool]:
    """Return the name in a Host header, in lower case and without its port, and whether it is an address."""
    host, has_port, port = value.lower().rpartition(":")
    if not has_port or "]" in port:
        host, port = value.lower(), ""
    if port and not (port.isascii() and port.isdigit()):
        return "", False
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return "", False
    try:
        return str(ipaddress.ip_address(host)), True
    except ValueError:
        return host, False


def _too_many(what: str, wait_seconds: float) -> Problem:
    seconds = math.ceil(wait_seconds)
    return Problem(problems.TOO_MANY, f"{what}; wait {seconds} s", {"Retry-After": str(seconds)})
