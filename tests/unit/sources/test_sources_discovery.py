"""What engines say of their publishers, and what operators give instead."""

import json
from typing import Any

import pytest

from kvwatch.errors import ConfigError
from kvwatch.sources.discovery import (
    MAX_RANK,
    MAX_RANKS,
    DiscoveryError,
    given_targets,
    host_of,
    read_sglang_info,
    read_vllm_sources,
)
from kvwatch.sources.endpoints import Target

URL = "http://10.1.2.3:8000"


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def configured(endpoint: object, **more: object) -> dict[str, object]:
    """One rank as vLLM 0.32 tells it."""
    row = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": None,
        "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "",
    }  # fmt: skip
    return row | more


RANKS = {
    "1": configured("tcp://*:5558", topic="kv"),
    "0": configured("tcp://0.0.0.0:5557", topic="kv", replay_endpoint="tcp://*:5657"),
    "2": configured("tcp://*:5559", publisher="null"),
}
TARGETS = (
    Target(0, "tcp://10.1.2.3:5557", "tcp://10.1.2.3:5657", "kv", may_be_bound=True),
    Target(1, "tcp://10.1.2.3:5558", None, "kv"),
)
"""vLLM connects to 0.0.0.0."""


def test_vllms_ranks_are_read_and_a_wildcard_is_the_engines_host() -> None:
    assert read_vllm_sources(body(RANKS), url=URL) == TARGETS


def test_a_host_that_an_engine_names_is_kept() -> None:
    rows = {"0": configured("tcp://10.9.9.9:41001"), "3": configured("ipc:///tmp/kv")}

    assert read_vllm_sources(body(rows), url=URL) == (
        Target(0, "tcp://10.9.9.9:41001", may_be_bound=True),
        Target(3, "ipc:///tmp/kv"),
    )


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "::", "[::]"])
def test_every_wildcard_is_recognised(host: str) -> None:
    rows = {"0": configured(f"tcp://{host}:5557")}

    (target,) = read_vllm_sources(body(rows), url="http://[fd00::7]:8000")
    assert target == Target(0, "tcp://[fd00::7]:5557", may_be_bound=host == "0.0.0.0")


def test_an_engine_without_publishers_has_no_targets() -> None:
    assert read_vllm_sources(b"{}", url=URL) == ()
    assert read_sglang_info(body({"served_model_name": "m", "kv_events_config": None}), url=URL).targets == ()
    assert read_sglang_info(body({"kv_events_config": '{"publisher": "null"}'}), url=URL).targets == ()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"<html>", b"[" * 100_000, body(7), body([]), body({"0": 7}), body({"0": {}}),
        body({"x": configured("tcp://*:1")}), body({"0": configured(7)}), body({"0": configured("tcp://x")}),
        body({"0": configured("tcp://*:0")}),
        body({"0": configured("tcp://*:70000")}), body({"0": configured("http://x:1")}),
        body({str(rank): configured("tcp://*:1") for rank in range(MAX_RANKS + 1)}),
        body({str(MAX_RANK + 1): configured("tcp://*:1")}), body({"-1": configured("tcp://*:1")}),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(answer: bytes) -> None:
    with pytest.raises(DiscoveryError):
        read_vllm_sources(answer, url=URL)


SGLANG_TARGETS = (
    Target(0, "tcp://10.1.2.3:5557", "tcp://10.1.2.3:5600", "kv"),
    Target(1, "tcp://10.1.2.3:5558", "tcp://10.1.2.3:5601", "kv"),
)


@pytest.mark.parametrize(
    "info",
    [
        {"kv_event_sources": [
            {"dp_rank": 0, "endpoint": "tcp://127.0.0.1:5557", "topic": "kv", "block_size": 16,
             "replay_endpoint": "tcp://[::1]:5600"},
            {"dp_rank": 1, "endpoint": "tcp://127.0.0.1:5558", "topic": "kv", "block_size": 16,
             "replay_endpoint": "tcp://127.0.0.1:5601"},
        ]},
        {"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv",
                       "dp_size": 2, "replay_endpoint_port_base": 5600, "block_size": 16}},
        {"dp_size": 2, "kv_events_config": json.dumps(
            {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5600", "topic": "kv"})},
    ],
)  # fmt: skip
def test_sglangs_info_is_read_in_every_form(info: dict[str, Any]) -> None:
    found = read_sglang_info(body({"served_model_name": "model", "version": "0.5.23", **info}), url=URL)

    assert (found.targets, found.model_name) == (SGLANG_TARGETS, "model")


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", body({"kv_events_config": "{"}), body({"kv_events_config": '{"publisher": "zmq", "endpoint": "x"}'}),
     body({"kv_events": {"publisher": "zmq", "endpoint_port_base": 70_000}}),
     body({"kv_event_sources": [{"dp_rank": -1, "endpoint": "tcp://127.0.0.1:5557"}]}),
     body({"kv_event_sources": [{"dp_rank": 10**20, "endpoint": "tcp://127.0.0.1:5557"}]}),
     body({"dp_size": 9, "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:65530"}'})],
)  # fmt: skip
def test_an_info_that_is_none_is_refused(answer: bytes) -> None:
    with pytest.raises(DiscoveryError):
        read_sglang_info(answer, url=URL)


@pytest.mark.parametrize(("host", "may_be_bound"), [("*", False), ("0.0.0.0", False), ("10.9.9.9", True)])
def test_sglang_may_connect_to_any_address_without_a_wildcard(host: str, may_be_bound: bool) -> None:
    described = {"publisher": "zmq", "endpoint_host": host, "endpoint_port_base": 5557, "dp_size": 2}

    found = read_sglang_info(body({"kv_events": described}), url=URL)

    assert [target.may_be_bound for target in found.targets] == [may_be_bound] * 2


def test_given_addresses_get_the_rank_added_to_their_ports() -> None:
    targets = given_targets("tcp://*:5557", "tcp://*:5657", url=URL, num_ranks=2, topic="t")

    assert targets == (
        Target(0, "tcp://10.1.2.3:5557", "tcp://10.1.2.3:5657", "t"),
        Target(1, "tcp://10.1.2.3:5558", "tcp://10.1.2.3:5658", "t"),
    )


def test_an_address_to_be_bound_keeps_its_wildcard() -> None:
    assert given_targets("tcp://*:5557", None, url=URL, is_bound=True) == (Target(0, "tcp://*:5557", None, "", True),)


@pytest.mark.parametrize(
    ("live", "num_ranks", "message"),
    [
        ("5557", 1, "is no address of KV events; write tcp://HOST:PORT"),
        ("tcp://host", 1, "is no address"),
        ("tcp://a b:1", 1, "is no address"),
        ("udp://host:1", 1, "is no address"),
        ("tcp://host:65535", 2, "port 65535 plus rank 1 is 65536; ports go from 1 to 65535"),
        ("tcp://host:0", 1, "ports go from 1"),
        ("ipc:///tmp/x", 2, "has no port to add rank 1 to"),
    ],
)
def test_a_given_address_that_cannot_be_is_refused(live: str, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given_targets(live, None, url=URL, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://a.b:1", "a.b"), ("http://[::1]:1/x", "[::1]"), ("https://A:1", "a"), ("nonsense", "127.0.0.1")],
)
def test_the_host_of_an_engine_is_that_of_its_url(url: str, host: str) -> None:
    assert host_of(url) == host
