"""What is asked of a running Prometheus: queries, rules, targets. Knows nothing of dashboards.

Answers are checked and typed here; a refusal is a `PrometheusError` with Prometheus' own words.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import httpx
import msgspec

from kvwatch.errors import KVWatchError

Labels = dict[str, str]


class PrometheusError(KVWatchError):
    """Prometheus is not there, or refuses what it was asked."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series of an answer: its labels, and (Unix seconds, value) in the order of time; one point of an instant."""

    labels: Labels
    points: tuple[tuple[float, float], ...]


class RuleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What Prometheus says of one rule."""

    name: str
    type: Literal["recording", "alerting"]
    query: str
    health: Literal["ok", "err", "unknown"]
    last_error: str = msgspec.field(default="", name="lastError")
    state: Literal["inactive", "pending", "firing", ""] = ""


class _Group(msgspec.Struct, frozen=True):
    rules: list[RuleStatus]


class _Groups(msgspec.Struct, frozen=True):
    groups: list[_Group]


class _Vector(msgspec.Struct, frozen=True):
    metric: Labels
    value: tuple[float, str]


class _Line(msgspec.Struct, frozen=True):
    metric: Labels
    values: list[tuple[float, str]]


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    type: str = msgspec.field(name="resultType")
    result: msgspec.Raw


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


class PrometheusApi:
    """A client of one Prometheus. One thread at a time."""

    def __init__(self, url: str, timeout_seconds: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(base_url=f"{self.url}/api/v1", timeout=timeout_seconds, trust_env=False)

    def instant(self, query: str, time: float | None = None) -> list[Series]:
        """Return the series of a query at one moment (Unix seconds; now if none).

        Raises:
            PrometheusError: it is refused, or brings no vector.
        """
        result = self._result("query", {"query": query} | ({} if time is None else {"time": f"{time:.3f}"}), "vector")
        found = msgspec.json.decode(result, type=list[_Vector])
        return [Series(each.metric, ((each.value[0], float(each.value[1])),)) for each in found]

    def matrix(self, selector: str) -> list[Series]:
        """Return the samples themselves of a range selector, such as `up[5m]`, until now.

        Raises:
            PrometheusError: it is refused, or is none.
        """
        return _lines(self._result("query", {"query": selector}, "matrix"))

    def range(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """Return the series of a query from `start` to `end` (Unix seconds), a point every `step` seconds.

        Raises:
            PrometheusError: it is refused.
        """
        asked = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        return _lines(self._result("query_range", asked, "matrix"))

    def rules(self) -> list[RuleStatus]:
        """Return every rule and how it is."""
        groups = msgspec.json.decode(self._data("rules", {}), type=_Groups).groups
        return [rule for group in groups for rule in group.rules]

    def is_scraped(self, targets: Iterable[str]) -> bool:
        """Return whether all these targets (`host:port`) were reached by their last scrape."""
        up = {each.labels.get("instance", ""): each.points[0][1] for each in self.instant("up")}
        return all(up.get(target) == 1 for target in targets)

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()

    def _result(self, path: str, asked: Mapping[str, str], kind: str) -> msgspec.Raw:
        result = msgspec.json.decode(self._data(path, asked), type=_Result)
        if result.type != kind:
            raise PrometheusError(f"{asked['query']} brings a {result.type}, wanted a {kind}")
        return result.result

    def _data(self, path: str, asked: Mapping[str, str]) -> msgspec.Raw:
        try:
            response = self._client.post(path, data=asked) if asked else self._client.get(path)
            answer = msgspec.json.decode(response.content, type=_Answer)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise PrometheusError(f"no answer from the Prometheus at {self.url}: {error}") from error
        if answer.status != "success":
            raise PrometheusError(f"Prometheus refuses {asked.get('query', path)}: {answer.error}")
        return answer.data


def _lines(result: msgspec.Raw) -> list[Series]:
    found = msgspec.json.decode(result, type=list[_Line])
    return [Series(each.metric, tuple((at, float(value)) for at, value in each.values)) for each in found]
