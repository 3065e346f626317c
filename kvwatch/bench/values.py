"""The report's numbers by the names that assertions use."""

import msgspec

from kvwatch.bench.assertions import QUANTILES, TIMES
from kvwatch.bench.report import Latencies, Report, RequestCounts

Values = dict[str, float | None]


def report_values(report: Report) -> Values:
    """Return every number that can be asserted; None where the run does not tell."""
    server = msgspec.structs.asdict(report.server) if report.server else {}
    values: Values = {
        **_times(report.latency),
        **_ends(report.requests),
        "duration_seconds": report.duration_seconds,
        "peak_concurrency": report.peak_concurrency,
        "output_tokens_per_second": report.throughput.output_tokens_per_second,
        "requests_per_second": report.throughput.requests_per_second,
        "worst_wait_ratio": report.worst_wait_ratio,
        "isolation_mismatches": len(report.isolation.mismatches) if report.isolation else None,
        "differing": report.comparison.compared - report.comparison.identical if report.comparison else None,
        "loop_lag_p99_seconds": report.client.loop_lag_p99_seconds,
        **(msgspec.structs.asdict(report.reservation) if report.reservation else {}),
        **{name: value for name, value in server.items() if value is None or not isinstance(value, bool)},
    }
    for scenario, part in report.scenarios.items():
        own = {**_times(part.latency), **_ends(part.requests), "worst_wait_ratio": part.worst_wait_ratio}
        values |= {f"{scenario}.{name}": value for name, value in own.items()}
    return values


def _ends(counts: RequestCounts) -> Values:
    ended = counts.ok + counts.hung_up + counts.failed
    return {
        **msgspec.structs.asdict(counts),
        "errors": counts.failed,
        "error_ratio": counts.failed / ended if ended else None,
    }


def _times(latency: Latencies) -> Values:
    found: Values = {}
    for time in TIMES:
        distribution = getattr(latency, time)
        for quantile in QUANTILES:
            found[f"{time}_{quantile}"] = None if distribution is None else getattr(distribution, quantile)
    return found
