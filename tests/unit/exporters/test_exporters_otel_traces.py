"""What a trace shows of a request."""

import itertools
import random

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.trace import SpanKind
from traced_engine import CALLER, STEP_SECONDS, Traced, attributes, of, pressed, seconds

from kvwatch.exporters.otel import request_trace
from kvwatch.telemetry.events import (
    BlocksEvicted,
    ConfigChanged,
    DraftsVerified,
    PoolRebuilt,
    RequestFinished,
    RequestResumed,
)
from kvwatch_engine.contracts.request import RequestOrigin
from kvwatch_engine.contracts.sampling import BeamParams

# ---------------------------------------------------------------- the shape of a trace


def test_a_request_is_one_server_span_with_its_phases_below_it() -> None:
    traced = Traced(max_prefill_chunk=4, max_batch_tokens=32)
    traced.add(of("r", range(10), max_tokens=4, temperature=0.0, seed=7))
    traced.clock.advance(0.5)
    traced.run()

    root = traced.root("r")
    assert root.name == "chat tiny"
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    queue, prefill, decode = traced.children("r")
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert seconds(queue) == pytest.approx(0.5)
    assert seconds(prefill) == pytest.approx(3 * STEP_SECONDS)
    assert seconds(decode) == pytest.approx(3 * STEP_SECONDS)
    chunks = traced.children("r", prefill)
    assert [(chunk.name, attributes(chunk)["kvwatch.tokens"]) for chunk in chunks] == [
        ("prefill chunk", 4),
        ("prefill chunk", 4),
        ("prefill chunk", 2),
    ]
    assert [seconds(chunk) for chunk in chunks] == pytest.approx([STEP_SECONDS] * 3)
    assert root.start_time == queue.start_time
    assert root.end_time == decode.end_time


def test_attributes_say_what_was_asked_for_and_what_came_of_it() -> None:
    traced = Traced()
    traced.add(of("first", range(10), max_tokens=4))
    traced.run()
    origin = RequestOrigin(operation="chat", is_stream=True, tenant="team-a", adapter="poet")
    traced.add(of("r", range(10), origin, max_tokens=4, temperature=0.5, top_p=0.9, top_k=5, seed=7))
    traced.run()

    finished = next(e for e in traced.events if isinstance(e, RequestFinished) and e.request == "r")
    found = attributes(traced.root("r"))
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvwatch",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.response.time_to_first_chunk": STEP_SECONDS,
        "kvwatch.kv.hit_tokens.device": 8,
        "kvwatch.kv.reused_blocks": 2,
        "kvwatch.kv.peak_blocks": finished.peak_blocks,
        "kvwatch.kv.preemptions": 0,
        "kvwatch.kv.recomputed_tokens": 0,
        "kvwatch.kv.copied_blocks": 0,
        "kvwatch.tenant": "team-a",
        "kvwatch.adapter": "poet",
        "kvwatch.sampling.reason": "ratio",
        "server.port": 8000,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "gen_ai.request.choice.count" not in found


def test_parallel_samples_show_their_sharing_and_their_copies() -> None:
    traced = Traced()
    traced.add(of("r", range(10), max_tokens=3, n=3))
    traced.run()

    found = attributes(traced.root("r"))
    copies = [event for event in traced.root("r").events if event.name == "kvwatch.copy_on_write"]
    assert found["gen_ai.request.choice.count"] == 3
    assert found["gen_ai.response.finish_reasons"] == ("length", "stop", "length"), "one for each choice"
    assert found["kvwatch.kv.shared_blocks"] == 2 * 3, "two forks share the prompt's three blocks"
    assert found["kvwatch.kv.copied_blocks"] == 2, "one copy for each sequence but the last owner"
    assert sum(dict(event.attributes or {})["kvwatch.kv.blocks"] == 1 for event in copies) == 2


def test_a_request_shows_what_was_guessed_for_it_and_what_of_that_stood() -> None:
    traced = Traced(num_speculative_tokens=3, prompt_lookup_min=1)
    traced.model.period = 4
    traced.add(of("r", [10, 11, 12, 13], max_tokens=30, ignore_eos=True))
    traced.run()

    found = attributes(traced.root("r"))
    verified = [event for event in traced.events if isinstance(event, DraftsVerified)]
    accepted = sum(event.accepted_tokens for event in verified)
    assert found["kvwatch.drafts.accepted_tokens"] == accepted > 0
    assert found["kvwatch.drafts.proposed_tokens"] == accepted + sum(event.rejected_tokens for event in verified)


def test_a_beam_search_shows_its_width_and_counts_what_it_returns() -> None:
    traced = Traced()
    traced.add(of("r", range(10), max_tokens=5, n=2, beams=BeamParams(width=4), ignore_eos=True))
    traced.run()

    found = attributes(traced.root("r"))
    assert found["kvwatch.request.beam_width"] == 4
    assert found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.response.finish_reasons"] == ("length",) * 2, "the beams that are not returned tell nothing"
    assert found["gen_ai.usage.output_tokens"] == 2 * 5


def test_the_callers_trace_is_continued() -> None:
    traced = Traced()
    origin = RequestOrigin(operation="chat", trace_parent=CALLER, trace_state="vendor=value")
    traced.add(of("r", range(4), origin, max_tokens=2))
    traced.run()

    for span in traced.traces["r"].spans:
        context = span.get_span_context()
        assert context is not None
        assert f"{context.trace_id:032x}" == CALLER.split("-")[1]
        assert context.trace_state.to_header() == "vendor=value"
    parent = traced.root("r").parent
    assert parent is not None
    assert parent.is_remote
    assert f"{parent.span_id:016x}" == CALLER.split("-")[2]


@pytest.mark.parametrize(
    "hostile",
    [
        "", "garbage", CALLER + "-extra", CALLER.upper(), CALLER.replace("00-", "ff-", 1),
        "00-" + "0" * 32 + CALLER[35:], CALLER + "x" * 10_000, "00-\ud800", CALLER[:-1],
    ],
)  # fmt: skip
def test_a_hostile_traceparent_is_ignored(hostile: str) -> None:
    traced = Traced()
    origin = RequestOrigin(operation="chat", trace_parent=hostile, trace_state="\ud800=\n, vendor=value")
    traced.add(of("r", range(4), origin, max_tokens=2))
    traced.run()

    assert traced.root("r").parent is None
    context = traced.root("r").get_span_context()
    assert context is not None
    assert context.is_valid
    assert len(context.trace_state) == 0


def test_text_that_utf8_cannot_express_does_not_cost_the_batch() -> None:
    traced = Traced()
    origin = RequestOrigin(
        operation="chat", tenant="\ud800" * 1000, adapter='"\n\\', trace_parent=CALLER, trace_state="\ud800=1"
    )
    traced.add(of("r\ud800", range(4), origin, max_tokens=2, seed=2**64))
    traced.run()

    encoded = encode_spans(traced.traces["r\ud800"].spans).SerializeToString()
    assert len(encoded) < 10_000


# ---------------------------------------------------------------- preemption


def test_phases_of_a_preempted_request_touch_each_other_and_add_up_to_its_whole_time() -> None:
    traced = pressed()

    for request in ("old", "young"):
        root, phases = traced.root(request), traced.children(request)
        assert phases[0].start_time == root.start_time
        assert phases[-1].end_time == root.end_time
        assert all(before.end_time == after.start_time for before, after in itertools.pairwise(phases))
        assert sum(map(seconds, phases)) == pytest.approx(seconds(root), abs=1e-9)
        found = attributes(root)
        total = sum(float(str(found[f"kvwatch.{p}.seconds"])) for p in ("queue", "prefill", "decode", "preempted"))
        assert total == pytest.approx(seconds(root), abs=1e-9)


def test_time_away_and_recomputation_are_spans_of_their_own() -> None:
    traced = pressed()

    away = [event for event in traced.events if isinstance(event, RequestResumed)]
    spans = [span for span in traced.children("young") if span.name == "preempted"]
    assert [seconds(span) for span in spans] == pytest.approx([event.away_ns / 1e9 for event in away])
    recomputed = [
        attributes(chunk)["kvwatch.tokens"]
        for phase in traced.children("young")
        for chunk in traced.children("young", phase)
        if chunk.name == "recompute chunk"
    ]
    lost = sum(event.recompute_tokens for event in away)
    assert recomputed
    assert sum(map(int, map(str, recomputed))) == lost + len(away), "the newest token of each time was new work"
    assert attributes(traced.root("young"))["kvwatch.kv.recomputed_tokens"] == lost
    assert attributes(traced.root("young"))["kvwatch.kv.preemptions"] == len(away)


def test_a_preemption_is_an_event_that_links_to_the_request_in_whose_favour_it_was() -> None:
    traced = pressed()

    root = traced.root("young")
    event = next(event for event in root.events if event.name == "kvwatch.preempted")
    assert dict(event.attributes or {})["kvwatch.beneficiary.request.id"] == "old"
    favoured = traced.root("old").get_span_context()
    assert favoured is not None
    assert {(link.context.trace_id, link.context.span_id) for link in root.links} == {
        (favoured.trace_id, favoured.span_id)
    }


def test_no_link_leads_to_a_span_that_nobody_exported() -> None:
    traced = pressed(ratio=0.0)

    assert "old" not in traced.traces
    assert not traced.root("young").links


def test_recompute_spans_are_bounded_however_often_a_request_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "MAX_PHASES", 3)
    monkeypatch.setattr(request_trace, "MAX_CHUNKS", 2)
    monkeypatch.setattr(request_trace, "MAX_HAPPENINGS", 0)
    traced = pressed(max_prefill_chunk=2)

    root, phases = traced.root("young"), traced.children("young")
    found = attributes(root)
    assert len(phases) == 3
    chunks = [chunk for phase in phases for chunk in traced.children("young", phase)]
    assert len(chunks) == 2
    assert attributes(chunks[-1])["kvwatch.steps"] == 3, "the last chunk stands for those that do not fit"
    assert found["kvwatch.telemetry.phases_left_out"] == traced.finished["young"].num_phases - 3
    assert found["kvwatch.telemetry.events_left_out"] == found["kvwatch.kv.preemptions"]
    total = sum(float(str(found[f"kvwatch.{p}.seconds"])) for p in ("queue", "prefill", "decode", "preempted"))
    assert total == pytest.approx(seconds(root), abs=1e-9), "sums are exact all the same"


def test_blocks_that_had_to_go_for_a_request_are_counted_on_its_span() -> None:
    traced = Traced(num_blocks=8)
    traced.add(of("before", range(16), max_tokens=2))
    traced.run()
    traced.add(of("r", range(20, 44), max_tokens=2))
    traced.run()

    evicted = sum(len(e.block_ids) for e in traced.events if isinstance(e, BlocksEvicted) and e.request == "r")
    assert evicted > 0
    assert attributes(traced.root("r"))["kvwatch.kv.evicted_blocks"] == evicted


@pytest.mark.parametrize("seed", range(8))
def test_under_any_load_the_phases_are_the_times_that_the_engine_itself_reports(seed: int) -> None:
    """The engine's own bookkeeping (`RequestFinished`) is the oracle; nothing is computed by subtraction here."""
    chance = random.Random(seed)
    traced = Traced(num_blocks=24, max_num_seqs=6, max_batch_tokens=16, max_prefill_chunk=chance.choice([2, 5, 16]))
    for number in range(40):
        prompt = [chance.randrange(3) for _ in range(chance.randint(1, 20))]
        traced.add(of(f"r{number}", prompt, max_tokens=chance.randint(1, 20), n=chance.choice([1, 1, 2])))
        traced.clock.advance(chance.random() / 50)
        traced.step(chance.randrange(4))
    traced.run()

    finished = {event.request: event for event in traced.events if isinstance(event, RequestFinished)}
    assert len(finished) == 40
    assert any(event.num_preemptions for event in finished.values())
    for request, event in finished.items():
        trace = traced.finished[request]
        before_first_token = sum(
            phase.end_ns - phase.begin_ns
            for phase in trace.phases
            if phase.name != "queue" and phase.end_ns <= trace.queued_ns + (trace.ttft_ns or 0)
        )
        assert trace.sums_ns["queue"] == event.queue_ns
        assert before_first_token == event.prefill_ns
        assert trace.sums_ns.total() == event.end_to_end_ns
        assert trace.num_preemptions == event.num_preemptions
        assert sum(trace.hit_tokens.values()) == event.cached_tokens
        chunks = [chunk for phase in trace.phases for chunk in phase.chunks if not chunk.is_recompute]
        if not trace.num_preemptions:
            assert sum(chunk.num_tokens for chunk in chunks) == event.prompt_tokens - event.cached_tokens


def test_what_somebody_changes_is_an_event_of_every_request_that_is_live() -> None:
    traced = Traced()
    for name in ("a", "b"):
        traced.add(of(name, range(10), max_tokens=6))
    traced.core.step()
    traced.core.log.append(ConfigChanged("night shift", "watermark", "0", "0.05", "0", "to see", {}))
    traced.core.log.append(PoolRebuilt(41, 60, "resized", 3_000_000, 0))
    traced.core.log.append(PoolRebuilt(60, 2, "refused", None, 0, "", "too small"))
    traced.run()

    for name in ("a", "b"):
        changed, rebuilt = [e for e in traced.root(name).events if e.name != "kvwatch.copy_on_write"]
        assert changed.name == "kvwatch.config_changed"
        assert dict(changed.attributes or {}) == {
            "kvwatch.config.key": "watermark",
            "kvwatch.config.old": "0",
            "kvwatch.config.new": "0.05",
            "kvwatch.config.actor": "night shift",
        }
        assert rebuilt.name == "kvwatch.pool_rebuilt"
        assert dict(rebuilt.attributes or {})["kvwatch.pool.pause_seconds"] == 0.003
