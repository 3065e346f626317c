import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from kvwatch.bench.options import Options, add_options, parse_scenarios, read_options
from kvwatch.bench.scenarios import SCENARIOS
from kvwatch.bench.target import root_of
from kvwatch.errors import ConfigError


def options(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_options(parser.parse_args(["--url", "http://127.0.0.1:8000", *words]))


@pytest.mark.parametrize(
    "given",
    [
        "127.0.0.1:8000",
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/",
        "http://127.0.0.1:8000/v1",
        "127.0.0.1:8000/v1/",
    ],
)
def test_an_address_is_understood_however_it_is_written(given: str) -> None:
    assert root_of(given) == "http://127.0.0.1:8000"


def test_a_path_in_front_of_the_api_is_kept() -> None:
    assert root_of("https://host/models/a/v1") == "https://host/models/a"


@pytest.mark.parametrize(
    "given", ["ftp://host", "http://", "http://host:port", "http://host:99999", "http://host/?a=b", ""]
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:8000"):
        root_of(given)


def test_scenarios_are_mixed_by_weight() -> None:
    assert parse_scenarios("short=2, long=1") == {"short": 2, "long": 1}
    assert parse_scenarios("pressure") == {"pressure": 1}
    assert parse_scenarios("mixed").keys() == SCENARIOS.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shrt", "did you mean short"),
        ("short=", "no weight above 0"),
        ("short=0", "no weight above 0"),
        ("short=nan", "no weight above 0"),
        ("short=inf", "no weight above 0"),
        ("short,short", "named twice"),
        ("mixed,long=3", "named twice"),
        ("", "unknown"),
        ("trace", "unknown"),
    ],
)
def test_bad_scenarios_say_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_scenarios(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-requests", "0"], "--num-requests: 0 is out of range"),
        (["--concurrency", "0"], "--concurrency"),
        (["--rate", "0"], "above 0"),
        (["--rate", "nan"], "above 0"),
        (["--request-timeout", "-1"], "above 0"),
        (["--limit-tokens", "5"], "between 64"),
        (["--retries", "-1"], "--retries"),
        (["--wait-ready", "nan"], "--wait-ready"),
        (["--trace", "x", "--rate", "5"], "leave out"),
        (["--trace", "x", "--scenario", "short"], "leave out"),
        (["--assert", "ttft_p98<2"], "did you mean ttft_p9"),
        (["--scenario", "short", "--assert", "long.ttft_p99<2"], "unknown"),
        (["--api-key-file", "/nonexistent/key"], "cannot be read"),
    ],
)  # fmt: skip
def test_a_bad_option_says_its_value_and_what_to_do(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*words)


def test_a_closed_loop_has_clients_and_an_open_loop_no_limit_unless_one_is_given() -> None:
    assert options().concurrency == 8
    assert options("--rate", "5").concurrency is None
    assert options("--rate", "5", "--concurrency", "3").concurrency == 3


def test_keys_come_from_the_first_line_that_says_something(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("# mine\n\nsecret-key \n")
    assert options("--api-key-file", str(key)).api_key == "secret-key"
    key.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        options("--api-key-file", str(key))


def test_the_command_line_is_read_without_an_http_client() -> None:
    program = "import sys, kvwatch.bench.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"httpx", "numpy", "prometheus_client"} & set(done.stdout.split())
