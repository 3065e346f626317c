"""Settings of the observatory: checked before anything is loaded, then made into parts."""

import socket
from pathlib import Path

import pytest
from builders import NullModel, make_core

from kvwatch.control import EngineControl
from kvwatch.errors import ConfigError, ExporterError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.observatory.plan import Subject, plan_observatory
from kvwatch.observatory.settings import ObservatorySettings
from kvwatch.recorder.reader import Recording
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot


class InlineControl:
    """An engine that is stepped by the test's own thread."""

    def __init__(self, log: EventLog) -> None:
        self._core = make_core(NullModel(), log=log)

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:  # noqa: ARG002 - answered at once
        return self._core.snapshot()

    def is_alive(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return True


def settings(**given: object) -> ObservatorySettings:
    """Return settings that open no port unless the test asks for one."""
    quiet: dict[str, object] = {
        "metrics_listen": "off",
        "grpc_listen": "off",
        "admin_listen": "off",
        "flight_dir": "off",
    }
    return ObservatorySettings(**(quiet | given))  # type: ignore[arg-type]


def subject() -> Subject:
    log = EventLog()
    control: EngineControl = InlineControl(log)
    return Subject(log, control, EngineIdentity("a", 1, "m"), config={})


def test_by_default_there_is_a_flight_recorder_in_the_cache_folder_and_no_recording(tmp_path: Path) -> None:
    plan = plan_observatory(
        ObservatorySettings(metrics_listen="off", grpc_listen="off", admin_listen="off"), "a.0", tmp_path
    )

    assert plan.recorder is not None
    assert plan.recorder.flight_dir == tmp_path / "flight"
    assert not plan.recorder.is_flight_dir_asked_for
    assert plan.recorder.record_dir is None
    assert (plan.recorder.flight_bytes, plan.recorder.flight_seconds) == (16 * 2**20, 30.0)
    assert not plan.recorder.keep_token_ids


def test_what_is_off_is_not_built(tmp_path: Path) -> None:
    built = plan_observatory(settings(), "a.0", tmp_path).build(subject())

    assert (built.recorder, built.stream) == (None, None)
    built.observatory.start()
    assert built.observatory.metrics_address is None
    built.observatory.stop()
    assert not list(tmp_path.iterdir())


def test_everything_that_is_on_runs_and_counts_itself_by_name(tmp_path: Path) -> None:
    given = settings(
        metrics_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", admin_listen="127.0.0.1:0",
        flight_dir=str(tmp_path / "flight"), record_dir=str(tmp_path / "records"), otlp_endpoint="grpc://127.0.0.1:9",
    )  # fmt: skip
    built = plan_observatory(given, "a.0", tmp_path).build(subject())
    built.observatory.start()
    try:
        assert built.stream is not None
        assert built.stream.is_serving.wait(10)
        assert built.observatory.metrics_address is not None
        subscribers = {
            sample.labels[0]
            for sample in built.observatory.samples()
            if sample.metric.name == "telemetry_gaps"
        }  # fmt: skip
        assert subscribers >= {"ledger", "recorder", "stream", "otel", "admin"}
    finally:
        built.observatory.stop()
    assert list((tmp_path / "flight").iterdir())


def test_recordings_and_stream_name_a_run_of_the_engine_alike(tmp_path: Path) -> None:
    given = settings(grpc_listen="127.0.0.1:0", record_dir=str(tmp_path))
    plan = plan_observatory(given, "a.0", tmp_path)

    first, second = plan.build(subject()), plan.build(subject())

    assert first.stream is not None
    assert second.stream is not None
    assert first.stream.epoch != second.stream.epoch
    first.observatory.start()
    first.observatory.stop()
    (path,) = tmp_path.glob("*.kvrec")
    with Recording(path) as recording:
        assert recording.header.epoch == first.stream.epoch


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"record_bytes": "many", "record_dir": "x"}, "--record-bytes"),
        ({"record_file_bytes": "0", "record_dir": "x"}, "--record-file-bytes"),
        ({"record_file_bytes": "1GiB", "record_dir": "x"}, "--record-bytes"),
        ({"flight_bytes": "1", "flight_dir": "x"}, "--flight-bytes"),
        ({"record_dir": ""}, "--record-dir"),
        ({"otlp_endpoint": "collector"}, "--otlp-endpoint"),
        ({"otlp_endpoint": "http://c:4318", "otlp_headers": "no pair"}, "--otlp-headers"),
        ({"slo_ttft": "soon"}, "--slo-ttft"),
        ({"grpc_listen": "0.0.0.0:0"}, "--grpc-token-file"),
        ({"grpc_listen": "127.0.0.1:0", "grpc_token_file": "no-such-file"}, "--grpc-token-file"),
        ({"grpc_listen": "127.0.0.1:0", "grpc_cert": "only-one"}, "--grpc-key"),
        ({"metrics_listen": "nowhere"}, "--metrics-listen"),
        ({"metrics_listen": "..:1"}, "--metrics-listen"),
        ({"grpc_listen": "a..b:1"}, "--grpc-listen"),
        ({"admin_listen": "0.0.0.0:0"}, "--admin-token-file"),
        ({"admin_listen": "127.0.0.1:0", "admin_token_file": "no-such-file"}, "--admin-token-file"),
        ({"admin_listen": "127.0.0.1:0", "admin_audit_file": "/no/such/folder/x"}, "--admin-audit-file"),
        ({"admin_listen": "127.0.0.1:0", "admin_hosts": "http://x"}, "--admin-hosts"),
        ({"record_dir": "~nobody-of-that-name/x"}, "--record-dir"),
        ({"flight_dir": "~nobody-of-that-name"}, "--flight-dir"),
        ({"record_dir": "/dev/null/x"}, "--record-dir"),
        ({"flight_dir": "/dev/null"}, "--flight-dir"),
        ({"slo_ttft": "1e300"}, "--slo-ttft"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_built(
    tmp_path: Path, given: dict[str, object], named: str
) -> None:
    with pytest.raises((ConfigError, ExporterError), match=named):
        plan_observatory(settings(**given), "a.0", tmp_path)


@pytest.mark.parametrize("which", ["metrics_listen", "grpc_listen", "admin_listen"])
def test_a_port_that_is_taken_is_refused_before_anything_is_built(tmp_path: Path, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {which: f"127.0.0.1:{taken.getsockname()[1]}"}
        with pytest.raises(ExporterError, match=which.replace("_", "-")):
            plan_observatory(settings(**given), "a.0", tmp_path)
