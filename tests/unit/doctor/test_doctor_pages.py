"""Pages of every kind become samples in kvwatch's names; what is no page is refused."""

from pathlib import Path

import pytest

from kvwatch.doctor.pages import EngineKey, UnreadablePageError, read_engines
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.telemetry import metrics as m

GOLDEN = Path(__file__).parents[2] / "golden" / "exposition.txt"


def test_the_golden_page_is_one_engine_with_its_labels_and_histograms() -> None:
    engines = read_engines(GOLDEN.read_text(encoding="utf-8"))

    (samples,) = engines.values()
    assert list(engines) == [EngineKey("scripted", 0, "scripted-model")]
    steps = [each for each in samples if isinstance(each, HistogramSample) and each.metric is m.STEP_TOKENS]
    assert [each.bounds for each in steps] == [m.STEP_TOKENS.buckets]
    states = {each.labels for each in samples if isinstance(each, Sample) and each.metric is m.REQUESTS}
    assert {("running",), ("waiting",)} <= states


def test_engines_of_one_page_are_kept_apart_and_what_is_of_no_engine_is_left_out() -> None:
    page = (
        'kvwatch_source_up{engine="a",dp_rank="0",model_name="m"} 1\n'
        'kvwatch_source_up{engine="a",dp_rank="1",model_name="m"} 0\n'
        'kvwatch_telemetry_cpu_seconds_total{thread="render"} 3\n'
        'kvwatch_of_a_later_version{engine="a",dp_rank="0",model_name="m"} 3\n'
    )

    engines = read_engines(page)

    assert engines == {
        EngineKey("a", 0, "m"): [Sample(m.SOURCE_UP, (), 1)],
        EngineKey("a", 1, "m"): [Sample(m.SOURCE_UP, (), 0)],
    }


def test_a_vllm_page_speaks_in_our_names() -> None:
    page = 'vllm:num_requests_running{engine="0",model_name="m"} 3\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'

    (samples,) = read_engines(page).values()

    assert Sample(m.REQUESTS, ("running",), 3) in samples
    assert Sample(m.KV_USAGE_RATIO, ("device",), 0.5) in samples


@pytest.mark.parametrize("text", ["", "<html>hello</html>", "kvwatch_requests{state=", "process_cpu_seconds_total 3\n"])
def test_what_says_nothing_of_an_engine_is_refused(text: str) -> None:
    with pytest.raises(UnreadablePageError):
        read_engines(text)
