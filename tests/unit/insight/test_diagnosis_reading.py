"""Two looks: what grew, what is absent, what began anew."""

import pytest

from kvwatch.insight.diagnosis import Lookback, Observation, Reading, diagnose
from kvwatch.insight.diagnosis.reading import Unseen
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry import metrics as m


def observed(before: list[Sample | HistogramSample], now: list[Sample | HistogramSample]) -> Observation:
    return Observation(Reading(100.0, before), Reading(110.0, now))


def failures(reason: str, value: float) -> Sample:
    return Sample(m.KV_ALLOCATION_FAILURES, (reason,), value)


def test_labels_that_are_left_out_are_summed_over() -> None:
    o = observed(
        [failures("growth", 2), failures("admission", 10)],
        [failures("growth", 5), failures("admission", 11)],
    )

    assert o.growth(m.KV_ALLOCATION_FAILURES) == 4
    assert o.growth(m.KV_ALLOCATION_FAILURES, reason="growth") == 3
    assert o.seconds == 10


def test_a_series_that_is_new_counts_from_zero_beside_others_of_its_metric() -> None:
    o = observed([failures("growth", 2)], [failures("growth", 2), failures("admission", 3)])

    assert o.growth(m.KV_ALLOCATION_FAILURES, reason="admission") == 3


def test_what_a_source_does_not_tell_is_unseen_and_not_zero() -> None:
    o = observed([], [failures("growth", 2)])

    for ask in (o.growth, o.now, o.least, o.most):
        with pytest.raises(Unseen):
            ask(m.KV_ORPHANED_BLOCKS)
    with pytest.raises(Unseen):
        o.spread(m.QUEUE_SECONDS)
    with pytest.raises(Unseen):  # told only from the second look on: nobody knows by how much it grew
        o.growth(m.KV_ALLOCATION_FAILURES)


def test_a_counter_that_began_anew_is_not_judged() -> None:
    with pytest.raises(Unseen):
        observed([failures("growth", 9)], [failures("growth", 1)]).growth(m.KV_ALLOCATION_FAILURES)


def test_a_histogram_tells_how_many_and_their_mean() -> None:
    before = HistogramSample(m.QUEUE_SECONDS, (), (1, 0), 0.5, (1.0,))
    now = HistogramSample(m.QUEUE_SECONDS, (), (2, 2), 10.5, (1.0,))

    spread = observed([before], [now]).spread(m.QUEUE_SECONDS)

    assert (spread.count, spread.total) == (3, 10.0)
    assert spread.mean == pytest.approx(10 / 3)


def test_a_source_that_tells_nothing_leaves_every_rule_unjudged_and_says_what_was_missing() -> None:
    diagnosis = diagnose(observed([], []))

    assert diagnosis.is_healthy
    assert {each.rule for each in diagnosis.unjudged} >= {"leak", "kv_bound", "engine_unwell", "telemetry_lagging"}
    assert {each.rule: each.missing for each in diagnosis.unjudged}["leak"] == "kvwatch_kv_orphaned_blocks"


def test_a_lookback_compares_with_the_oldest_look_of_the_last_while() -> None:
    lookback = Lookback(look_seconds=10, span_seconds=60)
    assert lookback.diagnose(Reading(0, [])) is None

    for seconds in range(0, 200, 10):
        assert lookback.is_due(seconds)
        lookback.add(Reading(seconds, []))
        assert not lookback.is_due(seconds + 9)

    diagnosis = lookback.diagnose(Reading(195, []))
    assert diagnosis is not None
    assert diagnosis.seconds == 65
