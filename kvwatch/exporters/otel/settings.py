"""Settings of the OpenTelemetry exporter, and what an endpoint means. Imports nothing of OpenTelemetry."""

import re
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from kvwatch.errors import ConfigError

Protocol = Literal["grpc", "http"]
ProtocolSetting = Literal["auto", "grpc", "http"]

GRPC_PORT = 4317
"""Port that collectors take OTLP over gRPC on."""

ENDPOINT_FLAG, PROTOCOL_FLAG, HEADERS_FLAG = "--otlp-endpoint", "--otlp-protocol", "--otlp-headers"
_EXAMPLES = "grpc://collector:4317, http://collector:4318 or https://collector.example:443"
_SCHEMES = {"grpc": False, "grpcs": True, "http": False, "https": True}
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


class OtelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the exporter is told."""

    endpoint: str
    """Collector, as `parse_endpoint` takes it."""
    protocol: ProtocolSetting = "auto"
    headers: str = ""
    """`name=value` pairs with commas between them; a secret."""
    trace_ratio: float = 1.0
    """Part of the traces that begin here which is exported, 0 to 1."""
    slow_seconds: float = 10.0
    """Requests that take longer are exported whatever was sampled."""
    export_logs: bool = False
    """Whether the process's log lines go to the collector too."""
    long_running_seconds: float = 30.0
    """A request that runs for so long is reported while it runs."""
    metrics_interval_seconds: float = 15.0
    """Time between two exports of the metrics."""
    export_timeout_seconds: float = 5.0
    """A collector gets no longer than this to take one batch, retries included."""
    batch_seconds: float = 1.0
    """A finished trace waits no longer than this for others to share its batch."""
    max_queued_spans: int = 4096
    """Spans that wait for the collector; a trace that finds no room is dropped whole, and counted."""
    max_queued_logs: int = 2048
    """Log records that wait for the collector."""
    server_address: str = ""
    """Host that the API is served on; left out of spans when empty."""
    server_port: int | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """A collector."""

    protocol: Protocol
    is_secure: bool
    address: str
    """`host:port` for gRPC, base URL without a slash at its end for HTTP."""

    def url(self, signal: Literal["traces", "metrics", "logs"]) -> str:
        """Return the URL that takes a signal over HTTP."""
        return f"{self.address}/v1/{signal}"


def parse_endpoint(text: str, protocol: ProtocolSetting = "auto") -> Endpoint:
    """Read an endpoint.

    `grpc://` and `grpcs://` (TLS) speak gRPC. `http://` and `https://` speak HTTP, or gRPC on port 4317, unless
    `protocol` says otherwise.

    Raises:
        ConfigError: it is no endpoint, holds credentials, or contradicts `protocol`.
    """
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    host, port = _host_and_port(parts)
    if not _PRINTABLE.fullmatch(text.strip()) or parts.query or parts.fragment or port == 0:
        host = ""
    if parts.scheme not in _SCHEMES or not host:
        raise ConfigError(f"{ENDPOINT_FLAG}: {_shown(text)} is no endpoint; write it like {_EXAMPLES}")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{ENDPOINT_FLAG}: credentials do not belong in the URL, which is logged; use {HEADERS_FLAG}")
    is_secure, is_grpc_scheme = _SCHEMES[parts.scheme], parts.scheme.startswith("grpc")
    if is_grpc_scheme and protocol == "http":
        raise ConfigError(
            f"{ENDPOINT_FLAG} {parts.scheme}:// contradicts {PROTOCOL_FLAG} http; write the endpoint with http:// or https://"
        )
    if protocol == "grpc" or is_grpc_scheme or (protocol == "auto" and port == GRPC_PORT):
        if parts.path.strip("/"):
            raise ConfigError(
                f"{ENDPOINT_FLAG}: gRPC knows no path; leave out {parts.path}, or set {PROTOCOL_FLAG} http"
            )
        return Endpoint("grpc", is_secure, f"{host}:{port or GRPC_PORT}")
    return Endpoint("http", is_secure, f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}")


def parse_headers(text: str) -> dict[str, str]:
    """Read headers: `name=value` pairs with commas between them, values URL-encoded where they need to be.

    Raises:
        ConfigError: a name or a value cannot be sent. The message holds no value: they are secrets.
    """
    headers: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = pair.partition("=")
        name, value = name.strip().lower(), unquote(value.strip())
        if not separator or not _HEADER_NAME.fullmatch(name) or name.endswith("-bin"):  # gRPC wants bytes there
            raise ConfigError(
                f"{HEADERS_FLAG}: entry {len(headers) + 1} is no header; write name=value, with commas between entries"
            )
        if not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(
                f"{HEADERS_FLAG}: the value of {name} has characters that no header may hold; remove them"
            )
        headers[name] = value
    return headers


def _host_and_port(parts: SplitResult) -> tuple[str, int | None]:
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", None
    return (f"[{host}]" if ":" in host else host), port


def _shown(text: str) -> str:
    """Return what may be shown of a text that may hold a password."""
    return "what was given" if "@" in text else repr(text)
