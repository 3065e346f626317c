"""Settings: precedence, sources, and every way to be wrong."""

import argparse
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from kvwatch.config import Resolved, add_flags, declared_settings, parse_bytes, resolve, setting, shown_settings
from kvwatch.errors import ConfigError, SchemaError


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, setting("Host.")] = "127.0.0.1"
    port: Annotated[int, setting("Port.", minimum=0, maximum=65_535)] = 8000
    watermark: Annotated[float, setting("Watermark.", minimum=0.0)] = 0.02
    max_model_len: Annotated[int | None, setting("Longest sequence.", minimum=1)] = None
    prefix_cache: Annotated[bool, setting("Cache prefixes.")] = True
    dtype: Annotated[Literal["auto", "float32"], setting("Type.")] = "auto"
    api_key: Annotated[str | None, setting("Key.", secret=True)] = None
    pin: Annotated[int, setting("Pin.", secret=True, maximum=9999)] = 0


def settings_of(
    *words: str, env: dict[str, str] | None = None, file: str | None = None, folder: Path | None = None
) -> Resolved[Demo]:
    parser = argparse.ArgumentParser()
    add_flags(parser, Demo)
    more: list[str] = []
    if file is not None and folder is not None:
        (folder / "kvwatch.toml").write_text(file, encoding="utf-8")
        more = ["--config", str(folder / "kvwatch.toml")]
    return resolve(Demo, parser.parse_args([*words, *more]), env or {})


def test_without_anything_every_setting_has_its_default() -> None:
    resolved = settings_of()

    assert resolved.settings == Demo()
    assert set(resolved.sources.values()) == {"default"}


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = 'host = "file"\nport = 1\nwatermark = 1\n'

    resolved = settings_of(
        "--host", "flag", env={"KVWATCH_HOST": "env", "KVWATCH_PORT": "2"}, file=file, folder=tmp_path
    )

    assert (resolved.settings.host, resolved.settings.port, resolved.settings.watermark) == ("flag", 2, 1.0)
    assert resolved.sources["host"] == "flag"
    assert resolved.sources["port"] == "environment KVWATCH_PORT"
    assert resolved.sources["watermark"] == f"file {tmp_path / 'kvwatch.toml'}"
    assert resolved.sources["dtype"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("max-model-len = 77\n")

    assert settings_of(env={"KVWATCH_CONFIG": str(path)}).settings.max_model_len == 77


@pytest.mark.parametrize(("word", "expected"), [("--prefix-cache", True), ("--no-prefix-cache", False)])
def test_a_flag_for_true_and_false_has_both_forms(word: str, expected: bool) -> None:
    assert settings_of(word).settings.prefix_cache is expected


@pytest.mark.parametrize("text", ["true", "1", "YES", "on"])
def test_truth_in_the_environment_has_many_spellings(text: str) -> None:
    assert settings_of("--no-prefix-cache").settings.prefix_cache is False
    assert settings_of(env={"KVWATCH_PREFIX_CACHE": text}).settings.prefix_cache is True


@pytest.mark.parametrize("text", ["none", "None", "", "null"])
def test_an_optional_setting_can_be_unset(text: str, tmp_path: Path) -> None:
    resolved = settings_of(env={"KVWATCH_MAX_MODEL_LEN": text}, file="max_model_len = 5", folder=tmp_path)

    assert resolved.settings.max_model_len is None
    assert resolved.sources["max_model_len"] == "environment KVWATCH_MAX_MODEL_LEN"


WRONG: list[tuple[dict[str, str], str]] = [
    ({"KVWATCH_PORT": "65536"}, r"KVWATCH_PORT: 65536 is out of range; it must be between 0 and 65535"),
    ({"KVWATCH_PORT": "-1"}, r"KVWATCH_PORT: -1 is out of range"),
    ({"KVWATCH_PORT": "eight"}, r"KVWATCH_PORT: 'eight' is not an integer"),
    ({"KVWATCH_PORT": "1.5"}, r"KVWATCH_PORT: '1.5' is not an integer"),
    ({"KVWATCH_PORT": ""}, r"KVWATCH_PORT: '' is not an integer"),
    ({"KVWATCH_PORT": "80/tcp"}, r"KVWATCH_PORT: '80/tcp' is not an integer"),
    ({"KVWATCH_HOST": "a\0b"}, r"KVWATCH_HOST: 'a\\x00b' is not text in UTF-8 without NUL"),
    ({"KVWATCH_HOST": "a\udcffb"}, r"KVWATCH_HOST: 'a\\udcffb' is not text in UTF-8 without NUL"),
    ({"KVWATCH_WATERMARK": "nan"}, r"KVWATCH_WATERMARK: 'nan' is not a finite number"),
    ({"KVWATCH_WATERMARK": "inf"}, r"KVWATCH_WATERMARK: 'inf' is not a finite number"),
    ({"KVWATCH_WATERMARK": "-0.1"}, r"KVWATCH_WATERMARK: -0.1 is out of range; it must be at least 0"),
    ({"KVWATCH_PREFIX_CACHE": "maybe"}, r"KVWATCH_PREFIX_CACHE: 'maybe' is not true or false"),
    ({"KVWATCH_DTYPE": "int4"}, r"KVWATCH_DTYPE: 'int4' is none of auto, float32; choose one of them"),
    ({"KVWATCH_MAX_MODEL_LEN": "x"}, r"KVWATCH_MAX_MODEL_LEN: 'x' is not an integer or none"),
    ({"KVWATCH_POTR": "1"}, r"environment variable KVWATCH_POTR is unknown; did you mean KVWATCH_PORT\?"),
    ({"KVWATCH_port": "1"}, r"environment variable KVWATCH_port is unknown"),
    ({"KVWATCH_CONFIG": "missing.toml"}, r"configuration file missing.toml cannot be read"),
]


@pytest.mark.parametrize(("env", "message"), WRONG)
def test_a_wrong_variable_is_an_error_with_value_limit_and_remedy(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(env=env)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("prot = 1", r"key prot is unknown; did you mean port\?"),
        ("zzzzzz = 1", r"key zzzzzz is unknown; known: api_key, dtype"),
        ('port = "80"', r""),
        ("port = true", r"port in .* True is not an integer"),
        ("port = 1.0", r"port in .* 1.0 is not an integer"),
        ('host = "a\\u0000b"', r"host in .* is not text in UTF-8 without NUL"),
        ("host = 1", r"host in .* 1 is not text"),
        ("watermark = nan", r"watermark in .* nan is not a finite number"),
        ("prefix_cache = 1", r"prefix_cache in .* 1 is not true or false"),
        ("[port]\nx = 1", r"port in .* is not an integer"),
        ("max_model_len = 1\nmax-model-len = 2", r"max_model_len is set twice"),
        ("port = ", r"is not valid TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place(file: str, message: str, tmp_path: Path) -> None:
    if not message:  # numbers in quotes are understood, as in the environment
        assert settings_of(file=file, folder=tmp_path).settings.port == 80
        return
    with pytest.raises(ConfigError, match=message):
        settings_of(file=file, folder=tmp_path)


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigError, match="is not valid TOML"):
        settings_of("--config", str(tmp_path / "x.toml"))


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        settings_of("--config", str(tmp_path))


def test_a_wrong_flag_is_named_as_a_flag() -> None:
    with pytest.raises(ConfigError, match=r"--port: 'x' is not an integer"):
        settings_of("--port", "x")


def test_what_kubernetes_sets_for_a_service_of_our_name_is_left_alone() -> None:
    env = {
        "KVWATCH_SERVICE_HOST": "10.0.0.1",
        "KVWATCH_SERVICE_PORT": "80",
        "KVWATCH_SERVICE_PORT_METRICS": "9400",
        "KVWATCH_PORT": "tcp://10.0.0.1:80",
        "KVWATCH_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVWATCH_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVWATCH_SIDECAR_SERVICE_HOST": "10.0.0.2",
        "KVWATCH_SIDECAR_PORT": "tcp://10.0.0.2:9400",
        "KVWATCH_SIDECAR_PORT_9400_TCP_ADDR": "10.0.0.2",
        "OTHER_PORT": "5",
    }

    assert settings_of(env=env).settings == Demo()


@pytest.mark.parametrize("env", [{"KVWATCH_PIN": "12345"}, {"KVWATCH_PIN": "hunter2"}])
def test_a_wrong_secret_is_not_repeated(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(env=env)

    assert env["KVWATCH_PIN"] not in str(caught.value)


def test_a_secret_is_never_shown_and_its_absence_is() -> None:
    key = next(each for each in declared_settings(Demo) if each.name == "api_key")

    assert (key.shown("hunter2"), key.shown(None)) == ("********", "none")


def test_the_help_of_a_flag_shows_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of("--help")

    text = " ".join(capsys.readouterr().out.split())
    assert "--port INT Port. (default: 8000)" in text
    assert "--dtype {auto,float32} Type. (default: auto)" in text
    assert "--prefix-cache, --no-prefix-cache Cache prefixes. (default: true)" in text


class Bare(msgspec.Struct):
    port: int = 1


class WithoutDefault(msgspec.Struct):
    port: Annotated[int, setting("Port.")]


class Odd(msgspec.Struct):
    ports: Annotated[tuple[int, ...], setting("Ports.")] = ()


class Union(msgspec.Struct):
    port: Annotated[int | str, setting("Port.")] = 1


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Bare, "lacks its declaration"),
        (WithoutDefault, "lacks a default"),
        (Odd, "must be str, int"),
        (Union, "must be str, int"),
    ],
)
def test_a_setting_that_no_flag_can_express_is_refused(cls: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        declared_settings(cls)


def test_settings_are_shown_as_text_without_secrets() -> None:
    shown = shown_settings(Demo(port=81, api_key="hunter2"))

    assert (shown["port"], shown["max_model_len"]) == ("81", "none")
    assert "hunter2" not in str(shown)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("512M", 512 * 2**20), ("1.5k", 1536), ("1073741824", 2**30), (" 2 TB ", 2**41)],
)
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text, "--kv-memory") == size


@pytest.mark.parametrize("text", ["", "many", "0", "-1", "1XB", "1e9", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-memory.*4GiB"):
        parse_bytes(text, "--kv-memory")
