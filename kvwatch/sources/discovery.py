"""Where an engine publishes its KV events: asked of the engine, or given.

vLLM from 0.32 on tells it at `/kv_event_sources`, SGLang within `/server_info`. Addresses are those that the engine
binds; a wildcard in them stands for the host at which the engine was asked.

Who binds an address does not always follow from it: see `who_binds`.
"""

import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvwatch.errors import ConfigError, KVWatchError
from kvwatch.sources.endpoints import Target
from kvwatch.sources.who_binds import connects_to

MAX_RANKS = 256
"""Data-parallel ranks of one engine that are followed; each takes four file descriptors."""

MAX_RANK = 65_535
MAX_PORT = 65_535

_TCP = re.compile(r"tcp://(?P<host>\[[^\[\]\s]+\]|[^\[\]/\s]+):(?P<port>\d{1,5})", re.ASCII)
_OWN_LOOPBACK = re.compile(r"^tcp://(127\.0\.0\.1|\[::1\]):")
_LOCAL = re.compile(r"(ipc|inproc)://\S+")
_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]", "[*]", ""})  # noqa: S104 - recognised, not bound


class DiscoveryError(KVWatchError):
    """An engine's answer does not say where it publishes."""


@dataclass(frozen=True, slots=True)
class Discovered:
    """What an engine says of itself."""

    targets: tuple[Target, ...]
    """One for each data-parallel rank that publishes, by rank; empty if the engine publishes nothing."""
    model_name: str = ""


def given_targets(
    live: str, replay: str | None, *, url: str, num_ranks: int = 1, topic: str = "", is_bound: bool = False
) -> tuple[Target, ...]:
    """Return the targets of addresses that an operator gave: those of rank 0; rank r has the port + r.

    Args:
        live: Address of live events, such as `tcp://10.0.0.7:5557`.
        replay: The same of replays.
        url: Of the engine, whose host stands for a wildcard.
        num_ranks: Data-parallel ranks.
        topic: Prefix of the topics to be read; empty for all.
        is_bound: Whether the sidecar binds `live`, since the engine connects to it.

    Raises:
        ConfigError: an address is malformed, or a rank's port lies beyond 65535.
    """
    host = host_of(url)
    return tuple(
        Target(
            rank,
            _of_rank(live, rank, None if is_bound else host),
            None if replay is None else _of_rank(replay, rank, host),
            topic,
            is_bound,
        )
        for rank in range(num_ranks)
    )


def read_vllm_sources(body: bytes, *, url: str) -> tuple[Target, ...]:
    """Return the targets of vLLM's answer: a map from each rank that publishes to its configuration.

    Raises:
        DiscoveryError: it is no such answer.
    """
    found = _decode(body)
    if not isinstance(found, dict):
        raise DiscoveryError("the answer to /kv_event_sources is no map; is this a vLLM?")
    rows = {_rank_of(text): row for text, row in found.items()}
    return _targets_of(rows, url, binds_all_interfaces=False)


def read_sglang_info(body: bytes, *, url: str) -> Discovered:
    """Return what SGLang's `/server_info` says: in the form of 0.5.22 and later, or by its configuration.

    Raises:
        DiscoveryError: it is no such answer.
    """
    found = _decode(body)
    if not isinstance(found, dict):
        raise DiscoveryError("the answer to /server_info is no map; is this an SGLang?")
    name = found.get("served_model_name")
    name = name if isinstance(name, str) else ""
    rows = found.get("kv_event_sources")
    if isinstance(rows, list) and rows:
        by_rank = {row.get("dp_rank"): _from_outside(row) for row in rows if isinstance(row, dict)}
        return Discovered(_targets_of(by_rank, url, binds_all_interfaces=True), name)
    described = found.get("kv_events")
    if isinstance(described, dict) and described:
        return Discovered(_sglang_described(described, url), name)
    return Discovered(_sglang_configured(found, url), name)


def host_of(url: str) -> str:
    """Return the host of a URL as an address has it: IPv6 in brackets."""
    host = urlsplit(url).hostname or "127.0.0.1"
    return f"[{host}]" if ":" in host else host


# ---------------------------------------------------------------- parts


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DiscoveryError(f"the engine's answer of {len(body)} bytes is no JSON ({error})") from error


def _from_outside(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of SGLang with the wildcard back in it, in whose place it writes its own loopback address."""
    return {
        key: _OWN_LOOPBACK.sub("tcp://*:", value) if isinstance(value, str) else value for key, value in row.items()
    }


def _rank_of(text: str) -> object:
    """Return a rank that JSON had to make a text of; anything else as it is."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else text


def _targets_of(rows: dict[Any, Any], url: str, *, binds_all_interfaces: bool) -> tuple[Target, ...]:
    if len(rows) > MAX_RANKS:
        raise DiscoveryError(f"the engine tells {len(rows)} sources of KV events; at most {MAX_RANKS} are followed")
    host = host_of(url)
    targets: dict[int, Target] = {}
    for rank, row in rows.items():
        live, replay, topic, publisher = _fields_of(row)
        if not isinstance(live, str) or not (rank is None or (type(rank) is int and 0 <= rank <= MAX_RANK)):
            raise DiscoveryError(f"a source of KV events is told as rank {rank!r} at {live!r}")
        if publisher == "null":
            continue
        try:
            targets[rank or 0] = Target(
                rank or 0,
                _of_rank(live, 0, host),
                _of_rank(replay, 0, host) if isinstance(replay, str) and replay else None,
                topic if isinstance(topic, str) else "",
                may_be_bound=connects_to(live, binds_all_interfaces=binds_all_interfaces),
            )
        except ConfigError as error:
            raise DiscoveryError(f"the engine tells an address that is none: {error}") from error
    return tuple(targets[rank] for rank in sorted(targets))


def _fields_of(row: object) -> tuple[object, ...]:
    if not isinstance(row, dict):
        raise DiscoveryError("the engine's answer tells something else than sources of KV events")
    return tuple(row.get(key) for key in ("endpoint", "replay_endpoint", "topic", "publisher"))


def _sglang_described(described: dict[str, Any], url: str) -> tuple[Target, ...]:
    port, replay_port = described.get("endpoint_port_base"), described.get("replay_endpoint_port_base")
    if described.get("publisher") != "zmq" or type(port) is not int:
        return ()
    host, topic = described.get("endpoint_host"), described.get("topic")
    name = host if isinstance(host, str) else "*"
    return _checked(
        live=f"tcp://{name}:{port}",
        replay=f"tcp://{name}:{replay_port}" if type(replay_port) is int else None,
        url=url,
        num_ranks=_num_ranks(described.get("dp_size")),
        topic=topic if isinstance(topic, str) else "",
    )


def _sglang_configured(found: dict[str, Any], url: str) -> tuple[Target, ...]:
    text = found.get("kv_events_config")
    if not isinstance(text, str) or not text:
        return ()
    config = _decode(text.encode())
    if not isinstance(config, dict) or config.get("publisher", "null") != "zmq":
        return ()
    replay, topic = config.get("replay_endpoint"), config.get("topic")
    return _checked(
        live=str(config.get("endpoint", "tcp://*:5557")),
        replay=replay if isinstance(replay, str) and replay else None,
        url=url,
        num_ranks=_num_ranks(found.get("dp_size")),
        topic=topic if isinstance(topic, str) else "",
    )


def _checked(*, live: str, replay: str | None, url: str, num_ranks: int, topic: str) -> tuple[Target, ...]:
    try:
        targets = given_targets(live, replay, url=url, num_ranks=num_ranks, topic=topic)
    except ConfigError as error:
        raise DiscoveryError(f"the engine tells an address that is none: {error}") from error
    may_be_bound = connects_to(live, binds_all_interfaces=True)
    return tuple(replace(target, may_be_bound=may_be_bound) for target in targets)


def _num_ranks(value: object) -> int:
    return value if isinstance(value, int) and 1 <= value <= MAX_RANKS else 1


def _of_rank(address: str, rank: int, wildcard_host: str | None) -> str:
    """Return an address with the rank added to its port, and a host for a wildcard (None keeps that)."""
    if _LOCAL.fullmatch(address):
        if rank:
            raise ConfigError(f"{address!r} has no port to add rank {rank} to; give each rank a tcp:// address")
        return address
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError(f"{address!r} is no address of KV events; write tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    port = int(match["port"]) + rank
    if not 0 < port <= MAX_PORT:
        raise ConfigError(f"port {match['port']} plus rank {rank} is {port}; ports go from 1 to {MAX_PORT}")
    host = match["host"]
    if wildcard_host is not None and host in _WILDCARDS:
        host = wildcard_host
    return f"tcp://{host}:{port}"
