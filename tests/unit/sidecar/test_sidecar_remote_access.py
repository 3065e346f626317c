"""A sidecar beside a kvwatch engine behind TLS and a token, and the traces that it makes of that engine's requests."""

import time
from collections import Counter
from pathlib import Path

import pytest
from certificates import make_certificate
from otlp_receiver import attributes, grpc_collector
from sidecar_stage import of_engine, sidecar_stage, wait_until
from stream_stage import stream_stage

from kvwatch.stream.access import StreamOptions
from kvwatch.telemetry.events import RequestFinished, RequestQueued

RANK = (("dp_rank", "0"),)


def test_over_tls_an_engine_is_watched_by_who_trusts_it_and_has_its_token(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "engine")
    other, _ = make_certificate(tmp_path, "other")
    right, wrong, changing = tmp_path / "right", tmp_path / "wrong", tmp_path / "changing.pem"
    right.write_text("s3cret\n")
    wrong.write_text("guess\n")
    changing.write_bytes(Path(other).read_bytes())
    options = StreamOptions(listen="127.0.0.1:0", token_file=str(right), certificate=certificate, key=key)
    with stream_stage(options=options) as stage:
        stage.step(20)
        url = f"grpcs://{stage.address}"
        with sidecar_stage(
            f"good={url}?token_file={right}&ca_file={certificate}",
            f"guesses={url}?token_file={wrong}&ca_file={certificate}",
            f"nameless={url}?ca_file={certificate}",
            f"distrusts={url}?token_file={right}&ca_file={other}",
            f"plain=grpc://{stage.address}?token_file={right}",
            f"later={url}?token_file={right}&ca_file={changing}",
        ) as sidecar:
            sidecar.wait_until_watched(1)
            time.sleep(2)
            page = sidecar.page()
            names = ("good", "guesses", "nameless", "distrusts", "plain", "later")
            ups = {name: of_engine(page, name)["kvwatch_source_up", RANK] for name in names}
            assert ups == dict.fromkeys(names, 0) | {"good": 1}
            changing.write_bytes(Path(certificate).read_bytes())
            wait_until(sidecar.page, lambda page: of_engine(page, "later")["kvwatch_source_up", RANK] == 1, 60)


@pytest.mark.timeout(120)
def test_requests_of_a_remote_engine_become_traces_once_each_at_the_engines_own_times() -> None:
    with stream_stage() as stage, grpc_collector() as collected:
        stage.step(30)
        cursor = stage.log.subscribe("test")
        with sidecar_stage(f"near=grpc://{stage.address}", otlp_endpoint=collected.endpoint) as sidecar:
            sidecar.wait_until_watched(1)
            wait_until(sidecar.page, lambda page: of_engine(page, "near").get(("kvwatch_source_up", RANK)) == 1)
            cursor.read(1 << 20)
            stage.step(200)
            events = cursor.read(1 << 20)
            queued = {event.request: event for event in events if isinstance(event, RequestQueued)}
            finished = {event.request for event in events if isinstance(event, RequestFinished)}
            whole = queued.keys() & finished
            assert len(whole) > 20
            wait_until(sidecar.page, lambda page: _num_finished(page) >= len(finished))
        roots = {str(attributes(root.attributes)["kvwatch.request.id"]): root for root in collected.roots}
        counts = Counter(str(attributes(root.attributes)["kvwatch.request.id"]) for root in collected.roots)
        assert whole <= counts.keys()
        assert set(counts.values()) == {1}
        offset_ns = stage.log.clock.wall_ns() - stage.log.clock.monotonic_ns()
        for request in whole:
            assert abs(roots[request].start_time_unix_nano - (queued[request].time_ns + offset_ns)) < 50_000_000
        instances = {
            attributes(resource.resource.attributes)["service.instance.id"]
            for request in collected.trace_requests
            for resource in request.resource_spans
        }
        assert instances == {"near-0"}


def _num_finished(page: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> float:
    found = of_engine(page, "near")
    return sum(value for (name, _), value in found.items() if name == "kvwatch_requests_finished_total")
