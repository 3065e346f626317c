"""What an operator can set of the observatory, whatever engine it watches. Commands inherit from this class."""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvwatch.config import setting

FLIGHT_FOLDER = "flight"
"""Where the flight recorder lies in the cache folder."""


class ObservatorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that every command with an observatory has; docs/configuration.md is derived from the commands."""

    cache_dir: Annotated[
        str | None, setting("Folder of the flight recorder and of converted models; default: ~/.cache/kvwatch.")
    ] = None
    metrics_listen: Annotated[str, setting("HOST:PORT of the read-only metrics listener; `off` for none.")] = (
        "127.0.0.1:9400"
    )
    metrics_tenants: Annotated[str | None, setting("Tenants with series of their own, as A,B; others are `other`.")] = (
        None
    )
    metrics_loras: Annotated[str | None, setting("Adapters with series of their own, as A,B; others are `other`.")] = (
        None
    )
    slo_ttft: Annotated[str | None, setting("Bounds added to time_to_first_token_seconds, as 0.2,0.5.")] = None
    slo_itl: Annotated[str | None, setting("Bounds added to inter_token_latency_seconds, as 0.03,0.06.")] = None
    slo_e2e: Annotated[str | None, setting("Bounds added to end_to_end_seconds, as 3,8.")] = None
    grpc_listen: Annotated[str, setting("HOST:PORT of the gRPC event stream; `off` for none.")] = "127.0.0.1:9402"
    grpc_token_file: Annotated[
        str | None,
        setting(
            "File with a token on each line for the event stream, read again when it changes; needed off loopback."
        ),
    ] = None
    grpc_cert: Annotated[str | None, setting("PEM certificate chain of the event stream.")] = None
    grpc_key: Annotated[str | None, setting("PEM key of the event stream.")] = None
    admin_listen: Annotated[str, setting("HOST:PORT of the admin API; `off` for none.")] = "127.0.0.1:9401"
    admin_token_file: Annotated[
        str | None, setting("File with NAME ROLES TOKEN [EXPIRES] on each line; needed for changes, and off loopback.")
    ] = None
    admin_hosts: Annotated[
        str | None,
        setting("Names of hosts under which the admin API is called beside localhost and addresses, as A,B."),
    ] = None
    admin_audit_file: Annotated[
        str | None, setting("File to which every change through the admin API is appended, beside the log.")
    ] = None
    admin_persist: Annotated[
        bool, setting("Let changes through the admin API be written into the file that --config names.")
    ] = False
    record_dir: Annotated[str | None, setting("Folder of recorded events; none records nothing.")] = None
    record_bytes: Annotated[str, setting("Room for all recordings; the oldest are removed.")] = "1GiB"
    record_file_bytes: Annotated[str, setting("Size at which a new recording is begun.")] = "64MiB"
    record_token_ids: Annotated[bool, setting("Record token ids if the engine gives them.")] = False
    flight_dir: Annotated[
        str | None, setting("Folder of the flight recorder; `off` for none. Default: `flight` in the cache folder.")
    ] = None
    flight_seconds: Annotated[
        float, setting("Seconds that the flight recorder is to hold.", minimum=1, maximum=86_400)
    ] = 30.0
    flight_bytes: Annotated[str, setting("Size of the flight recorder's ring.")] = "16MiB"
    flight_slow_step: Annotated[
        float, setting("A step of more seconds has the flight recorder written out.", minimum=0.001, maximum=86_400)
    ] = 5.0
    otlp_endpoint: Annotated[
        str | None, setting("OpenTelemetry collector, such as grpc://collector:4317; none exports nothing.")
    ] = None
    otlp_protocol: Annotated[
        Literal["auto", "grpc", "http"], setting("How to speak to it; auto: gRPC for grpc:// and port 4317, else HTTP.")
    ] = "auto"
    otlp_headers: Annotated[str | None, setting("Headers for it, as NAME=VALUE,NAME=VALUE.", secret=True)] = None
    otlp_logs: Annotated[bool, setting("Send log lines to it as well.")] = False
    trace_ratio: Annotated[
        float, setting("Part of the traces that begin here which is exported.", minimum=0, maximum=1)
    ] = 1.0
    trace_slow_seconds: Annotated[
        float, setting("Requests that take longer are exported whatever was sampled.", minimum=0, maximum=86_400)
    ] = 10.0
    log_format: Annotated[Literal["console", "json"], setting("Form of log lines.")] = "console"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], setting("Least severe lines shown.")] = "info"

    def cache_folder(self) -> Path:
        """Return the folder of what is kept between runs."""
        if self.cache_dir:
            return Path(self.cache_dir)
        shared = os.environ.get("XDG_CACHE_HOME")
        return (Path(shared) if shared else Path.home() / ".cache") / "kvwatch"

    def in_effect(self) -> dict[str, str]:
        """Return what is used in the place of settings that are none, for `kvwatch config`."""
        folder = self.cache_folder()
        used = {"cache_dir": str(folder), "flight_dir": str(folder / FLIGHT_FOLDER)}
        return {name: value for name, value in used.items() if getattr(self, name) is None}
