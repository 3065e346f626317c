"""What the measured trials say: ratios between sides, shares of the roofline, and whether the targets are met."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paired import Estimate, estimate, ratio
from peers.loads import LOADS
from peers.results import Results, column
from peers.roofline import ModelSize, least_times, weight_bound_tokens_per_second
from peers.sides import KVWATCH, VLLMS

THROUGHPUT = "output_tokens_per_second"
FIRST_RATIO = 1.5
"""Output tokens/s over vLLM's on the first load; 1 on the others."""
ROOFLINE_SHARE = 0.6
"""Of the roofline on the first load, and of reading nothing but weights on the single stream."""
_FIRST, _SINGLE = "serving", "single-stream"


@dataclass(frozen=True)
class Verdict:
    """One target."""

    what: str
    value: Estimate
    limit: float
    is_at_least: bool
    """Whether the limit is a lower one."""

    @property
    def is_met(self) -> bool:
        """Whether the median is within the limit."""
        return self.value.median >= self.limit if self.is_at_least else self.value.median <= self.limit

    def as_json(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "what": self.what,
            "value": self.value.rounded(),
            "limit": self.limit,
            "kind": "at least" if self.is_at_least else "at most",
            "is_met": self.is_met,
        }


@dataclass(frozen=True)
class Shares:
    """How near a side came to what the machine allows on a load; 1 is the bound itself."""

    phases: Estimate
    """Of the roofline: prompts at the rate of large products, then decode steps, each at the roof that binds it."""
    overlapped: Estimate
    """Of the bound that no order of the work can pass: all bytes beneath all operations."""
    step: Estimate
    """Of the least time of a decode step, by the median time between two tokens."""
    weights: Estimate
    """Of reading nothing but the weights, once for each token of one stream."""


def fastest(results: Results, load: str, sides: Sequence[str]) -> str | None:
    """Return the side of most output tokens/s among some; None if none has a trial."""
    speeds = {side: [trial.figures for trial in results.of(load, side).values()] for side in sides}
    medians = {side: median(column(figures, THROUGHPUT)) for side, figures in speeds.items() if figures}
    return max(medians, key=medians.__getitem__, default=None)


def ratios(results: Results, load: str, other: str, figure: str) -> Estimate | None:
    """Return kvwatch's figure over another side's, round by round; None if they never met."""
    met = results.pairs(load, KVWATCH, other)
    if not met:
        return None
    return ratio(column((ours for ours, _ in met), figure), column((theirs for _, theirs in met), figure))


def shares(results: Results, load: str, side: str, model: ModelSize) -> Shares | None:
    """Return how near a side came to the roofline, by the machine as it was in each round; None without a trial."""
    trials = results.of(load, side).values()
    if not trials:
        return None
    bounds = [(least_times(LOADS[load], model, trial.machine), trial) for trial in trials]
    concurrency = LOADS[load].concurrency
    return Shares(
        phases=estimate([bound.phases / trial.figures.seconds for bound, trial in bounds]),
        overlapped=estimate([bound.overlapped / trial.figures.seconds for bound, trial in bounds]),
        step=estimate([bound.step / trial.figures.itl.p50 for bound, trial in bounds]),
        weights=estimate(
            [
                trial.figures.output_tokens_per_second
                / concurrency
                / weight_bound_tokens_per_second(model, trial.machine)
                for trial in trials
            ]
        ),
    )


def verdicts(results: Results, model: ModelSize) -> list[Verdict]:
    """Return all targets that the trials can speak about."""
    found = []
    for load in results.loads():
        least = FIRST_RATIO if load == _FIRST else 1.0
        for figure, limit, is_at_least in (
            (THROUGHPUT, least, True),
            ("ttft.p99", 1.0, False),
            ("itl.p99", 1.0, False),
        ):
            other = fastest(results, load, VLLMS)
            value = ratios(results, load, other, figure) if other else None
            if value is not None:
                found.append(Verdict(f"{load}: {figure} of kvwatch / {other}", value, limit, is_at_least))
        share = shares(results, load, KVWATCH, model)
        if share is not None and load == _FIRST:
            found.append(Verdict(f"{load}: share of the roofline", share.phases, ROOFLINE_SHARE, True))
        if share is not None and load == _SINGLE:
            found.append(Verdict(f"{load}: share of weights / bandwidth", share.weights, ROOFLINE_SHARE, True))
    return found
