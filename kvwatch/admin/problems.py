"""Errors of the admin API in the form of RFC 9457. Knows the kinds of problem, nothing of routes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

PROBLEM_TYPE = "application/problem+json"
URN = "urn:kvwatch:problem:"


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """One kind of problem: its name in `type`, its status and what it means in general."""

    name: str
    status: int
    title: str


MALFORMED = ProblemKind("malformed", 400, "The request cannot be understood.")
UNAUTHENTICATED = ProblemKind("unauthenticated", 401, "A valid token is needed.")
FORBIDDEN = ProblemKind("forbidden", 403, "The token does not allow this.")
FOREIGN_HOST = ProblemKind("foreign-host", 403, "The request does not address this server.")
FOREIGN_ORIGIN = ProblemKind("foreign-origin", 403, "Pages of other origins may not call this server.")
NOT_FOUND = ProblemKind("not-found", 404, "There is no such thing.")
METHOD_NOT_ALLOWED = ProblemKind("method-not-allowed", 405, "The path does not know this method.")
SLOW_BODY = ProblemKind("slow-body", 408, "The body did not come in time.")
CONFLICT = ProblemKind("conflict", 409, "It cannot be as asked; nothing was changed.")
SEVERAL_ENGINES = ProblemKind("several-engines", 409, "Several engines are watched; name one.")
STALE = ProblemKind("stale", 412, "What was read has changed since.")
TOO_LARGE = ProblemKind("too-large", 413, "The body is too large.")
NOT_JSON = ProblemKind("not-json", 415, "The body must be JSON.")
INVALID = ProblemKind("invalid", 422, "A value is not allowed.")
PRECONDITION_REQUIRED = ProblemKind("precondition-required", 428, "The change must say what it was decided on.")
TOO_MANY = ProblemKind("too-many", 429, "Too many requests.")
LONG_HEADERS = ProblemKind("long-headers", 431, "The headers are too long.")
DEFECT = ProblemKind("defect", 500, "kvwatch has a defect.")
UNSUPPORTED = ProblemKind("unsupported", 409, "This engine cannot do that.")
NO_AUDIT = ProblemKind("no-audit", 503, "The change could not be recorded; nothing was changed.")
FAILED = ProblemKind("failed", 409, "It was tried and did not work; nothing was changed.")
UNAVAILABLE = ProblemKind("unavailable", 503, "The engine does not answer.")


class ProblemBody(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    """What every error says."""

    kind: Annotated[str, Meta(description="Names the kind of problem; programs decide by it.")]
    title: Annotated[str, Meta(description="What such a problem means.")]
    status: Annotated[int, Meta(description="The HTTP status, again.")]
    detail: Annotated[str, Meta(description="What was wrong this time, what is allowed, and what to do.")]


class Problem(Exception):
    """Ends a request with an error.

    Args:
        kind: What kind of problem it is.
        detail: The value, the limit and the remedy.
        headers: Further headers of the answer.
    """

    def __init__(self, kind: ProblemKind, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """Return it as an answer."""
        body = ProblemBody(URN + self.kind.name, self.kind.title, self.kind.status, self.detail)
        headers = {"Cache-Control": "no-store", **self.headers}
        return Response(msgspec.json.encode(body), self.kind.status, headers, PROBLEM_TYPE)
