"""Logs: one way out for all, the request's id on every line, no prompts."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import structlog

from kvwatch.errors import ConfigError
from kvwatch.logs import LogFormat, bind_request, configure_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the process's logging as it was."""
    root = logging.getLogger()
    names = ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore")
    handlers, level, before = list(root.handlers), root.level, structlog.get_config()
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    structlog.configure(**before)


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_has_one_object_on_each_line_with_level_name_and_time() -> None:
    stream = io.StringIO()
    configure_logs("json", stream=stream)

    structlog.get_logger("demo").warning("something happened", number=3)

    (line,) = lines_of(stream)
    assert (line["event"], line["level"], line["logger"], line["number"]) == (
        "something happened",
        "warning",
        "demo",
        3,
    )
    assert line["timestamp"].endswith("Z")


def test_the_request_id_is_on_every_line_of_a_request_and_on_no_other() -> None:
    stream = io.StringIO()
    configure_logs("json", stream=stream)
    with bind_request("chatcmpl-1"):
        structlog.get_logger("a").info("one")
        logging.getLogger("some.library").warning("two %s", "words")
    structlog.get_logger("a").info("three")

    assert [line.get("request_id") for line in lines_of(stream)] == ["chatcmpl-1", "chatcmpl-1", None]
    assert [line["event"] for line in lines_of(stream)] == ["one", "two words", "three"]


def test_lines_of_the_standard_library_take_the_same_way() -> None:
    stream = io.StringIO()
    configure_logs("json", stream=stream)
    try:
        int("broken")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("it failed")

    (line,) = lines_of(stream)
    assert (line["logger"], line["level"]) == ("uvicorn.error", "error")
    assert "ValueError: invalid literal" in line["exception"]


def test_what_http_servers_say_about_every_request_is_left_out() -> None:
    stream = io.StringIO()
    configure_logs("json", "debug", stream=stream)

    logging.getLogger("uvicorn.access").info("GET /metrics 200")

    assert stream.getvalue() == ""


def test_lines_below_the_level_are_left_out() -> None:
    stream = io.StringIO()
    configure_logs("json", "warning", stream=stream)

    structlog.get_logger("a").info("quiet")
    structlog.get_logger("a").warning("loud")

    assert [line["event"] for line in lines_of(stream)] == ["loud"]


@pytest.mark.parametrize(("log_prompts", "shown"), [(False, "[not logged; see --log-prompts]"), (True, "my secret")])
def test_prompts_are_logged_only_when_asked_for(log_prompts: bool, shown: str) -> None:
    stream = io.StringIO()
    configure_logs("json", log_prompts=log_prompts, stream=stream)

    structlog.get_logger("a").info("request", prompt="my secret", prompt_tokens=2)

    (line,) = lines_of(stream)
    assert (line["prompt"], line["prompt_tokens"]) == (shown, 2)


def test_the_console_format_is_for_people() -> None:
    stream = io.StringIO()
    configure_logs("console", stream=stream)

    with bind_request("r-1"):
        structlog.get_logger("a").info("hello", number=3)

    text = stream.getvalue()
    assert "hello" in text
    assert "number=3" in text
    assert "request_id=r-1" in text
    assert "\x1b" not in text  # no colours into a file


def test_a_console_line_shows_the_traceback_of_an_exception() -> None:
    stream = io.StringIO()
    configure_logs("console", stream=stream)
    try:
        int("broken")
    except ValueError:
        structlog.get_logger("a").exception("it failed")

    assert "ValueError: invalid literal" in stream.getvalue()


def test_configuring_twice_does_not_log_twice() -> None:
    stream = io.StringIO()
    configure_logs("json", stream=io.StringIO())
    configure_logs("json", stream=stream)

    structlog.get_logger("a").info("once")

    assert len(lines_of(stream)) == 1


@pytest.mark.parametrize(("log_format", "level"), [("xml", "info"), ("json", "loud")])
def test_an_unknown_format_or_level_is_a_configuration_error(log_format: Literal["json"], level: str) -> None:
    with pytest.raises(ConfigError, match="choose"):
        configure_logs(log_format, level)


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_control_characters_of_clients_do_not_reach_the_terminal(log_format: LogFormat) -> None:
    stream = io.StringIO()
    configure_logs(log_format, stream=stream)

    structlog.get_logger("test").info("request", path="/\x1b[31mred\x00\nsecond line")

    assert "\x1b[31mred" not in stream.getvalue()
    assert "\x00" not in stream.getvalue()
    assert len(stream.getvalue().strip().splitlines()) == 1
