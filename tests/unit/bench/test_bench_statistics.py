import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.statistics import percentile, quantiles, stall_threshold_seconds, waiting_seconds, worst_wait_ratio

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)


def outcome(
    intended: float = 0.0, first: float | None = 1.0, end: float = 3.0, pauses: list[float] | None = None
) -> RequestOutcome:
    return RequestOutcome(
        index=0,
        scenario="short",
        fingerprint="",
        temperature=0,
        intended_seconds=intended,
        sent_seconds=intended + 0.5,
        first_token_seconds=first,
        end_seconds=end,
        gaps=pauses or [],
        pauses=pauses or [],
        status="ok",
    )


@given(values=VALUES, percent=st.sampled_from([1, 50, 90, 99, 100]))
def test_percentiles_are_numpys_observed_ones(values: list[float], percent: int) -> None:
    assert percentile(sorted(values), percent) == np.percentile(values, percent, method="inverted_cdf")


@given(values=VALUES)
def test_quantiles_are_in_order(values: list[float]) -> None:
    found = quantiles(values)
    assert found is not None
    assert found.count == len(values)
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(values)


def test_nothing_has_no_distribution() -> None:
    assert quantiles([]) is None


def test_latencies_count_from_the_intended_start() -> None:
    late = outcome(intended=10, first=12, end=15)
    assert late.ttft_seconds == 2
    assert late.e2e_seconds == 5


def test_waiting_is_the_time_to_the_first_token_and_every_long_pause() -> None:
    steady = [outcome(pauses=[0.02] * 99)]
    threshold = stall_threshold_seconds(steady)
    assert threshold == 0.25
    assert waiting_seconds(steady[0], threshold) == 1.0
    preempted = outcome(first=1.0, end=5.0, pauses=[0.02, 0.24, 1.5, 0.02])
    assert waiting_seconds(preempted, threshold) == pytest.approx(2.5)
    assert waiting_seconds(outcome(first=None, end=4.0), threshold) == 4.0


def test_where_every_step_is_slow_a_slow_step_is_no_stall() -> None:
    slow = [outcome(pauses=[0.2] * 50 + [1.0])]
    assert stall_threshold_seconds(slow) == 2.0
    assert waiting_seconds(slow[0], 2.0) == 1.0


def test_the_worst_wait_is_measured_by_its_own_scenario() -> None:
    assert worst_wait_ratio({}) is None
    assert worst_wait_ratio({"a": []}) is None
    # Below two seconds everything is fair.
    assert worst_wait_ratio({"a": [0.01, 0.01, 1.0]}) == 0.5
    # Beyond, five times the median of the scenario is.
    assert worst_wait_ratio({"a": [1.0, 1.0, 10.0], "b": [0.1, 0.1, 0.1]}) == 2.0
    assert worst_wait_ratio({"a": [10.0, 10.0, 10.0], "b": [0.1, 0.1, 3.0]}) == 1.5
