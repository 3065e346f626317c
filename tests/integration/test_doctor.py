"""`kvwatch doctor` against real servers: exit status, text and JSON; engines, sidecars, foreign pages, nobody."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from builders import NullModel
from metrics_stub import one_page
from naive_engine import NaiveEngine
from openai_server import RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer
from sidecar_stage import sidecar_stage

from kvwatch.doctor.asking import Asker, TargetUnreachableError
from kvwatch.doctor.command import COMMAND, EXIT_FINDINGS
from kvwatch.errors import ConfigError
from kvwatch.exporters.identity import EngineIdentity
from kvwatch.insight.diagnosis import DiagnosisReport
from kvwatch.observatory import Observatory
from kvwatch.observatory.plan import Subject, plan_observatory
from kvwatch.observatory.settings import ObservatorySettings
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.step import StepInput


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


@contextmanager
def observed_server(folder: Path, model: NullModel) -> Iterator[tuple[RunningServer, str]]:
    """Serve the arithmetic model, and its metrics on a listener of their own; give that listener's address."""
    with arithmetic_server(folder, model) as server:
        observatory = Observatory(
            server.log, server.engine, EngineIdentity("chat", 0, "tiny"), metrics_listen="127.0.0.1:0"
        )
        observatory.start()
        try:
            assert observatory.metrics_address is not None
            wait_for_gauges(observatory)
            yield server, "http://{}:{}".format(*observatory.metrics_address)
        finally:
            observatory.stop()


def wait_for_gauges(observatory: Observatory) -> None:
    deadline = time.monotonic() + 60
    while not observatory.view.gauges:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def doctor(*words: str) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args(words))


def seen(url: str, between: Callable[[], object]) -> DiagnosisReport:
    def act_and_wait(seconds: float) -> None:
        between()
        time.sleep(seconds)

    asker = Asker(url, sleep=act_and_wait)
    try:
        return asker.observe(2.0)
    finally:
        asker.close()


def test_a_healthy_engine_is_exit_0_and_one_whose_steps_fail_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = NullModel(401)
    with observed_server(folder, model) as (server, url):
        server.post("/v1/completions", prompt="A block is a fixed number of slots", max_tokens=4)

        assert doctor(url, "--seconds", "1.2") == 0
        assert "healthy" in capsys.readouterr().out

        def fail(_: StepInput) -> None:
            raise RuntimeError("the device was lost")

        model.on_step = fail
        report = seen(url, lambda: server.post("/v1/completions", prompt="A block", max_tokens=4))

    (engine,) = report.engines
    assert (engine.engine, engine.model_name) == ("chat", "tiny")
    assert engine.diagnosis is not None
    assert [each.rule for each in engine.diagnosis.findings] == ["engine_unwell"]
    assert not report.is_healthy


def test_a_sidecar_that_reaches_nobody_is_a_finding_in_text_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    with sidecar_stage("lost=vllm+http://127.0.0.1:9") as stage:
        assert doctor(stage.url, "--seconds", "1.2") == EXIT_FINDINGS
        text = capsys.readouterr().out
        assert doctor(stage.url + "/metrics", "--seconds", "1.2", "--json") == EXIT_FINDINGS
        printed = json.loads(capsys.readouterr().out)
        own = stage.sidecar.diagnoses()

    assert "CRITICAL source_incomplete: The sidecar does not reach the engine" in text
    assert "next: " in text
    (engine,) = printed["engines"]
    assert engine["engine"] == "lost"
    assert [each["rule"] for each in engine["diagnosis"]["findings"]] == ["source_incomplete"]
    assert {"rule": "leak", "missing": "kvwatch_kv_orphaned_blocks"} in engine["diagnosis"]["unjudged"]
    assert [f.rule for each in own.engines if each.diagnosis for f in each.diagnosis.findings] == ["source_incomplete"]


VLLM_PAGE = """vllm:num_requests_running{{engine="0",model_name="m"}} 8
vllm:num_requests_waiting{{engine="0",model_name="m"}} 5
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}
vllm:num_preemptions_total{{engine="0",model_name="m"}} 0
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="1001"}} 1
vllm:request_queue_time_seconds_bucket{{engine="0",model_name="m",le="+Inf"}} 40
vllm:request_queue_time_seconds_sum{{engine="0",model_name="m"}} 12
"""


@pytest.mark.parametrize(("usage", "rules"), [(0.99, ["kv_bound"]), (0.4, [])])
def test_a_vllm_is_judged_by_what_its_page_tells(usage: float, rules: list[str]) -> None:
    with one_page(VLLM_PAGE.format(usage=usage)) as url:
        report = seen(url, lambda: None)

    (engine,) = report.engines
    assert engine.engine == "vllm"
    assert engine.diagnosis is not None
    assert [each.rule for each in engine.diagnosis.findings] == rules
    missed = {each.rule for each in engine.diagnosis.unjudged}
    assert {"leak", "waiting_though_free", "block_size_too_large"} <= missed


def test_nobody_there_and_no_page_are_said_with_the_address() -> None:
    with pytest.raises(TargetUnreachableError, match=r"127\.0\.0\.1:9/metrics cannot be reached"):
        doctor("127.0.0.1:9", "--seconds", "1")
    with one_page("<html>hello</html>") as url, pytest.raises(TargetUnreachableError, match="says nothing"):
        doctor(url, "--seconds", "1")


@pytest.mark.parametrize(
    "words", [("http://", "--seconds", "2"), ("ftp://a", "--seconds", "2"), ("a", "--seconds", "0")]
)
def test_wrong_usage_is_refused_before_anything_is_asked(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        doctor(*words)


def test_a_diagnosis_that_the_target_has_made_itself_is_taken() -> None:
    with sidecar_stage("lost=vllm+http://127.0.0.1:9") as stage:
        own = msgspec.json.encode(stage.sidecar.diagnoses())
    with one_page(own.decode(), path="/admin/v1/diagnosis") as url:
        asker = Asker(url)
        found = asker.own_diagnosis()
        asker.close()

    assert found == msgspec.json.decode(own, type=DiagnosisReport)


def test_the_admin_listener_has_looked_before_and_is_asked_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(4096)
    engine = NaiveEngine(log)
    settings = ObservatorySettings(
        metrics_listen="off", grpc_listen="off", admin_listen="127.0.0.1:0", flight_dir="off"
    )
    identity = EngineIdentity("chat", 0, "tiny")
    built = plan_observatory(settings, "chat", tmp_path).build(Subject(log, engine, identity, config={}))
    built.observatory.start()
    try:
        assert built.admin is not None
        assert built.admin.address is not None
        deadline = time.monotonic() + 60
        while built.desk.diagnosis().diagnosis is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        status = doctor("http://127.0.0.1:9", "--admin", "http://{}:{}".format(*built.admin.address))
    finally:
        built.observatory.stop()

    assert status == 0
    assert capsys.readouterr().out.startswith("chat (tiny), over ")
