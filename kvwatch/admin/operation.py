"""One operation of the API: its path, its types, who may use it, what it may answer. Handlers are written against this.

The list of operations is everything that the listener answers; the OpenAPI document is derived from it.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from starlette.responses import Response

from kvwatch.admin.access import Caller
from kvwatch.admin.problems import ProblemKind
from kvwatch.admin.tokens import Role

if TYPE_CHECKING:
    from kvwatch.admin.site import Site

PREFIX = "/admin/v1"
EVENT_STREAM = "text/event-stream"

Q = TypeVar("Q", bound=msgspec.Struct)
B = TypeVar("B")


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation without parameters."""


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, B]):
    """One request that is allowed and well formed."""

    site: "Site"
    caller: Caller
    path: Mapping[str, str]
    """Values of the path's parameters."""
    query: Q
    body: B
    """None for an operation without a body."""
    headers: Mapping[str, str]
    """The request's headers, by lower-case name."""
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler answers: a struct that is sent as JSON."""

    body: msgspec.Struct
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Call[Any, Any]], Awaitable[Answer | Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeader:
    """A request header that an operation reads."""

    name: str
    brief: str
    pattern: str = ""
    """Regular expression that its value matches; empty for any."""
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    """With parameters in braces, below `PREFIX` or at the root."""
    name: str
    """`operationId`: one word in camel case."""
    brief: str
    answer: type[msgspec.Struct] | None
    """Type of the JSON answer; none for an event stream."""
    handler: Handler
    tag: str
    role: Role = Role.READ
    query: type[msgspec.Struct] = NoQuery
    body: Any = None
    """Type of the JSON body; none for no body."""
    headers: tuple[RequestHeader, ...] = ()
    """Request headers that it reads."""
    problems: tuple[ProblemKind, ...] = ()
    """Kinds of problem beside those that every operation has."""
    links: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Links of its answer to other operations, as OpenAPI has them."""
    is_answered_here: bool = False
    """Whether a sidecar answers it by itself, also for an engine in another process."""
    is_described: bool = True
    """Whether the OpenAPI document lists it."""

    @property
    def is_change(self) -> bool:
        """Whether it changes anything."""
        return self.method not in {"GET", "HEAD"}

    @property
    def segments(self) -> tuple[str, ...]:
        """Parts of the path."""
        return tuple(self.path.strip("/").split("/"))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the path's parameters."""
        return tuple(re.findall(r"\{(\w+)\}", self.path))
