"""Whether an address is bound by the engine or by the sidecar."""

import asyncio
import socket

import pytest

from kvwatch.sources import who_binds
from kvwatch.sources.endpoints import Target
from kvwatch.sources.who_binds import Listener, connects_to, who_listens


def ask(host: str, port: int) -> Listener:
    return asyncio.run(who_listens(Target(0, f"tcp://{host}:{port}", may_be_bound=True)))


@pytest.mark.parametrize(
    ("address", "of_vllm", "of_sglang"),
    [
        ("tcp://*:5557", False, False), ("tcp://[::]:5557", False, False), ("tcp://:::5557", False, False),
        ("tcp://[::1]:5557", False, False), ("tcp://0.0.0.0:5557", True, False), ("tcp://10.0.0.7:5557", True, True),
        ("tcp://router:5557", True, True), ("ipc:///run/kv", False, False), ("inproc://kv", False, False),
    ],
)  # fmt: skip
def test_the_text_of_an_address_tells_whether_an_engine_may_connect_to_it(
    address: str, of_vllm: bool, of_sglang: bool
) -> None:
    assert connects_to(address, binds_all_interfaces=False) == of_vllm
    assert connects_to(address, binds_all_interfaces=True) == of_sglang


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_is_tried(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert ask(host, port) is Listener.SOMEBODY
    assert ask(host, port) is Listener.NOBODY


@pytest.mark.parametrize("host", ["no.such.host.invalid", "[::ffff", "256.1.1.1"])
def test_what_cannot_be_tried_is_not_bound(host: str) -> None:
    assert ask(host, 5557) is Listener.SOMEBODY


def test_only_addresses_of_this_machine_are_its_own() -> None:
    def is_own(host: str) -> bool:
        return asyncio.run(who_binds._is_own(host))

    assert is_own("127.0.0.1")
    assert is_own("localhost")
    assert not is_own("192.0.2.1"), "an address for documentation, which no machine has"
