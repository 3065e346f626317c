"""Endpoints of the publisher: checked at the start, so that nothing is published to nowhere.

The rules are those of vLLM: rank r uses the configured port + r, for live and replayed events alike; an endpoint with
`*`, `::` or `0.0.0.0`, and every ipc and inproc one, is bound, any other is connected to.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from kvwatch.errors import ConfigError

LIVE_SETTING = "--kv-events"
REPLAY_SETTING = "--kv-events-replay"
MAX_PORT = 65_535

Mode = Literal["auto", "bind", "connect"]

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%*\w]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})", re.ASCII)
_LOCAL = re.compile(r"(ipc|inproc)://\S+")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint as it is used by one rank."""

    address: str
    """What ZeroMQ binds or connects to."""
    is_bound: bool
    port: int | None
    """TCP port; none for ipc and inproc; 0 lets the system choose one."""

    @property
    def is_ipv6(self) -> bool:
        """Whether the socket needs IPv6 switched on."""
        return "[" in self.address


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where one rank publishes, and where it answers requests for a replay."""

    live: Endpoint
    replay: Endpoint | None


def resolve_endpoints(live: str, replay: str | None, dp_rank: int, mode: Mode = "auto") -> Endpoints:
    """Return the endpoints of a rank.

    Args:
        live: Configured endpoint of rank 0, such as `tcp://*:5557`.
        replay: The same for replays, which are always bound; none for no replays.
        dp_rank: The rank, from 0.
        mode: Whether live events are bound or connected; `auto` follows vLLM's rule.

    Raises:
        ConfigError: an endpoint is malformed, a port lies beyond 65535, or the two (or those of another rank) collide.
    """
    live_endpoint = _resolve(live, dp_rank, LIVE_SETTING)
    is_bound = live_endpoint.is_bound if mode == "auto" else mode == "bind"
    live_endpoint = replace(live_endpoint, is_bound=is_bound)
    if replay is None:
        return Endpoints(live_endpoint, None)
    replay_endpoint = replace(_resolve(replay, dp_rank, REPLAY_SETTING), is_bound=True)
    _check_apart(live_endpoint, replay_endpoint, dp_rank)
    return Endpoints(live_endpoint, replay_endpoint)


def _resolve(text: str, dp_rank: int, setting: str) -> Endpoint:
    if _LOCAL.fullmatch(text):
        return Endpoint(_local(text, dp_rank, setting), True, None)
    match = _TCP.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{setting}: {text!r} is no endpoint; write tcp://HOST:PORT (tcp://*:5557 for all interfaces), ipc://PATH "
            "or inproc://NAME"
        )
    host, base = match["host"], int(match["port"])
    port = base + dp_rank if base else 0
    if port > MAX_PORT:
        raise ConfigError(
            f"{setting}: port {base} plus data-parallel rank {dp_rank} is {port}, beyond {MAX_PORT}; choose "
            "a lower port"
        )
    is_bound = "*" in host or "::" in host or host == "0.0.0.0"  # noqa: S104 - recognised, not chosen
    return Endpoint(f"tcp://{host}:{port or '*'}", is_bound, port)


def _local(text: str, dp_rank: int, setting: str) -> str:
    if dp_rank == 0:
        return text
    if text.startswith("inproc://"):
        return f"{text}_dp{dp_rank}"
    raise ConfigError(
        f"{setting}: ranks cannot share {text!r}, and an ipc endpoint has no port to add rank {dp_rank} to; use tcp://"
    )


def _check_apart(live: Endpoint, replay: Endpoint, dp_rank: int) -> None:
    is_same_port = bool(live.port) and live.port == replay.port and live.is_bound
    if is_same_port or (live.address == replay.address and live.port != 0):
        raise ConfigError(
            f"{LIVE_SETTING} {live.address} and {REPLAY_SETTING} {replay.address} are one place; give them different "
            "ports"
        )
    if not live.port or not replay.port or not live.is_bound:
        return
    # Rank r uses live + r and replay + r: with bases closer than the number of ranks, two ranks want one port.
    distance = abs(replay.port - live.port)
    if distance <= dp_rank:
        raise ConfigError(
            f"{LIVE_SETTING} and {REPLAY_SETTING} have ports {distance} apart, but ranks 0 to {dp_rank} add their "
            f"rank to both: two of them would want the same port; put them more than {dp_rank} apart, as 5557 and 5657"
        )
