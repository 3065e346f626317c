import pytest

from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.reservation import reservation_report


def outcome(prompt: int | None, output: int, max_tokens: int, seconds: float, num_texts: int = 1) -> RequestOutcome:
    return RequestOutcome(
        index=0,
        scenario="short",
        fingerprint="",
        temperature=0,
        max_tokens=max_tokens,
        intended_seconds=0,
        first_token_seconds=5,
        end_seconds=5 + seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        texts=[""] * num_texts,
        status="ok",
    )


def test_one_request_wastes_what_it_reserved_and_did_not_fill() -> None:
    found = reservation_report([outcome(100, 20, 90, 2.0)], 1000)
    assert found is not None
    assert found.limit_waste_ratio == pytest.approx(1 - 110 / 1000)  # filled from 100 to 120 while it answers
    assert found.own_waste_ratio == pytest.approx(1 - 110 / 190)
    assert found.mean_length_tokens == 120


def test_requests_weigh_as_long_as_they_last() -> None:
    found = reservation_report([outcome(500, 0, 500, 1.0), outcome(100, 0, 0, 3.0)], 1000)
    assert found is not None
    assert found.limit_waste_ratio == pytest.approx(1 - (500 + 300) / 4000)
    assert found.own_waste_ratio == pytest.approx(1 - (500 + 300) / (1000 + 300))


def test_each_of_n_answers_reserves_for_itself() -> None:
    found = reservation_report([outcome(100, 60, 20, 1.0, num_texts=3)], 200)
    assert found is not None
    assert found.limit_waste_ratio == pytest.approx(1 - 110 / 200)
    assert found.own_waste_ratio == pytest.approx(1 - 110 / 120)
    assert found.mean_length_tokens == 120


def test_without_counted_tokens_nothing_is_said() -> None:
    assert reservation_report([outcome(None, 5, 5, 1.0)], 100) is None
    assert reservation_report([], 100) is None
