"""The command line: commands from entry points, errors on one line, the effective settings."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvwatch import __version__
from kvwatch.cli import CONFIG_COMMAND, EXIT_ERROR, EXIT_INTERRUPTED, main
from kvwatch.errors import ConfigError

DEMO = """
import argparse
from typing import Annotated
import msgspec
from kvwatch.config import add_flags, resolve, setting
from kvwatch.errors import ExporterError

class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    port: Annotated[int, setting("Port.", minimum=0, maximum=65535)] = 8000
    token: Annotated[str | None, setting("Token.", secret=True)] = None
    fail: Annotated[str, setting("How to fail.")] = ""

class Demo:
    name = "demo"
    help = "a command made for a test"
    settings = DemoSettings

    def add_arguments(self, parser):
        add_flags(parser, DemoSettings)

    def run(self, args):
        settings = resolve(DemoSettings, args).settings
        if settings.fail == "error":
            raise ExporterError("port 1 is taken;\\n  choose another")
        if settings.fail == "interrupt":
            raise KeyboardInterrupt
        if settings.fail == "missing":
            import no_such_module_at_all
        if settings.fail == "bug":
            raise ZeroDivisionError
        print("port", settings.port)
        return 7

COMMAND = Demo()
"""


@pytest.fixture(autouse=True)
def _demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with one command that works and one whose module is missing a part."""
    info = tmp_path / "demo_for_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-for-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvwatch.commands]\ndemo = demo_for_tests:COMMAND\nbroken = demo_for_tests_broken:COMMAND\n"
    )
    (tmp_path / "demo_for_tests.py").write_text(DEMO)
    (tmp_path / "demo_for_tests_broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "demo_for_tests", raising=False)
    for name in ("KVWATCH_PORT", "KVWATCH_TOKEN", "KVWATCH_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_a_command_runs_with_its_settings_and_its_status_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--port", "9"]) == 7
    assert capsys.readouterr().out == "port 9\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--fail", "error"], "kvwatch: port 1 is taken; choose another\n"),
        (["demo", "--port", "x"], "kvwatch: --port: 'x' is not an integer\n"),
        (["demo", "--prot", "1"], "kvwatch: kvwatch demo: flag --prot is unknown; did you mean --port?\n"),
        (["demo", "--prot=1"], "kvwatch: kvwatch demo: flag --prot is unknown; did you mean --port?\n"),
        (["demo", "--por", "1"], "kvwatch: kvwatch demo: flag --por is unknown; did you mean --port?\n"),
        (["demo", "--url", "x"], "kvwatch: kvwatch demo: flag --url is unknown; see kvwatch demo --help\n"),
        (["demo", "extra"], "kvwatch: argument 'extra' is not expected; see kvwatch demo --help\n"),
        (["demo", "--port"], "kvwatch: argument --port: expected one argument; see kvwatch demo --help\n"),
        (["dem"], "kvwatch: command dem is unknown; did you mean demo?\n"),
        ([], "kvwatch: the following arguments are required: COMMAND; see kvwatch --help\n"),
        (["--verison"], "kvwatch: kvwatch: flag --verison is unknown; did you mean --version?\n"),
        (["-x", "demo"], "kvwatch: argument '-x' is not expected; see kvwatch --help\n"),
        (["config", "dmeo"], "kvwatch: kvwatch config: command dmeo is unknown; did you mean demo?\n"),
        (
            ["config", "--prot", "5"],
            "kvwatch: kvwatch config: flag --prot is unknown; did you mean kvwatch config demo --port?\n",
        ),
        (["config", "--jsn"], "kvwatch: kvwatch config: flag --jsn is unknown; did you mean --json?\n"),
        (["config", "--zzz=1"], "kvwatch: kvwatch config: flag --zzz is unknown; see kvwatch config --help\n"),
        (
            ["config", "demo", "--prot", "5"],
            "kvwatch: kvwatch config demo: flag --prot is unknown; did you mean --port?\n",
        ),
        (["admin", "--url", "x", "pol"], "kvwatch: kvwatch admin: verb pol is unknown; did you mean pool?\n"),
        (["admin", "--filed", "x", "pool"], "kvwatch: kvwatch admin: flag --filed is unknown; did you mean --field?\n"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == EXIT_ERROR
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("words", [["broken"], ["demo", "--fail", "missing"]])
def test_a_command_whose_parts_are_not_installed_says_how_to_install_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == EXIT_ERROR

    error = capsys.readouterr().err
    assert "needs no_such_module_at_all, which is not installed" in error
    assert "pip install 'kvwatch[engine]'" in error


def test_an_interrupt_is_no_traceback() -> None:
    assert main(["demo", "--fail", "interrupt"]) == EXIT_INTERRUPTED


def test_a_defect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        main(["demo", "--fail", "bug"])


def test_the_help_lists_every_command_also_those_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])

    out = " ".join(capsys.readouterr().out.split())
    assert exit_info.value.code == 0
    assert "demo a command made for a test" in out
    assert "config print the effective settings" in out
    assert "broken (not installed;" in out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])

    assert capsys.readouterr().out == f"kvwatch {__version__}\n"


def test_config_prints_values_and_where_each_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVWATCH_TOKEN", "hunter2")

    assert main(["config", "demo", "--port", "9"]) == 0

    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["port", "9", "flag"] in lines
    assert ["token", "********", "environment KVWATCH_TOKEN"] in lines


@pytest.mark.parametrize("command", ["serve", "sidecar"])
def test_config_shows_the_folder_that_is_used_where_none_was_set(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*words: str) -> list[tuple[str, str]]:
        assert main(["config", command, "--json", *words]) == 0
        told = json.loads(capsys.readouterr().out)
        return [(told[name]["value"], told[name]["source"]) for name in ("cache_dir", "flight_dir")]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache, flight = f"{tmp_path}/kvwatch", f"{tmp_path}/kvwatch/flight"
    assert shown() == [(cache, "default"), (flight, "default")]
    assert shown("--cache-dir", "/own") == [("/own", "flag"), ("/own/flight", "default")]
    assert shown("--flight-dir", "off") == [(cache, "default"), ("off", "flag")]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shown()[0] == (f"{tmp_path}/.cache/kvwatch", "default")


def test_config_prints_json_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVWATCH_TOKEN", "hunter2")

    assert main(["config", "demo", "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["port"] == {"value": 8000, "source": "default"}
    assert shown["token"] == {"value": "********", "source": "environment KVWATCH_TOKEN"}


def test_config_refuses_what_the_command_would_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "demo", "--port", "70000"]) == EXIT_ERROR
    assert "between 0 and 65535" in capsys.readouterr().err


def test_config_says_so_when_no_command_has_settings() -> None:
    with pytest.raises(ConfigError, match="no installed command has settings"):
        CONFIG_COMMAND.run(argparse.Namespace())


def in_a_fresh_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return result.stdout.strip()


def test_importing_kvwatch_takes_at_most_a_tenth_of_a_second_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; started = time.perf_counter(); import kvwatch;"
        "print(time.perf_counter() - started, *sorted(sys.modules))"
    )
    runs = [in_a_fresh_python(code).split() for _ in range(5)]

    assert min(float(run[0]) for run in runs) <= 0.1  # the least disturbed of them: other processes share the machine
    modules = runs[0][1:]
    assert {"torch", "numpy", "prometheus_client", "starlette", "msgspec"}.isdisjoint(modules)


def test_the_observatory_and_the_command_line_import_no_engine_and_no_torch() -> None:
    code = "import sys, kvwatch.observatory, kvwatch.cli, kvwatch.logs; print(*sorted(sys.modules))"

    modules = {name.split(".")[0] for name in in_a_fresh_python(code).split()}
    assert {"torch", "triton", "transformers", "numba", "kvwatch_engine", "kvwatch_kernels"}.isdisjoint(modules)
