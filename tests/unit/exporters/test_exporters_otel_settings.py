"""What an endpoint and headers mean."""

import subprocess
import sys

import pytest

from kvwatch.errors import ConfigError
from kvwatch.exporters.otel.settings import Endpoint, ProtocolSetting, parse_endpoint, parse_headers
from kvwatch.exporters.otel.transport import make_transport


@pytest.mark.parametrize(
    ("text", "protocol", "expected"),
    [
        ("grpc://collector", "auto", Endpoint("grpc", False, "collector:4317")),
        ("grpc://collector:9999", "auto", Endpoint("grpc", False, "collector:9999")),
        ("grpcs://collector", "grpc", Endpoint("grpc", True, "collector:4317")),
        ("http://collector:4317", "auto", Endpoint("grpc", False, "collector:4317")),
        ("http://collector:4317", "http", Endpoint("http", False, "http://collector:4317")),
        ("http://collector:4318/", "auto", Endpoint("http", False, "http://collector:4318")),
        ("https://collector.example/otlp", "auto", Endpoint("http", True, "https://collector.example/otlp")),
        ("https://collector.example:443", "grpc", Endpoint("grpc", True, "collector.example:443")),
        ("grpc://[::1]:4317", "auto", Endpoint("grpc", False, "[::1]:4317")),
    ],
)
def test_scheme_and_port_say_how_to_speak_to_a_collector(
    text: str, protocol: ProtocolSetting, expected: Endpoint
) -> None:
    assert parse_endpoint(text, protocol) == expected


def test_signals_have_urls_of_their_own_over_http() -> None:
    endpoint = parse_endpoint("https://collector.example/otlp/")

    assert endpoint.url("traces") == "https://collector.example/otlp/v1/traces"
    assert endpoint.url("logs") == "https://collector.example/otlp/v1/logs"


@pytest.mark.parametrize(
    "text",
    [
        "collector:4317", "localhost", "", "ftp://collector", "grpc://", "http://host:port", "http://[::1",
        "http://host:0", "http://host/?key=a", "http://host/#a", "http://ho st", "http://ho\0st", "http://h\u00f6st",
    ],
)  # fmt: skip
def test_what_is_no_endpoint_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-endpoint.*grpc://collector:4317"):
        parse_endpoint(text)


def test_a_path_is_refused_where_grpc_would_drop_it_without_a_word() -> None:
    with pytest.raises(ConfigError, match="gRPC knows no path; leave out /otlp"):
        parse_endpoint("grpc://collector/otlp")


def test_a_grpc_endpoint_cannot_be_spoken_to_over_http() -> None:
    with pytest.raises(ConfigError, match="contradicts --otlp-protocol http"):
        parse_endpoint("grpc://collector:4317", "http")


@pytest.mark.parametrize("text", ["http://user:hunter2@collector:4318", "user:hunter2@collector"])
def test_a_password_in_an_endpoint_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text)
    assert "hunter2" not in str(caught.value)


def test_headers_are_pairs_with_commas_between_them() -> None:
    assert parse_headers("Authorization=Bearer%20abc, x-scope=a=b ,") == {
        "authorization": "Bearer abc",
        "x-scope": "a=b",
    }
    assert parse_headers("") == {}


@pytest.mark.parametrize("text", ["hunter2", "a b=hunter2", "=hunter2", "x=hunter2%0Aevil", "x-bin=hunter2"])
def test_a_header_that_cannot_be_sent_is_refused_without_showing_its_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-headers") as caught:
        parse_headers(text)
    assert "hunter2" not in str(caught.value)


def test_settings_can_be_read_without_importing_opentelemetry() -> None:
    program = (
        "import sys, kvwatch.exporters.otel.settings\n"
        "print(sorted(name for name in sys.modules if name.startswith(('opentelemetry', 'grpc'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text", ["grpc://127.0.0.1:1", "grpcs://127.0.0.1:1", "http://127.0.0.1:1", "https://127.0.0.1:1"]
)
def test_every_kind_of_endpoint_has_exporters_that_can_be_made_and_closed_without_a_collector(text: str) -> None:
    transport = make_transport(parse_endpoint(text), {"x-scope": "a"}, timeout_seconds=0.5)

    for exporter in (transport.traces, transport.metrics, transport.logs):
        exporter.shutdown()
    assert transport.send_spans([]) is False, "nothing is sent after the end"
