"""Which traces are kept, what is left of them after a gap, and the latencies that they are exemplars of."""

import pytest
from opentelemetry.sdk.metrics.export import Histogram, HistogramDataPoint
from opentelemetry.trace import StatusCode
from traced_engine import CALLER, STEP_SECONDS, Traced, attributes, of, pressed

from kvwatch.exporters.otel.genai import REQUEST_DURATION_SECONDS
from kvwatch.telemetry import metrics
from kvwatch.telemetry.events import (
    FirstToken,
    RequestFinished,
    RequestQueued,
    StepFailed,
)
from kvwatch_engine.contracts.request import FinishReason, RequestOrigin
from kvwatch_engine.contracts.step import StepInput

# ---------------------------------------------------------------- sampling


def test_at_ratio_0_only_what_was_preempted_is_kept_and_says_so() -> None:
    traced = pressed(ratio=0.0)

    assert set(traced.traces) == {"young"}
    assert attributes(traced.root("young"))["kvwatch.sampling.reason"] == "preempted"


def test_at_ratio_0_a_failed_request_is_kept_and_says_so() -> None:
    traced = Traced(ratio=0.0)

    def fail(_: StepInput) -> None:
        raise RuntimeError("no")

    traced.model.on_step = fail
    traced.add(of("r", range(4)))
    traced.run()

    root = traced.root("r")
    assert any(isinstance(event, StepFailed) for event in traced.events)
    assert attributes(root)["kvwatch.sampling.reason"] == "failed"
    assert attributes(root)["error.type"] == "RuntimeError"
    assert root.status.status_code is StatusCode.ERROR
    assert "decode" not in [span.name for span in traced.children("r")]


def test_at_ratio_0_a_slow_request_is_kept_and_says_so() -> None:
    traced = Traced(ratio=0.0, slow_seconds=5 * STEP_SECONDS)
    traced.add(of("quick", range(4), max_tokens=4))
    traced.run()
    traced.add(of("slow", range(4), max_tokens=5))
    traced.run()

    assert set(traced.traces) == {"slow"}
    assert attributes(traced.root("slow"))["kvwatch.sampling.reason"] == "slow"


def test_an_aborted_request_has_no_error_but_a_reason() -> None:
    traced = Traced()
    traced.add(of("r", range(4), max_tokens=50))
    traced.step(3)
    traced.core.abort("r", FinishReason.ABORT)
    traced.follow()

    root = traced.root("r")
    assert root.status.status_code is StatusCode.UNSET
    assert attributes(root)["error.type"] == "aborted"
    assert attributes(root)["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.parametrize(("flags", "is_kept"), [("01", True), ("00", False), ("03", True)])
def test_the_callers_decision_stands_above_the_ratio(flags: str, is_kept: bool) -> None:
    traced = Traced(ratio=0.0 if is_kept else 1.0)
    traced.add(of("r", range(4), RequestOrigin(trace_parent=CALLER[:-2] + flags), max_tokens=2))
    traced.run()

    assert ("r" in traced.traces) is is_kept
    if is_kept:
        assert attributes(traced.root("r"))["kvwatch.sampling.reason"] == "parent"


def test_a_ratio_keeps_about_that_part_of_the_traces() -> None:
    traced = Traced(ratio=0.25)
    for number in range(400):
        traced.add(of(f"r{number}", range(4), max_tokens=1))
        traced.run()

    assert 60 <= len(traced.traces) <= 140


# ---------------------------------------------------------------- lost events, many requests


def test_after_a_gap_a_request_is_shown_with_what_is_known_and_says_that_it_is_not_all() -> None:
    traced = Traced()
    traced.add(of("r", range(8), max_tokens=20))
    traced.step(2)
    traced.add(of("unseen", range(8), max_tokens=20))
    traced.core.step()
    while traced.cursor.read():
        pass
    traced.assembler.load(traced.core.snapshot())
    traced.run()

    for request in ("r", "unseen"):
        root = traced.root(request)
        assert attributes(root)["kvwatch.telemetry.is_partial"] is True
        queued = next(r.queued_ns for r in [traced.finished[request]])
        assert root.start_time == queued + traced.clock.wall_ns() - traced.clock.monotonic_ns()
    assert [span.name for span in traced.children("unseen")] == []


def test_a_request_that_ended_during_a_gap_leaves_nothing_behind() -> None:
    traced = Traced()
    traced.add(of("r", range(8), max_tokens=20))
    traced.step(2)
    while traced.core.has_work:
        traced.core.step()
    while traced.cursor.read():
        pass
    traced.assembler.load(traced.core.snapshot())

    assert traced.assembler.live == []


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    traced = pressed()

    assert traced.assembler.live == []
    assert all(not trace.happenings for trace in traced.finished.values())
    assert not traced.assembler._computing


# ---------------------------------------------------------------- latencies


def test_observations_are_exactly_those_that_the_ledger_counts() -> None:
    traced = Traced()
    traced.add(of("r", range(8), max_tokens=5))
    traced.clock.advance(0.25)
    traced.run()

    first = next(event for event in traced.events if isinstance(event, FirstToken))
    end = next(event for event in traced.events if isinstance(event, RequestFinished))
    assert end.end_to_end_ns is not None
    assert set(traced.traces["r"].observations) == {
        (metrics.TIME_TO_FIRST_TOKEN, first.ttft_ns / 1e9),
        (metrics.END_TO_END, end.end_to_end_ns / 1e9),
        (metrics.INTER_TOKEN_LATENCY, STEP_SECONDS),
    }


def test_inter_token_observations_include_the_longest_gap() -> None:
    traced = Traced()
    traced.add(of("r", range(8), max_tokens=8))
    traced.step(3)
    traced.model.on_step = lambda _: traced.clock.advance(0.7)
    traced.step()
    traced.model.on_step = lambda _: traced.clock.advance(STEP_SECONDS)
    traced.run()

    gaps = {value for metric, value in traced.traces["r"].observations if metric is metrics.INTER_TOKEN_LATENCY}
    assert gaps == {0.7, STEP_SECONDS}


def test_genai_histograms_count_each_request_once_in_the_conventions_buckets() -> None:
    traced = Traced()
    traced.add(of("good", range(8), max_tokens=5))
    traced.run()
    traced.add(of("gone", range(8), max_tokens=50))
    traced.step(2)
    traced.core.abort("gone", FinishReason.ABORT)
    traced.follow()

    found: dict[str, list[HistogramDataPoint]] = {}
    for metric in traced.histograms.to_metrics(0, 1):
        assert isinstance(metric.data, Histogram)
        found[metric.name] = list(metric.data.data_points)
    good, gone = found["gen_ai.server.request.duration"]
    assert good.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvwatch",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
    }
    assert gone.attributes is not None
    assert gone.attributes["error.type"] == "aborted"
    assert good.sum == pytest.approx(5 * STEP_SECONDS)
    (ttft,), (per_token,) = found["gen_ai.server.time_to_first_token"], found["gen_ai.server.time_per_output_token"]
    assert (ttft.count, per_token.count) == (1, 1), "successful requests only"
    assert ttft.sum == pytest.approx(STEP_SECONDS)
    assert per_token.sum == pytest.approx(STEP_SECONDS)
    assert ttft.bucket_counts[2] == 1, "an observation on a bound falls into that bucket"


def test_the_duration_buckets_are_those_of_the_convention() -> None:
    assert pytest.approx(
        [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
    ) == list(REQUEST_DURATION_SECONDS)


def test_a_queued_request_carries_what_spans_need() -> None:
    traced = Traced()
    traced.add(of("r", range(4), RequestOrigin(operation="chat", trace_parent=CALLER), max_tokens=2))
    traced.follow()

    queued = next(event for event in traced.events if isinstance(event, RequestQueued))
    assert (queued.trace_parent, queued.operation, queued.max_tokens) == (CALLER, "chat", 2)
