"""The result as a document and as tables."""

import statistics

from paired import Estimate, estimate
from peers.loads import LOADS
from peers.results import Results, column
from peers.roofline import ModelSize, least_times
from peers.sides import KVWATCH
from peers.verdicts import THROUGHPUT, Verdict, ratios, shares, verdicts

FIGURES = (THROUGHPUT, "ttft.p50", "ttft.p99", "itl.p50", "itl.p99")
BUSY_PERCENT = 15.0
"""Trials beside which others took more than this of the processor are pointed out."""


def document(results: Results, model: ModelSize) -> dict[str, object]:
    """Return everything but the single trials, for JSON."""
    judged = verdicts(results, model)
    return {
        **results.about,
        "roofline": _roofline(results, model),
        "loads": {load: _load(results, load, model) for load in results.loads()},
        "verdicts": [verdict.as_json() for verdict in judged],
        "missed": [verdict.what for verdict in judged if not verdict.is_met],
        "busy_trials": num_busy(results),
    }


def tables(results: Results, model: ModelSize) -> str:
    """Return the result for people."""
    parts = [_roofline_text(results, model)]
    parts += [_load_text(results, load, model) for load in results.loads()]
    parts.append("\n".join(["Targets:", *map(_verdict_text, verdicts(results, model))]))
    busy = num_busy(results)
    if busy:
        parts.append(f"{busy} of {len(results.trials)} trials ran beside other work: their figures are no figures.")
    return "\n\n".join(parts)


def num_busy(results: Results) -> int:
    """Return how many trials others disturbed."""
    return sum(trial.figures.busy_percent > BUSY_PERCENT for trial in results.trials)


def sides_of(results: Results, load: str) -> list[str]:
    """Return the sides that were put under a load, kvwatch first."""
    found = dict.fromkeys(trial.side for trial in results.trials if trial.load == load)
    return sorted(found, key=lambda side: side != KVWATCH)


def _load(results: Results, load: str, model: ModelSize) -> dict[str, object]:
    sides: dict[str, object] = {}
    for side in sides_of(results, load):
        trials = results.of(load, side)
        figures = [trial.figures for trial in trials.values()]
        share = shares(results, load, side, model)
        sides[side] = {
            "rounds": len(trials),
            **{name: estimate(column(figures, name)).rounded(4) for name in FIGURES},
            "cached_tokens": figures[-1].cached_tokens,
            "client_cpu_ratio": round(statistics.median(each.client_cpu_ratio for each in figures), 3),
            "shares": {name: getattr(share, name).rounded() for name in ("phases", "overlapped", "step", "weights")},
        }
    others = [side for side in sides if side != KVWATCH and KVWATCH in sides]
    compared = {other: {name: _rounded(ratios(results, load, other, name)) for name in FIGURES} for other in others}
    return {"load": str(LOADS[load]), "sides": sides, "kvwatch_over": compared}


def _rounded(value: Estimate | None) -> dict[str, float] | None:
    return value.rounded() if value else None


def _roofline(results: Results, model: ModelSize) -> dict[str, object]:
    machines = [trial.machine for trial in results.trials]
    if not machines:
        return {}
    typical = type(machines[0])(
        bandwidth=statistics.median(each.bandwidth for each in machines),
        peak=statistics.median(each.peak for each in machines),
    )
    bounds = {load: least_times(LOADS[load], model, typical) for load in results.loads()}
    return {
        "bandwidth_gb_per_second": estimate([each.bandwidth / 1e9 for each in machines]).rounded(2),
        "bf16_peak_gflop_per_second": estimate([each.peak / 1e9 for each in machines]).rounded(1),
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "least_seconds": {
            load: {
                "prefill": round(bound.prefill, 3),
                "decode": round(bound.decode, 3),
                "decode_step": round(bound.step, 5),
                "overlapped": round(bound.overlapped, 3),
                "output_tokens_per_second": round(
                    LOADS[load].num_requests * LOADS[load].num_output_tokens / bound.phases, 1
                ),
            }
            for load, bound in bounds.items()
        },
    }  # fmt: skip


def _roofline_text(results: Results, model: ModelSize) -> str:
    bandwidth = estimate([trial.machine.bandwidth / 1e9 for trial in results.trials])
    peak = estimate([trial.machine.peak / 1e9 for trial in results.trials])
    return (
        f"Machine: memory {_interval(bandwidth, 1)} GB/s, bf16 products {_interval(peak, 0)} GFLOP/s; "
        f"model: {model.weight_bytes / 1e6:.0f} MB of weights a step, {model.kv_bytes_per_token} bytes of K/V a token"
    )


def _load_text(results: Results, load: str, model: ModelSize) -> str:
    lines = [
        f"{load}: {LOADS[load]}",
        f"  {'':14}{'rounds':>7}{'tokens/s':>24}{'TTFT p50':>10}{'p99 ms':>8}{'ITL p50':>9}{'p99 ms':>8}"
        f"{'roofline':>10}{'overlap':>9}{'step':>7}",
    ]
    for side in sides_of(results, load):
        trials = results.of(load, side)
        figures = [trial.figures for trial in trials.values()]
        times = [1e3 * statistics.median(column(figures, name)) for name in FIGURES[1:]]
        share = shares(results, load, side, model)
        assert share is not None
        lines.append(
            f"  {side:14}{len(trials):7}{_interval(estimate(column(figures, THROUGHPUT)), 1):>24}"
            f"{times[0]:10.0f}{times[1]:8.0f}{times[2]:9.1f}{times[3]:8.1f}"
            f"{share.phases.median:10.0%}{share.overlapped.median:9.0%}{share.step.median:7.0%}"
        )
    for other in sides_of(results, load):
        found = {name: ratios(results, load, other, name) for name in FIGURES} if other != KVWATCH else {}
        words = [f"{name} {_interval(value, 2)}" for name, value in found.items() if value is not None]
        if words:
            lines.append(f"  kvwatch / {other}: {', '.join(words)}")
    return "\n".join(lines)


def _verdict_text(verdict: Verdict) -> str:
    sign = ">=" if verdict.is_at_least else "<="
    return (
        f"  {'met   ' if verdict.is_met else 'MISSED'} {verdict.what}: "
        f"{_interval(verdict.value, 2)} (wanted {sign} {verdict.limit:g})"
    )


def _interval(value: Estimate, digits: int) -> str:
    """Return the median, and the interval where there are rounds enough for one."""
    if value.low != value.low:  # not a number
        return f"{value.median:.{digits}f}"
    return f"{value.median:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"
