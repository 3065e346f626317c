"""`kvwatch sidecar`: the composition root of the observatory beside engines of other processes.

    main thread           waits for a signal
    observatory thread    sources, ledgers, parts and the metrics listener of all engines
    source threads        one for each remote kvwatch engine

Only this module knows sources, observatory and parts. What reads an engine, gRPC, ZeroMQ and OpenTelemetry are imported
when the command runs and only where they are used.
"""

import argparse
import os
from typing import TYPE_CHECKING, Annotated, Literal

from kvwatch.config import add_flags, resolve, setting
from kvwatch.observatory.settings import ObservatorySettings

if TYPE_CHECKING:
    from kvwatch.sidecar_run import Sidecar


class SidecarSettings(ObservatorySettings, frozen=True, kw_only=True):
    """Settings of `kvwatch sidecar`; docs/configuration.md is derived from this class."""

    engine: Annotated[
        tuple[str, ...],
        setting(
            "Engine to watch, as NAME=URL; grpc(s)://, vllm+http(s):// or sglang+http(s)://. Options in the query."
        ),
    ] = ()
    kv_events: Annotated[str | None, setting("Publish KV events of the one engine watched, such as tcp://*:5557.")] = (
        None
    )
    kv_events_replay: Annotated[str | None, setting("Answer replays of KV events, such as tcp://*:5657.")] = None
    kv_events_topic: Annotated[str, setting("Topic of KV events.")] = ""
    kv_events_hashes: Annotated[
        Literal["int", "bytes"], setting("Hashes of KV events: 64-bit integers or digests.")
    ] = "int"
    kv_events_socket: Annotated[
        Literal["auto", "bind", "connect"], setting("Whether --kv-events is bound; auto: if it has *, :: or 0.0.0.0.")
    ] = "auto"


class SidecarCommand:
    """The command `sidecar`."""

    name = "sidecar"
    help = "watch engines in other processes: vLLM, SGLang, kvwatch"
    settings = SidecarSettings

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add one flag for each setting."""
        add_flags(parser, SidecarSettings)

    def run(self, args: argparse.Namespace) -> int:
        """Watch until SIGTERM or SIGINT."""
        settings = resolve(SidecarSettings, args).settings
        # gRPC's own code writes to stderr, a line for each failed handshake, unless it is told not to before it loads.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        from kvwatch.logs import configure_logs
        from kvwatch.sidecar_run import run_until_signal

        configure_logs(settings.log_format, settings.log_level)
        run_until_signal(settings)
        return 0


COMMAND = SidecarCommand()


def make_sidecar(settings: SidecarSettings) -> "Sidecar":
    """Check settings and return a sidecar that was not started yet, for whoever embeds one.

    Raises:
        ConfigError: a setting is malformed, or two contradict each other.
        ExporterError: the address of a listener cannot be had, or a folder cannot be written to.
    """
    from kvwatch.sidecar_run import Sidecar

    return Sidecar(settings)
