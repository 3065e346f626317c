"""Requests over HTTP in, telemetry over OTLP out: what the collector has agrees with what the client saw."""

import io
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
import structlog
from builders import NullModel
from openai_server import MODEL, byte_level_tokenizer, save_tokenizer, wait_until
from otlp_engine import ObservedServer, observed_server
from otlp_receiver import Collected, attributes, grpc_collector, http_collector, seconds
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from kvwatch.derive.metrics import PREFIX
from kvwatch.logs import configure_logs

HI = [{"role": "user", "content": "hi"}]
PHASES = {"queue", "prefill", "decode", "preempted"}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """The process's log as JSON; it is left as it was."""
    root = logging.getLogger()
    handlers, level, before = list(root.handlers), root.level, structlog.get_config()
    names = ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore")
    levels = {name: logging.getLogger(name).level for name in names}
    stream = io.StringIO()
    configure_logs("json", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    structlog.configure(**before)


def model(step_seconds: float = 0.002) -> NullModel:
    made = NullModel(401)
    made.on_step = lambda _: time.sleep(step_seconds)
    return made


def ask(observed: ObservedServer, client: httpx.Client, headers: dict[str, str] | None = None, **body: object) -> float:
    """Send a chat request; return the seconds that the client waited for the answer."""
    content = {"model": MODEL, "messages": HI, "ignore_eos": True, "max_tokens": 20, **body}
    begin = time.monotonic()
    answer = client.post(f"{observed.server.url}/v1/chat/completions", json=content, headers=headers or {}, timeout=60)
    elapsed = time.monotonic() - begin
    assert answer.status_code == 200, answer.text
    return elapsed


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": HI, "max_tokens": 100_000}, "too_long"),
        ({"messages": HI, "temperature": 9}, "invalid"),
        ({"messages": []}, "invalid"),
    ],
)
def test_a_refused_request_has_a_span_of_its_callers_trace_that_says_why(
    folder: Path, body: dict[str, object], reason: str
) -> None:
    with (
        grpc_collector() as collected,
        observed_server(folder, model(), collected.endpoint) as observed,
        httpx.Client() as client,
    ):
        url, headers = f"{observed.server.url}/v1/chat/completions", {"x-kvwatch-tenant": "blue"}
        began = time.time()
        for flags in ("00", "01"):
            headers["traceparent"] = f"00-{TRACE}-{SPAN}-{flags}"
            assert client.post(url, json={"model": MODEL, **body}, headers=headers, timeout=60).status_code == 400
        ended = time.time()
        ask(observed, client)
        wait_until(lambda: len(collected.roots) == 2, 60)

        root = next(span for span in collected.roots if span.trace_id.hex() == TRACE)
        found = attributes(root.attributes)
        assert root.parent_span_id.hex() == SPAN
        assert root.status.code == root.status.STATUS_CODE_ERROR
        assert (found["error.type"], found["kvwatch.sampling.reason"]) == (reason, "parent")
        assert (found["gen_ai.operation.name"], found["kvwatch.tenant"]) == ("chat", "blue")
        assert began <= root.start_time_unix_nano / 1e9 <= root.end_time_unix_nano / 1e9 <= ended
        assert not [span for span in collected.spans if span.parent_span_id == root.span_id]


@pytest.mark.parametrize("collector", [grpc_collector, http_collector])
def test_a_collector_receives_traces_and_metrics_over_either_protocol(
    folder: Path, collector: Callable[[], AbstractContextManager[Collected]]
) -> None:
    with (
        collector() as collected,
        observed_server(folder, model(), collected.endpoint, headers="x-scope=team%20a") as observed,
        httpx.Client() as client,
    ):
        ask(observed, client)
        wait_until(lambda: len(collected.roots) == 1, 60)
        (root,) = collected.roots
        wait_until(lambda: "kvwatch.requests_finished" in collected.metrics, 60)
        wait_until(lambda: collected.metrics["kvwatch.generated_tokens"].sum.data_points[0].as_int == 20, 60)
        page = client.get(f"{observed.server.url}/metrics").text
        families = [family for family in plain_families(page) if family.name.startswith(PREFIX)]
        shown = {family.name for family in families}
        series = [(each.name, *sorted(each.labels.items())) for family in families for each in family.samples]
        assert len(series) == len(set(series)), "the exporter's own metrics must not clash with its subscription's"

    assert root.name == f"chat {MODEL}"
    assert [span.name for span in collected.children(root)] == ["queue", "prefill", "decode"]
    assert collected.headers["x-scope"] == "team a"
    resource = attributes(collected.trace_requests[0].resource_spans[0].resource.attributes)
    assert (resource["service.name"], resource["service.instance.id"]) == ("kvwatch", "e-0")
    sent = {name.replace(".", "_") for name in collected.metrics if name.startswith("kvwatch.")}
    assert sent == shown, "every family of the metrics page, and no other"


def disagreements(collected: Collected, measured: dict[str, float]) -> list[float]:
    """Return by how many seconds the client's time exceeds the sum of a request's phases, for each; least first."""
    roots = {root.trace_id.hex(): root for root in collected.roots}
    found = []
    for trace_id, elapsed in measured.items():
        phases = collected.children(roots[trace_id])
        total = sum(map(seconds, phases))
        assert total == pytest.approx(seconds(roots[trace_id]), abs=1e-6)
        assert total <= elapsed
        found.append(elapsed - total)
    return sorted(found)


def test_phases_agree_with_the_end_to_end_time_that_the_client_measured(folder: Path) -> None:
    with (
        grpc_collector() as collected,
        observed_server(folder, model(), collected.endpoint) as observed,
        httpx.Client() as client,
    ):
        ask(observed, client)  # connects, and warms the tokenizer
        measured = {}
        for number in range(1, 21):
            measured[f"{number:032x}"] = ask(observed, client, {"traceparent": f"00-{number:032x}-{SPAN}-01"})
        wait_until(lambda: len(collected.roots) == 21, 60)

    # Whatever else runs on the machine only adds: the least disturbed request shows that nothing is missing.
    assert disagreements(collected, measured)[0] < 0.005


def test_phases_agree_also_for_requests_that_wait_and_are_preempted(folder: Path) -> None:
    pressure: dict[str, object] = {"num_blocks": 25, "max_num_seqs": 4, "max_batch_tokens": 8, "max_prefill_chunk": 4}
    with (
        grpc_collector() as collected,
        observed_server(folder, model(0.003), collected.endpoint, pressure) as observed,
        ThreadPoolExecutor(6) as pool,
    ):
        controls: list[float] = []

        def timed(number: int) -> tuple[str, float]:
            with httpx.Client() as client:
                client.get(f"{observed.server.url}/health")  # connected before the clock runs
                begin = time.monotonic()
                client.get(f"{observed.server.url}/health")
                controls.append(time.monotonic() - begin)
                headers = {"traceparent": f"00-{number:032x}-{SPAN}-01"}
                return f"{number:032x}", ask(observed, client, headers, max_tokens=40)

        measured = dict(pool.map(timed, range(1, 37)))
        wait_until(lambda: len(collected.roots) == 36, 60)

    away = {
        root.trace_id.hex() for root in collected.roots if {span.name for span in collected.children(root)} == PHASES
    }
    assert len(away) >= 10, "the load was meant to preempt"
    # Six clients, server and collector share one interpreter. What waiting for it costs any request, one that reaches
    # no engine shows under the same load; beyond that, the least disturbed request agrees as in the test above.
    waiting = statistics.median(controls)
    assert disagreements(collected, {trace_id: measured[trace_id] for trace_id in away})[0] < 0.005 + waiting


def test_the_callers_trace_is_continued_and_both_ids_are_on_the_log_lines(folder: Path, logs: io.StringIO) -> None:
    with (
        grpc_collector() as collected,
        observed_server(folder, model(), collected.endpoint) as observed,
        httpx.Client() as client,
    ):
        ask(observed, client, {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"}, stream=False)
        ask(observed, client, {"x-request-id": "no-trace"})
        wait_until(lambda: len(collected.roots) == 2, 60)

    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    by_request = {line["request_id"]: line for line in lines if line["event"] == "request"}
    continued, begun = collected.roots
    assert continued.trace_id.hex() == TRACE
    assert continued.parent_span_id.hex() == SPAN
    assert by_request["mine"]["trace_id"] == TRACE
    assert begun.parent_span_id == b""
    assert by_request["no-trace"]["trace_id"] == begun.trace_id.hex(), "a trace that begins here is in the log too"


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "garbage")],
        [("traceparent", f"00-{'0' * 32}-{SPAN}-01")],
        [("traceparent", f"00-{TRACE}-{'0' * 16}-01")],
        [("traceparent", f"00-{TRACE}-{SPAN}-01"), ("traceparent", f"00-{TRACE}-{SPAN}-01")],
        [("traceparent", f"00-{TRACE}-{SPAN}-01-" + "x" * 5000)],
        [("tracestate", "a=b" * 4000)],
    ],
)
def test_a_hostile_trace_context_is_ignored_and_the_request_answered(
    folder: Path, headers: list[tuple[str, str]]
) -> None:
    with grpc_collector() as collected, observed_server(folder, model(0), collected.endpoint) as observed:
        body = {"model": MODEL, "messages": HI, "max_tokens": 2}
        answer = httpx.post(f"{observed.server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        wait_until(lambda: len(collected.roots) == 1, 60)

    (root,) = collected.roots
    assert root.trace_id.hex() != TRACE
    assert root.parent_span_id == b""
    assert root.trace_state == ""


def test_an_exemplar_on_the_metrics_page_leads_to_a_trace_that_the_collector_has(folder: Path) -> None:
    with (
        grpc_collector() as collected,
        observed_server(folder, model(), collected.endpoint) as observed,
        httpx.Client() as client,
    ):
        for _ in range(3):
            ask(observed, client)
        accept = {"accept": "application/openmetrics-text"}
        page = ""

        def has_exemplars() -> bool:
            nonlocal page
            page = client.get(f"{observed.server.url}/metrics", headers=accept).text
            return len(exemplars(page)) >= 3

        wait_until(has_exemplars, 60)

    found = exemplars(page)
    sent = {(root.trace_id.hex(), root.span_id.hex()) for root in collected.roots}
    assert {"time_to_first_token_seconds", "end_to_end_seconds", "inter_token_latency_seconds"} <= {
        name.removeprefix(PREFIX).removesuffix("_bucket") for name, _, _ in found
    }
    assert {(trace_id, span_id) for _, trace_id, span_id in found} <= sent


def exemplars(page: str) -> list[tuple[str, str, str]]:
    """Return series, trace and span of each exemplar."""
    return [
        (sample.name, sample.exemplar.labels["trace_id"], sample.exemplar.labels["span_id"])
        for family in text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    ]


def test_a_request_that_runs_for_long_is_reported_while_it_runs(folder: Path) -> None:
    with (
        grpc_collector() as collected,
        observed_server(folder, model(0.02), collected.endpoint, long_running_seconds=0.5) as observed,
        httpx.Client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(ask, observed, client, max_tokens=150)
        wait_until(lambda: bool(collected.log_records), 60)
        assert not answer.done()
        answer.result(60)
        wait_until(lambda: len(collected.roots) == 1, 60)

    (root,), (record, *_) = collected.roots, collected.log_records
    assert record.event_name == "kvwatch.request.running"
    assert (record.trace_id, record.span_id) == (root.trace_id, root.span_id)
    assert attributes(record.attributes)["kvwatch.request.state"] == "decode"
    assert attributes(record.attributes)["kvwatch.request.age_seconds"] >= 0.5
    assert len(collected.log_records) <= 3, "then at twice the age each time"


@pytest.mark.usefixtures("logs")
def test_log_lines_are_exported_when_that_is_asked_for_with_the_trace_of_their_request(folder: Path) -> None:
    with (
        grpc_collector() as collected,
        observed_server(folder, model(), collected.endpoint, export_logs=True) as observed,
        httpx.Client() as client,
    ):
        ask(observed, client)
        wait_until(lambda: any(record.body.string_value == "request" for record in collected.log_records), 60)
        wait_until(lambda: len(collected.roots) == 1, 60)
        handlers = list(logging.getLogger().handlers)

    record = next(record for record in collected.log_records if record.body.string_value == "request")
    assert record.trace_id == collected.roots[0].trace_id
    assert attributes(record.attributes)["status"] == 200
    assert len(logging.getLogger().handlers) == len(handlers) - 1, "the handler goes with the exporter"


def test_several_prompts_of_one_call_are_spans_of_one_trace(folder: Path) -> None:
    with grpc_collector() as collected, observed_server(folder, model(0), collected.endpoint) as observed:
        answer = observed.server.post("/v1/completions", prompt=["one", "two", "three"], max_tokens=2)
        assert answer.status_code == 200
        wait_until(lambda: len(collected.roots) == 3, 60)

    assert len({root.trace_id for root in collected.roots}) == 1
    assert {root.name for root in collected.roots} == {f"text_completion {MODEL}"}


def test_genai_histograms_count_what_the_client_saw(folder: Path) -> None:
    with (
        grpc_collector() as collected,
        observed_server(folder, model(), collected.endpoint, server_address="127.0.0.1", server_port=1) as observed,
        httpx.Client() as client,
    ):
        elapsed = sum(ask(observed, client) for _ in range(5))
        wait_until(lambda: durations(collected)[0] == 5 and len(collected.roots) == 5, 60)

    count, total = durations(collected)
    assert count == 5
    assert total == pytest.approx(sum(map(seconds, collected.roots)), abs=1e-6)
    assert total <= elapsed
    point = collected.metrics["gen_ai.server.request.duration"].histogram.data_points[0]
    assert attributes(point.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvwatch",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "server.address": "127.0.0.1",
        "server.port": 1,
    }


def durations(collected: Collected) -> tuple[int, float]:
    metric = collected.metrics.get("gen_ai.server.request.duration")
    if metric is None:
        return 0, 0.0
    return sum(point.count for point in metric.histogram.data_points), sum(
        point.sum for point in metric.histogram.data_points
    )


def test_what_the_last_requests_left_goes_out_when_the_observatory_stops(folder: Path) -> None:
    with (
        grpc_collector() as collected,
        observed_server(folder, model(), collected.endpoint, batch_seconds=60, metrics_interval_seconds=60) as observed,
        httpx.Client() as client,
    ):
        ask(observed, client)
        observed.server.wait_idle()
        assert not collected.roots

    assert len(collected.roots) == 1
    assert collected.metrics["kvwatch.generated_tokens"].sum.data_points[0].as_int == 20
