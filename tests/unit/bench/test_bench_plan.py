from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.bench.arrivals import poisson
from kvwatch.bench.plan import fingerprint, plan_requests
from kvwatch.bench.preparation import variations
from kvwatch.bench.scenarios import SCENARIOS, RequestSpec, Scale
from kvwatch.bench.words import TextScale

ALL = {name: scenario.mixed_weight for name, scenario in SCENARIOS.items()}


def scale(limit: int = 640, tokens_per_word: float = 1.0, overhead: int = 0) -> Scale:
    return Scale(
        limit_tokens=limit, pressure_tokens=limit // 4, text=TextScale(tokens_per_word, overhead),
        variations=variations(["base", "adapter"], has_salt=True, has_images=True),
    )  # fmt: skip


def of_one(scenario: str, count: int = 40, limit: int = 640) -> list[RequestSpec]:
    return plan_requests({scenario: 1}, count, 7, scale(limit))


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    first = plan_requests(ALL, 200, 7, scale())
    assert plan_requests(ALL, 200, 7, scale()) == first
    assert [each.index for each in first] == list(range(200))
    other = plan_requests(ALL, 200, 8, scale())
    assert {each.prompt for each in other}.isdisjoint(each.prompt for each in first)


@given(
    weights=st.dictionaries(st.sampled_from(sorted(SCENARIOS)), st.floats(0.01, 100), min_size=1),
    count=st.integers(1, 60),
)
def test_weights_are_kept_to_within_one_request(weights: dict[str, float], count: int) -> None:
    found = Counter(each.scenario for each in plan_requests(weights, count, 1, scale()))
    assert found.total() == count
    for name, weight in weights.items():
        assert abs(found[name] - count * weight / sum(weights.values())) < 1


@given(limit=st.integers(64, 9000), tokens_per_word=st.floats(1, 6), overhead=st.integers(0, 8))
def test_every_request_fits_the_limit(limit: int, tokens_per_word: float, overhead: int) -> None:
    for spec in plan_requests(ALL, 24, 3, scale(limit, tokens_per_word, overhead)):
        words = len(spec.prompt.split())
        prompt = overhead + words * tokens_per_word
        # One word is the least, however few tokens were wanted; the shared prefix and its tail have one each.
        slack = 2 * tokens_per_word + overhead
        assert words >= 1
        assert prompt + spec.n * spec.max_tokens <= max(0.95 * limit + slack, 4 * spec.n + 16), spec.scenario


def test_long_requests_are_near_the_limit() -> None:
    for spec in of_one("long"):
        assert 0.78 * 640 <= len(spec.prompt.split()) + spec.max_tokens <= 0.9 * 640


def test_shared_prefixes_are_shared_and_distinct_prompts_are_not() -> None:
    shared = of_one("shared-prefix")
    beginnings = Counter(each.prompt[:1000] for each in shared)
    assert len({each.prompt for each in shared}) == 40
    assert len(beginnings) == 4
    distinct = of_one("distinct")
    assert len({each.prompt[:30] for each in distinct}) == 40
    lengths = [sum(len(each.prompt.split()) for each in specs) for specs in (shared, distinct)]
    assert 0.8 < lengths[0] / lengths[1] < 1.25


def test_warm_prompts_are_few_and_cold_ones_are_all_different() -> None:
    assert len({each.prompt for each in of_one("warm")}) == 4
    cold = of_one("cold")
    assert len({each.prompt for each in cold}) == 40
    assert all(each.is_uncached for each in cold)


def test_the_other_scenarios_ask_for_what_they_are_called_after() -> None:
    assert all(each.stop for each in of_one("early-stop"))
    assert all(each.is_fixed_length for each in of_one("max-tokens"))
    assert {each.n for each in of_one("parallel")} == {2, 3, 4}
    assert all(each.temperature > 0 for each in of_one("parallel"))  # greedy samples would be n times the same
    assert {each.hang_up_after for each in of_one("hang-up")} > {0, 3}
    assert all(each.max_tokens > 3 * len(each.prompt.split()) for each in of_one("pressure"))


def test_isolation_asks_the_same_in_every_variation() -> None:
    specs = of_one("isolation", 60)
    assert {each.variation.name for each in specs} == {
        "model base", "model adapter", "salt one", "salt two", "image 0", "image 1",
    }  # fmt: skip
    by_variation = {
        name: {each.prompt for each in specs if each.variation.name == name} for name in ("salt one", "salt two")
    }
    assert by_variation["salt one"] == by_variation["salt two"]
    assert len({fingerprint(each) for each in specs}) == 6 * 3


def test_a_fingerprint_is_about_what_is_asked_only() -> None:
    spec = of_one("short", 1)[0]
    assert fingerprint(msgspec.structs.replace(spec, index=9, due_seconds=3.0)) == fingerprint(spec)
    assert fingerprint(msgspec.structs.replace(spec, max_tokens=spec.max_tokens + 1)) != fingerprint(spec)
    assert fingerprint(msgspec.structs.replace(spec, prompt=spec.prompt + "x")) != fingerprint(spec)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    dated = poisson(of_one("short", 4000), rate=50, seed=3)
    times = [each.due_seconds for each in dated if each.due_seconds is not None]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0
    assert mean == pytest.approx(1 / 50, rel=0.06)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.08)  # as of an exponential distribution
    assert poisson(of_one("short", 4000), rate=50, seed=3) == dated
