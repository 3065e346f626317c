"""A request on its way from the gateway to a replica, and what comes back. No Ray here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

_OF_THE_CONNECTION = frozenset(
    {
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "keep-alive",
        "upgrade",
        "te",
        "trailer",
        "accept-encoding",
    }
)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request as the engine gets it."""

    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: dict[str, str]

    @property
    def is_stream(self) -> bool:
        """Whether the client sees the answer while it is made."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


def end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are not the connection's own."""
    return {name.lower(): value for name, value in headers.items() if name.lower() not in _OF_THE_CONNECTION}


def error_body(message: str, code: str) -> bytes:
    """Return an error as OpenAI's clients read it."""
    error = {"message": message, "type": "service_unavailable", "param": None, "code": code}
    return json.dumps({"error": error}).encode()
