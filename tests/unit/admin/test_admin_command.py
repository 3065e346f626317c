"""`kvwatch admin`: a verb for each operation, against a real server."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_stage import AdminStage, admin_stage

from kvwatch.admin.command import COMMAND
from kvwatch.admin.credentials import find_token
from kvwatch.admin.operations import OPERATIONS
from kvwatch.admin.verbs import verbs
from kvwatch.errors import ConfigError, ControlError


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[AdminStage]:
    with admin_stage(tmp_path) as running:
        yield running


def admin(stage: AdminStage, tmp_path: Path, *words: str) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    args = parser.parse_args(["--url", stage.url, "--token-file", str(tmp_path / "tokens"), *words])
    return COMMAND.run(args)


def test_each_operation_has_one_verb() -> None:
    known = verbs(OPERATIONS)

    assert len(known) == len(OPERATIONS)
    assert {"pool", "blocks", "requests", "request", "config", "change-config", "config-diff", "events"} <= set(known)


def test_looking_prints_json(stage: AdminStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage.submit("a")
    stage.wait_running(1)

    assert admin(stage, tmp_path, "requests", "--state", "running", "--limit", "5") == 0
    assert json.loads(capsys.readouterr().out)["requests"][0]["request"] == "a"
    assert admin(stage, tmp_path, "request", "a", "--engine", "chat") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    assert admin(stage, tmp_path, "events", "--seconds", "5", "--events", "step") == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[0])["event"].startswith("step.")
    _, _, last_id = told.err.strip().rpartition("--last-event-id ")
    assert int(last_id.rpartition("-")[2]) == json.loads(told.out.splitlines()[-1])["seq"]
    assert admin(stage, tmp_path, "events", "--seconds", "1", "--last-event-id", "of-another-run-5") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["event"] == "gap"


def test_a_change_takes_the_present_settings_as_read(
    stage: AdminStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("num-blocks=301", "watermark=0.05", "prefix_cache=false", "max_prefill_chunk=none")

    assert admin(stage, tmp_path, "change-config", *changes, "--reason", "try", "--expires-in", "60") == 0
    done = {each["key"]: each["new"] for each in json.loads(capsys.readouterr().out)["outcome"]["changes"]}
    assert done == {"num_blocks": 301, "watermark": "0.05", "prefix_cache": False}
    assert admin(stage, tmp_path, "--field", "toml", "config-diff") == 0
    assert capsys.readouterr().out == 'num_blocks = 301\nwatermark = "0.05"\nprefix_cache = false\n'
    assert admin(stage, tmp_path, "change-config", "num_blocks=350", "--reason", "x", "--dry-run") == 0
    assert json.loads(capsys.readouterr().out)["is_dry_run"]


def test_a_refusal_is_one_line(stage: AdminStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin(stage, tmp_path, "abort-request", "nobody", "--reason", "x") == 1
    assert capsys.readouterr().err.startswith("kvwatch: 404: request 'nobody' is not live")
    assert admin(stage, tmp_path, "--as", "read", "resume-admission", "--reason", "x") == 1
    assert "needs the role operate" in capsys.readouterr().err


def test_options_may_stand_behind_the_verb_and_a_missing_token_is_named(
    stage: AdminStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)

    assert COMMAND.run(parser.parse_args(["admission", "--url", stage.url, "--field", "admission"])) == 0
    assert '"is_paused": false' in capsys.readouterr().out
    assert COMMAND.run(parser.parse_args(["--url", stage.url, "resume-admission", "--reason", "x"])) == 1
    assert "--token-file FILE" in capsys.readouterr().err
    assert admin(stage, tmp_path, "resume-admission", "--reason", "x", "--as", "read") == 1
    assert "needs the role operate" in capsys.readouterr().err


@pytest.mark.parametrize("name", [["--text", "abc"], ["--token-ids", "1,2"], ["--request", "nobody"]])
def test_a_prefix_is_pinned_by_any_of_its_three_names(
    stage: AdminStage, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: list[str]
) -> None:
    """The flags of the other two are not needed; here the server refuses each for a reason of its own."""
    assert admin(stage, tmp_path, "pin-prefix", *name, "--reason", "x") == 1
    assert "exactly one of" not in capsys.readouterr().err


def test_nobody_there_is_said() -> None:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    with pytest.raises(ControlError, match="--admin-listen"):
        COMMAND.run(parser.parse_args(["--url", "127.0.0.1:9", "pool"]))


@pytest.mark.parametrize(
    ("content", "name", "token"),
    [
        ("a-token-of-its-own\n", None, "a-token-of-its-own"),
        ("a read t1\nb operate t2\n", None, "t2"),
        ("a read t1\nb operate t2 2099-01-01\n", "a", "t1"),
        ("a read t1\nb prompts,operate sha256:aa\n", None, "t1"),
    ],
)
def test_a_token_is_found_in_a_file_of_its_own_and_in_a_servers(
    tmp_path: Path, content: str, name: str | None, token: str
) -> None:
    (tmp_path / "t").write_text(content, encoding="utf-8")
    assert find_token(str(tmp_path / "t"), name) == token


@pytest.mark.parametrize(("content", "name"), [("", None), ("a read t1\n", "b"), ("a read sha256:aa\n", None)])
def test_a_file_without_the_token_is_named(tmp_path: Path, content: str, name: str | None) -> None:
    (tmp_path / "t").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="--token-file"):
        find_token(str(tmp_path / "t"), name)
    with pytest.raises(ConfigError, match="--token-file"):
        find_token(str(tmp_path / "none"), name)


@pytest.mark.parametrize(
    "words",
    [
        ["change-config", "num_blocks", "--reason", "x"],
        ["pause-admission", "--reason", "x", "--seconds", "long"],
    ],
)
def test_a_wrong_argument_is_named(stage: AdminStage, tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError):
        admin(stage, tmp_path, *words)
