"""Settings that may be given several times: flags, environment, lists and tables of the configuration file."""

import argparse
from pathlib import Path

import pytest

from kvwatch.config import add_flags, declared_settings, resolve, shown_settings
from kvwatch.derive.settings import settings_section
from kvwatch.errors import ConfigError
from kvwatch.sidecar import SidecarSettings
from kvwatch.sources.engines import parse_engines


def resolved(words: list[str], **environment: str) -> tuple[tuple[str, ...], str]:
    parser = argparse.ArgumentParser()
    add_flags(parser, SidecarSettings)
    found = resolve(SidecarSettings, parser.parse_args(words), environment)
    return found.settings.engine, found.sources["engine"]


def from_file(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "kvwatch.toml"
    path.write_text(text)
    return resolved(["--config", str(path)])[0]


def test_a_flag_is_repeated_and_wins_over_the_environment() -> None:
    words = ["--engine", "a=grpc://h:1", "--engine", "b=grpc://h:2"]
    assert resolved(words, KVWATCH_ENGINE="c=grpc://h:3") == (("a=grpc://h:1", "b=grpc://h:2"), "flag")
    assert resolved([], KVWATCH_ENGINE=" a=grpc://h:1  b=grpc://h:2 ")[0] == ("a=grpc://h:1", "b=grpc://h:2")
    assert resolved([]) == ((), "default")


def test_a_file_has_a_list_or_tables(tmp_path: Path) -> None:
    assert from_file(tmp_path, 'engine = ["a=grpc://h:1"]') == ("a=grpc://h:1",)
    assert from_file(tmp_path, '[engine]\na = "grpc://h:1"\nb = "grpc://h:2"') == ("a=grpc://h:1", "b=grpc://h:2")
    text = """
        [engine.chat]
        url = "vllm+http://h:8000"
        token_ids = true
        dp-ranks = 2
        kv_events = "ipc:///tmp/a b&c=d"
    """
    (spec,) = parse_engines_of(from_file(tmp_path, text))
    assert (spec.name, spec.url, spec.token_ids, spec.dp_ranks) == ("chat", "http://h:8000", True, 2)
    assert spec.kv_events == "ipc:///tmp/a b&c=d"


def parse_engines_of(texts: tuple[str, ...]) -> list:  # type: ignore[type-arg]
    return parse_engines(texts)


@pytest.mark.parametrize(
    "text",
    [
        "engine = 5",
        "engine = [5]",
        "[engine]\na = 5",
        "[engine.a]\ntoken_ids = true",
        '[engine.a]\nurl = "grpc://h:1"\nx = [1]',
        'engine = ["a\\u0000"]',
    ],
)
def test_anything_else_in_a_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is no list of texts and no table"):
        from_file(tmp_path, text)


def test_it_is_shown_as_text_and_documented() -> None:
    settings = SidecarSettings(engine=("a=grpc://h:1", "b=grpc://h:2"))
    assert shown_settings(settings)["engine"] == "a=grpc://h:1 b=grpc://h:2"
    assert shown_settings(SidecarSettings())["engine"] == "none"
    (row,) = [line for line in settings_section(SidecarSettings).splitlines() if line.startswith("| `--engine`")]
    assert "may be given several times" in row
    assert [each.is_repeated for each in declared_settings(SidecarSettings) if each.name == "engine"] == [True]
