"""Engines that connect to an address instead of binding it, beside a sidecar that was not told so."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from engine_page_server import EnginePages
from rogue_engine import free_ports_in_a_row, indexed, pages, value
from rogue_publisher import RoguePublisher, batch, stored
from sidecar_stage import SidecarStage, sidecar_stage, wait_until


@contextmanager
def connecting(port: int) -> Iterator[RoguePublisher]:
    """Run a publisher as vLLM makes one of an endpoint without a wildcard; its replays it binds, as always."""
    with RoguePublisher(f"tcp://127.0.0.1:{port}", connects=True) as engine:
        yield engine


def told(*engines: RoguePublisher) -> dict[str, bytes | int]:
    """Return what such an engine answers: the addresses as they are."""
    return pages(*engines, host="nowhere")


def is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def wait_for(is_so: bool, port: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while is_free(port) != is_so:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for_blocks(stage: SidecarStage, number: int, rank: int = 0) -> None:
    wait_until(stage.page, lambda page: indexed(page, rank=rank) == number)


def test_ranks_that_connect_are_heard_where_nobody_else_listens() -> None:
    first = free_ports_in_a_row(2)
    with ExitStack() as stack:
        ranks = [stack.enter_context(connecting(first + rank)) for rank in range(2)]
        http = stack.enter_context(EnginePages(told(*ranks)))
        stage = stack.enter_context(sidecar_stage(f"a=vllm+{http.url}"))
        stage.wait_until_watched(2)
        wait_until(stage.page, lambda page: [value(page, "source_up", rank=rank) for rank in range(2)] == [1, 1])
        for rank, engine in enumerate(ranks):
            engine.publish(0, batch(stored(*range(rank + 1)), ts=time.time(), rank=rank))
        for rank in range(2):
            wait_for_blocks(stage, rank + 1, rank)


def test_an_address_that_the_engine_bound_itself_is_connected_to() -> None:
    with RoguePublisher() as engine, EnginePages(told(engine)) as http, sidecar_stage(f"a=vllm+{http.url}") as stage:
        engine.publish(0, batch(stored(1), ts=time.time()))
        stage.wait_until_watched(1)
        wait_for_blocks(stage, 1)
        assert value(stage.page(), "source_complete") == 1


def test_an_address_is_let_go_while_the_engine_is_gone_so_that_it_can_always_start() -> None:
    port = free_ports_in_a_row(1)
    with ExitStack() as stack:
        first = stack.enter_context(connecting(port))
        http = stack.enter_context(EnginePages(told(first)))
        stage = stack.enter_context(sidecar_stage(f"a=vllm+{http.url}"))
        stage.wait_until_watched(1)
        wait_until(stage.page, lambda page: value(page, "source_up") == 1)
        first.publish(0, batch(stored(1), ts=time.time()))
        wait_for_blocks(stage, 1)
        assert not is_free(port)

        gone = dict(http.pages)
        http.pages.clear()
        http.pages.update(dict.fromkeys(gone, 503))
        time.sleep(2)
        assert not is_free(port), "its publisher is connected still: it is not gone"
        first.close()
        wait_for(True, port)

        second = stack.enter_context(RoguePublisher(f"tcp://127.0.0.1:{port}", first.replay))
        http.pages.update(told(second))
        second.publish(0, batch(stored(1, 2, 3), ts=time.time()))
        wait_for_blocks(stage, 3)
        assert value(stage.page(), "source_resets_total") == 1

        second.close()
        http.pages.update(dict.fromkeys(gone, 503))
        wait_until(stage.page, lambda page: value(page, "source_up") == 0)
        third = stack.enter_context(connecting(port))
        http.pages.update(told(third))
        wait_until(stage.page, lambda page: value(page, "source_up") == 1)
        third.publish(0, batch(stored(*range(5)), ts=time.time()))
        wait_for_blocks(stage, 5)


@pytest.mark.parametrize("options", ["?mode=connect", "?kv_events=tcp://127.0.0.1:{port}"])
def test_where_it_is_told_to_connect_or_where_to_nothing_is_bound(options: str) -> None:
    port = free_ports_in_a_row(1)
    with (
        connecting(port) as engine,
        EnginePages(told(engine)) as http,
        sidecar_stage(f"a=vllm+{http.url}{options.format(port=port)}") as stage,
    ):
        stage.wait_until_watched(1)
        for _ in range(20):
            time.sleep(0.1)
            assert is_free(port)
        assert value(stage.page(), "source_up") == 0
