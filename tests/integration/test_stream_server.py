"""The stream over real gRPC: access, health, reflection, many subscribers, restarts, bounded ends."""

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from openai_server import wait_until
from stream_stage import LedgerMirror, StreamStage, bounded, connected, stream_stage, wait_for

from kvwatch.errors import ExporterError
from kvwatch.ledger.pace import POLL_SECONDS
from kvwatch.stream.access import StreamOptions
from kvwatch.stream.client import EventBatch, Interrupted, TelemetryClient, follow
from kvwatch.stream.codec import StreamError
from kvwatch.stream.contract import SCHEMA, Gap, Started, SubscribeRequest
from kvwatch.stream.descriptors import file_descriptor
from kvwatch.stream.server import MAX_SUBSCRIBERS
from kvwatch.telemetry.events import RequestRejected
from kvwatch.telemetry.snapshot import EngineSnapshot

STATE = SubscribeRequest(from_snapshot=True)


@pytest.fixture
def stage() -> Iterator[StreamStage]:
    with stream_stage() as stage:
        yield stage


def test_a_snapshot_is_the_engines_own(stage: StreamStage) -> None:
    stage.step(30)
    with TelemetryClient(stage.address) as client:
        assert client.snapshot() == stage.engine.snapshot()


def test_a_mirror_in_another_process_would_equal_the_engine(stage: StreamStage) -> None:
    stage.step(20)
    mirror = LedgerMirror()
    with connected(stage) as client:
        stream = client.subscribe(STATE)
        mirror.catch_up(stream, lambda: mirror.num_snapshots == 1)
        stage.step(50)

        mirror.catch_up(stream, lambda: mirror.ledger.next_seq == stage.log.head)

        assert mirror.ledger.differences(client.snapshot()) == []
    assert mirror.gaps == []


def test_the_first_message_says_where_and_when_the_subscription_begins(stage: StreamStage) -> None:
    stage.step(5)
    with connected(stage) as client:
        started = wait_for(client.subscribe(), Started)

    assert (started.seq, started.head, started.oldest) == (stage.log.head, stage.log.head, 0)
    assert started.epoch == stage.server.epoch
    assert started.labels == {"engine": "test"}
    assert abs(started.wall_offset_ns + time.monotonic_ns() - time.time_ns()) < 1e9


def test_a_follower_is_kept_up_to_date(stage: StreamStage) -> None:
    class Loaded:
        def __init__(self) -> None:
            self.calls: list[str] = []
            self.seqs: list[int] = []

        def load(self, snapshot: EngineSnapshot) -> None:
            self.seqs.append(snapshot.seq - 1)
            self.calls.append("load")

        def apply(self, events: Any) -> None:
            self.seqs += [event.seq for event in events]

        def settle(self) -> None:
            self.calls.append("settle")

        def publish(self) -> None:
            self.calls.append("publish")

    stage.step(3)
    head, follower = stage.log.head, Loaded()
    with connected(stage) as client:
        stream = client.subscribe(STATE)
        thread = threading.Thread(target=follow, args=(stream, follower))
        thread.start()
        wait_until(lambda: "load" in follower.calls)
        stage.step(3)
        wait_until(lambda: bool(follower.seqs) and follower.seqs[-1] == stage.log.head - 1)
        stream.cancel()
        thread.join(5)

    assert not thread.is_alive()
    assert follower.seqs == list(range(head - 1, stage.log.head))
    assert (follower.calls[0], follower.calls[-1]) == ("load", "publish")


@pytest.mark.parametrize("method", ["Subscribe", "Snapshot"])
def test_bytes_that_are_no_request_are_refused_and_cost_no_traceback_in_the_log(
    stage: StreamStage, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with grpc.insecure_channel(stage.address) as channel:
        call = channel.unary_stream(f"/kvwatch.v1.Telemetry/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\xff\xff\xff", timeout=10))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.exc_info]


def test_a_wrong_request_is_refused_with_the_remedy(stage: StreamStage) -> None:
    with connected(stage) as client:
        with pytest.raises(StreamError, match=r"did you mean request.finished.*INVALID_ARGUMENT"):
            next(client.subscribe(SubscribeRequest(events=["request.finish"]), is_resuming=True))
        with pytest.raises(StreamError, match="in the future"):
            next(client.subscribe(SubscribeRequest(seq=stage.log.head + 5)))


def test_32_subscribers_get_everything_and_one_that_stops_reading_stops_no_other(stage: StreamStage) -> None:
    with ExitStack() as stack:
        mirrors = []
        for _ in range(33):
            client = stack.enter_context(TelemetryClient(stage.address))
            stream, mirror = client.subscribe(STATE), LedgerMirror()
            mirror.catch_up(stream, lambda mirror=mirror: mirror.num_snapshots == 1)  # type: ignore[misc]
            mirrors.append((stream, mirror))
        assert stage.server.num_subscribers == 33

        for _ in range(20):
            stage.step(10)
        for stream, mirror in mirrors[1:]:  # the first never reads
            mirror.catch_up(stream, lambda mirror=mirror: mirror.ledger.next_seq == stage.log.head)  # type: ignore[misc]
            assert mirror.ledger.differences(stage.engine.snapshot()) == []
            assert mirror.gaps == []
    wait_until(lambda: stage.server.num_subscribers == 0)


def test_the_number_of_subscribers_is_bounded_and_a_place_is_free_again_when_one_leaves(stage: StreamStage) -> None:
    with connected(stage) as client:
        streams = [client.subscribe() for _ in range(MAX_SUBSCRIBERS)]
        for stream in streams:
            wait_for(stream, Started)
        with pytest.raises(StreamError, match=rf"{MAX_SUBSCRIBERS} subscribers are connected.*RESOURCE_EXHAUSTED"):
            next(client.subscribe())

        streams.pop().cancel()
        wait_until(lambda: stage.server.num_subscribers < MAX_SUBSCRIBERS)

        wait_for(client.subscribe(), Started)


def test_a_client_that_vanishes_gives_up_its_place_in_the_log(stage: StreamStage) -> None:
    num_cursors = len(stage.log._cursors)
    with connected(stage) as client:
        wait_for(client.subscribe(), Started)
        wait_until(lambda: len(stage.log._cursors) == num_cursors + 1)
    wait_until(lambda: len(stage.log._cursors) == num_cursors)
    assert stage.server.num_subscribers == 0


def test_no_call_ends_by_an_error_of_the_server(stage: StreamStage) -> None:
    """Vanishing clients are no defects: they must not be counted as such."""
    for _ in range(5):
        with connected(stage) as client:
            wait_for(client.subscribe(STATE), Started)
            stage.step(5)
    wait_until(lambda: stage.server.num_subscribers == 0)

    errors = [s.value for s in stage.server.samples() if s.metric.name == "telemetry_errors"]
    assert errors == [0]


# ---------------------------------------------------------------- restarts


def test_after_a_restart_the_epoch_is_another_and_a_resuming_stream_is_healed_by_a_snapshot() -> None:
    mirror = LedgerMirror()
    with stream_stage() as first:
        first.step(20)
        address, epoch = first.address, first.server.epoch
        client = TelemetryClient(address)
        stream = client.subscribe(STATE, is_resuming=True)
        mirror.catch_up(stream, lambda: mirror.num_snapshots == 1)
        first.step(3)
        mirror.catch_up(stream, lambda: mirror.ledger.next_seq == first.log.head)
    wait_for(stream, Interrupted)

    with stream_stage(options=StreamOptions(listen=address)) as second:
        second.step(40)  # its log has the numbers that the first one had, for other events
        started = wait_for(stream, Started)
        assert started.epoch == second.server.epoch != epoch
        mirror.catch_up(stream, lambda: mirror.num_snapshots == 2 and mirror.ledger.next_seq == second.log.head)
        assert mirror.ledger.differences(second.engine.snapshot()) == []
        stream.cancel()
        client.close()


def test_a_connection_that_breaks_is_taken_up_again_without_a_snapshot_and_without_loss(stage: StreamStage) -> None:
    with Relay(stage.address) as relay:
        mirror = LedgerMirror()
        with TelemetryClient(relay.address) as client:
            stream = client.subscribe(STATE, is_resuming=True)
            mirror.catch_up(stream, lambda: mirror.num_snapshots == 1)
            for _ in range(3):
                relay.cut()
                stage.step(10)
                mirror.catch_up(stream, lambda: mirror.ledger.next_seq == stage.log.head, 30)
                assert mirror.ledger.differences(stage.engine.snapshot()) == []
            stream.cancel()
    assert (mirror.num_snapshots, mirror.gaps) == (1, [])


class Relay:
    """Passes TCP on to a server, until the connections are cut."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections; new ones are accepted."""
        ends, self._ends = self._ends, []
        for end in ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # its other end was first
        for end in ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: Any, target: Any) -> None:
        try:
            while content := source.recv(65_536):
                target.sendall(content)
        except OSError:
            return


def test_without_resuming_a_lost_connection_is_an_error_that_says_where() -> None:
    with stream_stage() as stage:
        client = TelemetryClient(stage.address)
        stream = client.subscribe()
        wait_for(stream, Started)
        address = stage.address

    with pytest.raises(StreamError, match=rf"{address}: .*telemetry has ended"):
        list(bounded(stream))
    client.close()


def fill_connection(stage: StreamStage) -> None:
    """Let things happen until the server could not send any more for a while."""
    deadline = time.monotonic() + 60
    lag_before = 0
    while not 0 < lag_before < stage.lag:
        assert time.monotonic() < deadline
        lag_before = stage.lag
        for _ in range(100):
            stage.engine.emit(RequestRejected(request="x" * 10_000, reason="invalid"))
        time.sleep(1.2 * POLL_SECONDS)  # it has been looked at


def test_stopping_is_bounded_although_a_subscriber_does_not_read() -> None:
    with stream_stage(capacity=256) as stage, connected(stage) as client:
        stream = client.subscribe(STATE)
        wait_for(stream, Started)
        fill_connection(stage)
        began = time.monotonic()

        stage.observatory.stop()

        assert time.monotonic() - began < 15
        assert not stage.observatory.is_running
        assert not stage.log.active
        stream.cancel()


def test_memory_does_not_grow_with_what_nobody_reads() -> None:
    with stream_stage(capacity=256) as stage, connected(stage) as client:
        stream = client.subscribe(STATE)
        wait_for(stream, Started)
        fill_connection(stage)
        before = psutil.Process().memory_info().rss

        for _ in range(100):
            for _ in range(100):
                stage.engine.emit(RequestRejected(request="x" * 10_000, reason="invalid"))
            time.sleep(0.01)

        grown = psutil.Process().memory_info().rss - before
        assert stage.lag > 10_000
        assert grown < 30e6, f"{grown / 1e6:.0f} MB more for 100 MB that nobody read"
        gap = wait_for(stream, Gap)
        assert gap.num_missed > 9_000


def test_subscribers_get_what_happened_before_the_end() -> None:
    with stream_stage() as stage, connected(stage) as client:
        stream = client.subscribe(STATE)
        mirror = LedgerMirror()
        mirror.catch_up(stream, lambda: mirror.num_snapshots == 1)
        stage.step(30)
        stage.observatory.stop()

        with pytest.raises(StreamError, match="telemetry has ended"):
            mirror.catch_up(stream, lambda: False)

        assert mirror.ledger.differences(stage.engine.snapshot()) == []


def test_a_taken_port_is_an_error_of_the_start(stage: StreamStage) -> None:
    other = StreamStage(options=StreamOptions(listen=stage.address))
    with pytest.raises(ExporterError, match="--grpc-listen: cannot listen on"):
        other.observatory.start()


# ---------------------------------------------------------------- access


def test_with_a_token_file_only_those_who_send_a_token_of_it_get_anything(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("alpha\nbeta\n", encoding="utf-8")
    with stream_stage(options=StreamOptions(listen="127.0.0.1:0", token_file=str(path))) as stage:
        for token in ("alpha", "beta"):
            with TelemetryClient(stage.address, token=token) as client:
                wait_until(client.is_alive)
                assert client.snapshot().seq == 0
                wait_for(client.subscribe(), Started)
        for wrong in (None, "", "alpha2", "alpha "):
            with TelemetryClient(stage.address, token=wrong) as client:
                assert client.is_alive(), "probes have no token"
                with pytest.raises(StreamError, match=r"authorization: Bearer TOKEN.*UNAUTHENTICATED"):
                    client.snapshot()
                with pytest.raises(StreamError, match="UNAUTHENTICATED"):
                    next(client.subscribe(is_resuming=True))
        with grpc.insecure_channel(stage.address) as channel, pytest.raises(grpc.RpcError) as refused:
            list(ServerReflectionStub(channel).ServerReflectionInfo(iter([ServerReflectionRequest(list_services="")])))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_subscription_ends_when_its_token_is_taken_out_of_the_file_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("alpha\nbeta\n", encoding="utf-8")
    with stream_stage(options=StreamOptions(listen="127.0.0.1:0", token_file=str(path))) as stage:
        alpha, beta = (TelemetryClient(stage.address, token=token) for token in ("alpha", "beta"))
        with alpha, beta:
            ending, staying = alpha.subscribe(is_resuming=True), beta.subscribe(is_resuming=True)
            wait_for(ending, Started)
            wait_for(staying, Started)

            path.write_text("beta\n", encoding="utf-8")

            with pytest.raises(StreamError, match=r"no longer accepted.*UNAUTHENTICATED"):
                wait_for(ending, Gap)
            wait_until(lambda: stage.server.num_subscribers == 1)
            stage.step()
            assert wait_for(staying, EventBatch).events, "who has a token of the file yet is not disturbed"


def test_a_subscriber_that_reads_nothing_loses_its_place_with_its_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("alpha\nbeta\n", encoding="utf-8")
    options = StreamOptions(listen="127.0.0.1:0", token_file=str(path))
    with stream_stage(options=options) as stage, TelemetryClient(stage.address, token="alpha") as client:
        stream = client.subscribe()
        wait_for(stream, Started)
        fill_connection(stage)

        path.write_text("beta\n", encoding="utf-8")

        wait_until(lambda: stage.server.num_subscribers == 0)
        with pytest.raises(StreamError, match="UNAUTHENTICATED"):
            list(bounded(stream))


def test_with_a_certificate_the_stream_is_encrypted_and_plain_callers_get_nothing(tmp_path: Path) -> None:
    certificate, key = tmp_path / "a.crt", tmp_path / "a.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=60
    )
    options = StreamOptions(listen="127.0.0.1:0", certificate=str(certificate), key=str(key))
    with stream_stage(options=options) as stage:
        roots = certificate.read_bytes()
        with TelemetryClient(f"grpcs://{stage.address}", root_certificates=roots) as client:
            wait_until(client.is_alive)
            assert client.snapshot() == stage.engine.snapshot()
        with TelemetryClient(stage.address) as client, pytest.raises(StreamError, match="UNAVAILABLE"):
            client.snapshot()
        with TelemetryClient(f"grpcs://{stage.address}") as client, pytest.raises(StreamError, match="UNAVAILABLE"):
            client.snapshot()


def test_health_says_whether_the_engine_makes_progress(stage: StreamStage) -> None:
    with connected(stage) as client, grpc.insecure_channel(stage.address) as channel:
        assert (client.is_alive(), client.is_ready()) == (True, True)
        stage.engine.is_answering = False
        wait_until(lambda: not client.is_alive())
        wait_until(lambda: not client.is_ready())
        answer = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(StreamError, match="no answer within"):
            client.snapshot()


def test_an_engine_that_is_not_there_is_neither_alive_nor_ready() -> None:
    with TelemetryClient("127.0.0.1:1") as client:
        assert (client.is_alive(), client.is_ready()) == (False, False)
        with pytest.raises(StreamError, match="is this its --grpc-listen address"):
            client.snapshot()


def test_reflection_tells_services_and_messages(stage: StreamStage) -> None:
    with connected(stage), grpc.insecure_channel(stage.address) as channel:
        asked = [
            ServerReflectionRequest(list_services=""),
            ServerReflectionRequest(file_containing_symbol="kvwatch.v1.Telemetry"),
            ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        ]
        services, ours, health = ServerReflectionStub(channel).ServerReflectionInfo(iter(asked), timeout=10)

    names = {service.name for service in services.list_services_response.service}
    assert names == {"kvwatch.v1.Telemetry", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    (content,) = ours.file_descriptor_response.file_descriptor_proto
    assert FileDescriptorProto.FromString(content) == file_descriptor(SCHEMA)
    assert health.file_descriptor_response.file_descriptor_proto


def test_a_gap_is_counted_in_the_metrics_also_after_its_subscriber_has_left() -> None:
    with stream_stage(capacity=64) as stage:
        stage.step(60)
        with connected(stage) as client:
            gap = wait_for(client.subscribe(SubscribeRequest(seq=0)), Gap)
        wait_until(lambda: stage.server.num_subscribers == 0)

        counts = {sample.metric.name: sample.value for sample in stage.server.samples()}

    assert (counts["telemetry_gaps"], counts["telemetry_dropped"]) == (1, gap.num_missed)


def test_batches_name_the_number_to_go_on_from(stage: StreamStage) -> None:
    with connected(stage) as client:
        stream = client.subscribe()
        wait_for(stream, Started)
        stage.step(2)
        batch = wait_for(stream, EventBatch)

    assert batch.next_seq == batch.events[-1].seq + 1
