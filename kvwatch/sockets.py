"""Addresses and bound sockets of listeners. Knows no protocol."""

import socket

from kvwatch.errors import ConfigError, ExporterError


def parse_address(listen: str, setting: str) -> tuple[str, int]:
    """Split `HOST:PORT` (`[::1]:9400` for IPv6).

    Args:
        listen: The address.
        setting: Name of the setting that it comes from, for the message.

    Raises:
        ConfigError: it is no address.
    """
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(
            f"{setting}: {listen!r} is not HOST:PORT with a port of 0 to 65535; write for instance 127.0.0.1:9400"
        )
    return host, int(port)


def bind(listen: str, setting: str) -> socket.socket:
    """Bind and return a listening socket, so that a taken port is an error of the start and not of a thread.

    Raises:
        ConfigError: `listen` is no address.
        ExporterError: the address cannot be bound.
    """
    host, port = parse_address(listen, setting)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a host's name
        raise ExporterError(f"{setting}: cannot resolve {host!r} ({error}); give a local address") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise ExporterError(
            f"{setting}: cannot listen on {listen} ({error.strerror}); stop what listens there or choose another"
            f" address with {setting}"
        ) from error
    bound.setblocking(False)
    return bound
