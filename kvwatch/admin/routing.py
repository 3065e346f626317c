"""Finds the operation of a request by the bytes of its path. What is not listed is not there.

Fixed parts must be written exactly as they are listed: no percent-encoding, no dots, no doubled slashes, no slash at
the end. Parameters are decoded once, strictly, after the path was divided: names of requests and adapters may hold
slashes, and an encoded one never divides.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from kvwatch.admin.operation import Operation

MAX_PARAMETER_LENGTH = 512
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Match:
    """The operations of a path by method, and what its parameters are."""

    operations: Mapping[str, Operation]
    parameters: Mapping[str, str]

    @property
    def methods(self) -> list[str]:
        """Methods that the path knows; HEAD with GET."""
        return sorted({*self.operations, *(["HEAD"] if "GET" in self.operations else [])})


class RouteTable:
    """All operations by path."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._paths: dict[tuple[str, ...], dict[str, Operation]] = {}
        for each in operations:
            methods = self._paths.setdefault(each.segments, {})
            assert each.method not in methods, f"{each.method} {each.path} is declared twice"
            methods[each.method] = each

    def find(self, raw_path: bytes) -> Match | None:
        """Return what is listed under a path; none if nothing is."""
        if not raw_path.startswith(b"/"):
            return None
        parts = raw_path[1:].split(b"/")
        for segments, operations in self._paths.items():  # fixed parts are declared before parameters
            parameters = _match(segments, parts)
            if parameters is not None:
                return Match(operations, parameters)
        return None


def _match(segments: Sequence[str], parts: Sequence[bytes]) -> dict[str, str] | None:
    if len(segments) != len(parts):
        return None
    parameters: dict[str, str] = {}
    for segment, part in zip(segments, parts, strict=True):
        if not segment.startswith("{"):
            if part != segment.encode():
                return None
            continue
        value = _decode(part)
        if value is None:
            return None
        parameters[segment[1:-1]] = value
    return parameters


def _decode(part: bytes) -> str | None:
    if not part or len(part) > MAX_PARAMETER_LENGTH or _BAD_ESCAPE.search(part):
        return None
    try:
        value = unquote_to_bytes(part).decode("utf-8")
    except UnicodeDecodeError:
        return None
    return value if value.isprintable() and value not in {".", ".."} else None
