"""The report: its schema (docs/bench.md), and how it is computed. Fields are added, never renamed or redefined."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from kvwatch.bench.assertions import AssertionResult
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.reservation import ReservationReport
from kvwatch.bench.saved import Comparison
from kvwatch.bench.server_side import ServerSide
from kvwatch.bench.statistics import (
    Quantiles,
    by_scenario,
    percentile,
    quantiles,
    stall_threshold_seconds,
    waiting_seconds,
    worst_wait_ratio,
)

SCHEMA_VERSION = 1
_SATURATED_LAG_SECONDS = 0.05


class TargetReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    url: str
    kind: str
    model: str
    endpoint: str
    max_model_len: int | None
    token_capacity: int | None
    limit_tokens: int
    """Longest sequence that lengths were scaled to."""
    is_limit_assumed: bool
    """Whether the server told no limit."""
    tokens_per_word: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What it was asked."""

    weights: dict[str, float]
    arrival: str
    """`closed`, `poisson` or `trace`."""
    concurrency: int | None
    rate: float | None
    seed: int
    num_planned: int
    num_cut: int
    """Requests of a trace that were longer than the target takes."""
    reset: str
    """What became of the reset of the prefix cache: `done`, `not offered`, `not needed`, `failed: ...`."""


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by their end."""

    ok: int
    hung_up: int
    """The client closed the connection, as planned."""
    failed: int
    interrupted: int
    not_sent: int
    retries: int


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of errors."""

    count: int
    example: str


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Over the whole run, until the last request ended."""

    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, of answers that came whole; `ttft` also of those that the client broke off."""

    ttft: Quantiles | None
    itl: Quantiles | None
    e2e: Quantiles | None
    waiting: Quantiles | None
    service: Quantiles | None


class ScenarioReport(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario's part."""

    requests: RequestCounts
    latency: Latencies
    prompt_tokens: int
    output_tokens: int
    worst_wait_ratio: float | None


class IsolationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether variations of one prompt were answered as when alone."""

    variations: list[str]
    compared: int
    mismatches: list[int]
    """Numbers of the requests whose answer differed."""


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load generator itself: whether it was fast enough to be believed."""

    loop_lag_p99_seconds: float
    loop_lag_max_seconds: float
    cpu_ratio: float
    """Processor time divided by the run's time; near 1 means that the client was the bottleneck."""
    is_saturated: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run found."""

    schema_version: int = SCHEMA_VERSION
    kvwatch_version: str
    started_unix_seconds: float
    duration_seconds: float
    is_interrupted: bool
    target: TargetReport
    load: LoadReport
    requests: RequestCounts
    errors: dict[str, ErrorReport]
    peak_concurrency: int
    throughput: Throughput
    latency: Latencies
    stall_threshold_seconds: float
    worst_wait_ratio: float | None
    scenarios: dict[str, ScenarioReport]
    server: ServerSide | None
    reservation: ReservationReport | None
    isolation: IsolationReport | None
    comparison: Comparison | None
    client: ClientReport
    assertions: list[AssertionResult] = []


def count_requests(outcomes: Sequence[RequestOutcome], num_planned: int) -> RequestCounts:
    """Return how requests ended."""
    ends = Counter(outcome.status for outcome in outcomes)
    return RequestCounts(
        ok=ends["ok"],
        hung_up=ends["hung_up"],
        failed=ends["failed"],
        interrupted=ends["interrupted"],
        not_sent=num_planned - len(outcomes),
        retries=sum(outcome.num_retries for outcome in outcomes),
    )


def count_errors(outcomes: Sequence[RequestOutcome]) -> dict[str, ErrorReport]:
    """Return errors by kind, the most frequent first, each with the first message of its kind."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    counts = Counter(outcome.error_kind for outcome in failed)
    examples = {outcome.error_kind: outcome.error for outcome in reversed(failed)}
    return {kind: ErrorReport(count=count, example=examples[kind]) for kind, count in counts.most_common()}


def throughput(outcomes: Sequence[RequestOutcome], duration_seconds: float) -> Throughput:
    """Return tokens and requests per second."""
    output = sum(outcome.num_output_tokens for outcome in outcomes)
    seconds = max(duration_seconds, 1e-9)
    return Throughput(
        prompt_tokens=sum(outcome.prompt_tokens or 0 for outcome in outcomes),
        output_tokens=output,
        output_tokens_per_second=output / seconds,
        requests_per_second=sum(outcome.status == "ok" for outcome in outcomes) / seconds,
    )


def latencies(outcomes: Sequence[RequestOutcome], threshold_seconds: float) -> Latencies:
    """Return the distributions of the requests' times."""
    whole = [outcome for outcome in outcomes if outcome.status == "ok"]
    begun = [outcome for outcome in outcomes if outcome.status in {"ok", "hung_up"}]
    waits = [waiting_seconds(outcome, threshold_seconds) for outcome in whole]
    return Latencies(
        ttft=quantiles(each.ttft_seconds for each in begun if each.ttft_seconds is not None),
        itl=quantiles(gap for outcome in whole for gap in outcome.gaps),
        e2e=quantiles(outcome.e2e_seconds for outcome in whole),
        waiting=quantiles(waits),
        service=quantiles(each.e2e_seconds - wait for each, wait in zip(whole, waits, strict=True)),
    )


def scenario_reports(
    outcomes: Sequence[RequestOutcome], planned: Mapping[str, int], threshold_seconds: float
) -> dict[str, ScenarioReport]:
    """Return each scenario's part; `planned` says how many requests each should have."""
    found = by_scenario(outcomes)
    return {
        name: ScenarioReport(
            requests=count_requests(found.get(name, []), count),
            latency=latencies(found.get(name, []), threshold_seconds),
            prompt_tokens=sum(outcome.prompt_tokens or 0 for outcome in found.get(name, [])),
            output_tokens=sum(outcome.num_output_tokens for outcome in found.get(name, [])),
            worst_wait_ratio=worst_wait_ratio({name: waits_of(found.get(name, []), threshold_seconds)}),
        )
        for name, count in sorted(planned.items())
    }


def waits_of(outcomes: Sequence[RequestOutcome], threshold_seconds: float) -> list[float]:
    """Return the waiting seconds of all answers that came whole."""
    return [waiting_seconds(outcome, threshold_seconds) for outcome in outcomes if outcome.status == "ok"]


def unfairness(outcomes: Sequence[RequestOutcome], threshold_seconds: float) -> float | None:
    """Return the largest wait over all scenarios in units of what is fair in its scenario."""
    found = by_scenario(outcomes)
    return worst_wait_ratio({name: waits_of(each, threshold_seconds) for name, each in found.items()})


def client_report(lags: Sequence[float], cpu_seconds: float, duration_seconds: float) -> ClientReport:
    """Return how the load generator fared."""
    late = sorted(lags) or [0.0]
    lag = percentile(late, 99)
    return ClientReport(
        loop_lag_p99_seconds=lag,
        loop_lag_max_seconds=late[-1],
        cpu_ratio=cpu_seconds / max(duration_seconds, 1e-9),
        is_saturated=lag > _SATURATED_LAG_SECONDS,
    )


def isolation_report(
    outcomes: Sequence[RequestOutcome], alone: Mapping[str, Sequence[str]], variations: Sequence[str]
) -> IsolationReport | None:
    """Return whether answers equal those given alone; None if there is nothing to compare.

    Args:
        outcomes: All of the run.
        alone: Fingerprint -> texts, as asked before the run.
        variations: Names of what was varied.
    """
    compared = [outcome for outcome in outcomes if outcome.status == "ok" and outcome.fingerprint in alone]
    if not alone:
        return None
    differing = sorted(outcome.index for outcome in compared if outcome.texts != list(alone[outcome.fingerprint]))
    return IsolationReport(variations=list(variations), compared=len(compared), mismatches=differing)


def threshold_of(outcomes: Sequence[RequestOutcome]) -> float:
    """Return from which length on a pause counts as waiting in this run."""
    return stall_threshold_seconds(outcome for outcome in outcomes if outcome.status == "ok")
