"""`kvwatch doctor` against real servers: exit status, text and JSON; engines, sidecars, foreign pages, nobody."""

import argparse
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from builders import NullModel
from metrics_stub import one_page
from naive_engine import NaiveEngine
from openai_server import RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer, wait_until
from sidecar_stage import sidecar_stage

from kvwatch.admin.credentials import TOKEN_VARIABLE
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


def test_what_is_no_diagnosis_is_refused_however_deep_it_nests() -> None:
    with one_page('{"x": ' + "[" * 100_000, path="/admin/v1/diagnosis") as url:
        asker = Asker(url)
        with pytest.raises(TargetUnreachableError, match="something else"):
            asker.own_diagnosis()
        asker.close()


@contextmanager
def admin_listener(folder: Path, listen: str = "127.0.0.1:0", token_file: Path | None = None) -> Iterator[str]:
    """Observe an idle engine until it was diagnosed; give the admin listener's address."""
    log = EventLog(4096)
    settings = ObservatorySettings(
        metrics_listen="off", grpc_listen="off", flight_dir="off", admin_listen=listen,
        admin_token_file=None if token_file is None else str(token_file),
    )  # fmt: skip
    identity = EngineIdentity("chat", 0, "tiny")
    built = plan_observatory(settings, "chat", folder).build(Subject(log, NaiveEngine(log), identity, config={}))
    built.observatory.start()
    try:
        assert built.admin is not None
        assert built.admin.address is not None
        wait_until(lambda: built.desk.diagnosis().diagnosis is not None, 60)
        yield f"http://127.0.0.1:{built.admin.address[1]}"
    finally:
        built.observatory.stop()


def test_the_admin_listener_has_looked_before_and_is_asked_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with admin_listener(tmp_path) as url:
        status = doctor("http://127.0.0.1:9", "--admin", url)

    assert status == 0
    assert capsys.readouterr().out.startswith("chat (tiny), over ")


# ---------------------------------------------------------------- what is said meanwhile


@pytest.mark.parametrize("is_terminal", [True, False])
def test_who_sits_at_a_terminal_hears_what_is_waited_for_and_a_pipe_gets_the_result_only(*, is_terminal: bool) -> None:
    terminal, end = pty.openpty()
    try:
        with one_page(VLLM_PAGE.format(usage=0.4)) as page:
            words = [sys.executable, "-m", "kvwatch", "doctor", page, "--seconds", "1"]
            ended = subprocess.run(
                words, stdout=subprocess.PIPE, stderr=end if is_terminal else subprocess.PIPE, check=True, timeout=120
            )
        said = os.read(terminal, 4096) if is_terminal else ended.stderr
    finally:
        os.close(end)
        os.close(terminal)

    assert ended.stdout.startswith(b"vllm (m), over ")
    assert (b"second look" in said) is is_terminal
    assert is_terminal or said == b""


# ---------------------------------------------------------------- tokens


TOKENS = "alice read alice-0123456789abcdef\nbob read bob-0123456789abcdef 2001-01-01\n"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS, encoding="utf-8")
    return path


def test_an_admin_listener_that_wants_a_token_gets_that_of_the_flag_or_of_the_environment(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with admin_listener(tmp_path, "0.0.0.0:0", tokens) as url:
        assert doctor(NOBODY, "--admin", url, "--token-file", str(tokens)) == 0
        assert doctor(url, "--token-file", str(tokens), "--as", "alice") == 0
        monkeypatch.setenv(TOKEN_VARIABLE, str(tokens))
        assert doctor(NOBODY, "--admin", url) == 0

    told = capsys.readouterr()
    assert told.out.count("chat (tiny), over ") == 3
    assert told.err == ""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "send the header Authorization"),
        (("--token-file", "wrong"), "not known here"),
        (("--token-file", "tokens", "--as", "bob"), "the token bob has expired"),
    ],
)
def test_a_refusal_is_said_with_the_servers_reason_and_the_page_is_judged(
    tmp_path: Path, tokens: Path, words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong").write_text("nobody-0123456789abcdef\n", encoding="utf-8")
    given = [str(tmp_path / word) if word in {"wrong", "tokens"} else word for word in words]
    with admin_listener(tmp_path, "0.0.0.0:0", tokens) as url, one_page(VLLM_PAGE.format(usage=0.4)) as page:
        assert doctor(page, "--admin", url, "--seconds", "1", *given) == 0

    told = capsys.readouterr()
    assert told.out.startswith("vllm (m), over ")
    assert f"{url}/admin/v1/diagnosis answers 401: " in told.err
    assert why in told.err
    assert "(here: --token-file FILE)\nkvwatch: the metrics page is judged instead\n" in told.err


def test_the_refusal_of_a_listener_that_was_not_named_as_one_of_the_admin_api_is_said_too(
    tmp_path: Path, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with admin_listener(tmp_path, "0.0.0.0:0", tokens) as url, pytest.raises(TargetUnreachableError, match="metrics"):
        doctor(url, "--seconds", "1")

    assert "answers 401" in capsys.readouterr().err


def test_an_admin_listener_that_is_not_there_is_said_and_one_that_nobody_named_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with one_page(VLLM_PAGE.format(usage=0.4)) as page:
        assert doctor(page, "--seconds", "1") == 0
        assert capsys.readouterr().err == ""
        assert doctor(page, "--seconds", "1", "--admin", NOBODY) == 0

    assert "127.0.0.1:9/admin/v1/diagnosis cannot be reached" in capsys.readouterr().err


def test_a_token_of_the_environment_goes_to_the_admin_listener_and_never_to_somebody_elses_page(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, str(tokens))
    by_page: list[str] = []
    by_admin: list[str] = []
    with (
        one_page(VLLM_PAGE.format(usage=0.4), tokens=by_page) as page,
        one_page("{}", "/admin/v1/diagnosis", by_admin) as admin,
    ):
        assert doctor(page, "--seconds", "1") == 0
        assert doctor(page, "--seconds", "1", "--admin", admin) == 0

    assert by_page == []
    assert by_admin == ["Bearer alice-0123456789abcdef"]
