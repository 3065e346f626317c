"""The report for people, as text."""

from collections.abc import Iterator

from kvwatch.bench.options import kinds_of
from kvwatch.bench.report import Latencies, Report
from kvwatch.bench.server_side import ServerSide
from kvwatch.bench.statistics import Quantiles

_COLUMNS = ("p50", "p90", "p99", "max")
_TIMES = (("ttft", "first token"), ("itl", "between tokens"), ("e2e", "end to end"), ("waiting", "waiting"))


def text_report(report: Report) -> str:
    """Return the report as lines."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield from _head(report)
    yield ""
    yield f"{'seconds':<26}" + "".join(f"{column:>10}" for column in _COLUMNS)
    yield from _latency_lines("all", report.latency)
    if len(report.scenarios) > 1:
        for name, scenario in report.scenarios.items():
            yield from _latency_lines(name, scenario.latency)
    yield ""
    if report.server is not None:
        yield from _server_lines(report.server)
    if report.reservation is not None:
        found = report.reservation
        yield (
            f"reserving   {found.limit_waste_ratio:.1%} waste if each reserved the limit, "
            f"{found.own_waste_ratio:.1%} if its own maximum; mean length {found.mean_length_tokens:.0f} tokens"
        )
    yield from _verdicts(report)


def _head(report: Report) -> Iterator[str]:
    target, load, ends = report.target, report.load, report.requests
    assumed = " (assumed: the server told none)" if target.is_limit_assumed else ""
    yield f"target      {target.model} at {target.url} ({target.kind}), limit {target.limit_tokens} tokens{assumed}"
    limits = [
        f"{load.rate:g} requests/s" if load.rate else "",
        f"{load.concurrency} at once" if load.concurrency else "",
    ]
    yield f"load        {kinds_of(load.weights)}; {load.arrival}; {', '.join(filter(None, limits)) or 'no limit'}"
    yield f"            seed {load.seed}; reset of the prefix cache: {load.reset}"
    if load.num_cut:
        yield f"            {load.num_cut} requests of the trace were cut to the limit"
    others = [
        ("hung up", ends.hung_up),
        ("failed", ends.failed),
        ("interrupted", ends.interrupted),
        ("not sent", ends.not_sent),
    ]
    yield f"requests    {ends.ok} answered" + "".join(f", {count} {word}" for word, count in others if count)
    for kind, error in report.errors.items():
        yield f"            {error.count} x {kind}: {error.example}"
    speed = report.throughput
    yield (
        f"speed       {speed.output_tokens_per_second:.1f} tokens/s out, {speed.requests_per_second:.2f} requests/s, "
        f"{speed.prompt_tokens} tokens in, {speed.output_tokens} out, {report.duration_seconds:.1f} s"
    )
    yield f"concurrency {report.peak_concurrency} at most"


def _latency_lines(name: str, latency: Latencies) -> Iterator[str]:
    for time, words in _TIMES:
        distribution: Quantiles | None = getattr(latency, time)
        if distribution is not None:
            numbers = "".join(f"{getattr(distribution, column):>10.3f}" for column in _COLUMNS)
            yield f"{name[:11]:<11} {words:<14}{numbers}"
            name = ""


def _server_lines(server: ServerSide) -> Iterator[str]:
    exact = "" if server.is_min_free_exact else " (of those seen)"
    rows = (
        ("preemptions", _count(server.preemptions)),
        ("recomputed", _count(server.num_recomputed_tokens, " tokens")),
        ("hits", _percent(server.hit_ratio)),
        ("waste", _percent(server.waste_ratio)),
        ("least free", _count(server.min_free_blocks, f" blocks{exact}")),
        ("used after", _count(server.used_blocks_after, " blocks")),
    )
    for name, value in rows:
        if value is not None:
            yield f"{name:<11} {value}"


def _verdicts(report: Report) -> Iterator[str]:
    if report.worst_wait_ratio is not None:
        yield f"fairness    the longest wait is {report.worst_wait_ratio:.2f} times what is fair (at most 1)"
    if report.isolation is not None:
        yield (
            f"isolation   {report.isolation.compared} answers compared with those given alone, "
            f"{len(report.isolation.mismatches)} differ ({', '.join(report.isolation.variations)})"
        )
    found = report.comparison
    if found is not None:
        rest = f"{found.not_comparable} not comparable"
        yield f"comparison  {found.identical} of {found.compared} answers as in {found.file}, {rest}"
        for each in found.differing:
            place = (
                "" if each.character is None else f", from character {each.character}: {each.here!r} / {each.there!r}"
            )
            yield f"            request {each.index} ({each.scenario}) differs{place}"
    if report.client.is_saturated:
        yield "warning     this client was late by more than 50 ms: the latencies are partly its own"
    if report.is_interrupted:
        yield "interrupted what is above is what there was"
    for assertion in report.assertions:
        value = "not known" if assertion.value is None else f"{assertion.value:g}"
        yield f"{'met' if assertion.is_met else 'NOT MET':<11} {assertion.text} ({value})"


def _count(value: float | None, unit: str = "") -> str | None:
    return None if value is None else f"{value:g}{unit}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"
