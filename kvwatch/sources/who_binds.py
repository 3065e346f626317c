"""Who of engine and sidecar binds an address that the engine tells as the one of its live events.

An address with a wildcard the engine binds. With any other it may have done either: vLLM connects to it, unless it
chose the port itself; SGLang connects unless told to bind. Only trying shows it: an engine that binds has done so
before it answers, so if nobody listens there, the engine is the one that connects, and whoever wants to hear it must
bind. That can only be done where the address is one of this machine.
"""

import asyncio
import socket
from dataclasses import replace
from enum import StrEnum

from kvwatch.sources.endpoints import Target

CONNECT_SECONDS = 1.0


class Listener(StrEnum):
    """Who listens at an address."""

    SOMEBODY = "somebody"
    """Or it cannot be told: then connecting, again and again, does no harm."""
    NOBODY = "nobody"
    NOT_HERE = "not here"
    """Nobody, and this machine has no such address."""


def connects_to(address: str, *, binds_all_interfaces: bool) -> bool:
    """Whether an engine that is given an address may connect to it.

    Args:
        address: As it stands in the engine's configuration.
        binds_all_interfaces: Whether this make binds 0.0.0.0; vLLM connects to it, which is its own loopback.
    """
    has_wildcard = "*" in address or "::" in address or (binds_all_interfaces and "0.0.0.0" in address)  # noqa: S104
    return address.startswith("tcp:") and not has_wildcard


async def who_listens(target: Target) -> Listener:
    """Try the live address of a target. Never raises; takes a second at most, or what a name server takes."""
    host, _, port = target.live.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
    except ConnectionRefusedError:
        return Listener.NOBODY if await _is_own(host) else Listener.NOT_HERE
    except (OSError, ValueError):  # also `TimeoutError`, and a name that nobody knows
        return Listener.SOMEBODY
    return Listener.SOMEBODY


def bound(target: Target) -> Target:
    """Return the same target, of which the sidecar binds the live address."""
    return replace(target, is_bound=True)


async def _is_own(host: str) -> bool:
    """Whether a host is an address of this machine: one that can be bound."""
    found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    return bool(found) and all(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: object) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind(address)  # type: ignore[arg-type]  # as `getaddrinfo` gave it
        except OSError:
            return False
    return True
