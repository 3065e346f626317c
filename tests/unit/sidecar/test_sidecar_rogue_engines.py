"""A whole sidecar beside engines of which the tests are the publishers: ranks, limits, addresses, crashes."""

import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from engine_page_server import EnginePages
from kv_event_reader import TOPIC, fetch_replay
from rogue_engine import free_ports_in_a_row, indexed, pages, value
from rogue_publisher import CLEARED, RoguePublisher, batch, removed, stored
from sidecar_stage import SidecarStage, of_engine, sidecar_stage, wait_until

from kvwatch.exporters.kv_events.part import KVEvents
from kvwatch.telemetry import metrics as m


@contextmanager
def ranks_in_a_row(number: int) -> Iterator[list[RoguePublisher]]:
    """Publishers as data-parallel ranks: rank r at the port of rank 0 plus r."""
    live, replay = free_ports_in_a_row(number), free_ports_in_a_row(number)
    with ExitStack() as stack:
        yield [
            stack.enter_context(RoguePublisher(f"tcp://127.0.0.1:{live + r}", f"tcp://127.0.0.1:{replay + r}"))
            for r in range(number)
        ]


@pytest.mark.parametrize("is_given", [False, True], ids=["told by the engine", "given"])
def test_four_ranks_have_series_of_their_own_and_what_one_loses_is_not_the_others(*, is_given: bool) -> None:
    with ranks_in_a_row(4) as ranks, EnginePages(pages(*ranks)) as http:
        for rank, each in enumerate(ranks):
            each.publish(0, batch(stored(*range(10 * (rank + 1))), ts=time.time(), rank=rank))
        options = f"?kv_events={ranks[0].live}&replay={ranks[0].replay}&dp_ranks=4" if is_given else ""
        with sidecar_stage(f"a=vllm+{http.url}{options}") as stage:
            stage.wait_until_watched(4)
            wait_until(stage.page, lambda page: [indexed(page, rank=r) for r in range(4)] == [10, 20, 30, 40])
            for each in ranks:
                each.publish(1, batch(removed(3), ts=time.time()))
            ranks[2].kept.pop(1)
            ranks[2].publish(3, batch(stored(500), ts=time.time()))  # number 2 never was
            ranks[3].close()
            page = wait_until(
                stage.page,
                lambda page: value(page, "source_gaps_total", rank=2) == 1 and value(page, "source_up", rank=3) == 0,
            )
            assert [indexed(page, rank=r) for r in range(4)] == [9, 19, None, None]
            assert [value(page, "source_complete", rank=r) for r in range(3)] == [1, 1, 0]
            assert [value(page, "source_gaps_total", rank=r) for r in range(4)] == [0, 0, 1, 0]
            assert [value(page, "source_up", rank=r) for r in range(4)] == [1, 1, 1, 0]
            assert [value(page, "kv_block_evictions_total", rank=r, tier="device", reason="removed") for r in (0, 1, 2)]
            queried = [value(page, "prefix_cache_queried_tokens_total", rank=r) for r in range(4)]
            assert queried == [100, 200, 300, 400]


def test_blocks_are_published_again_with_their_size_though_it_was_not_known_at_first() -> None:
    publish: dict[str, Any] = {
        "kv_events": "tcp://127.0.0.1:0", "kv_events_socket": "bind", "kv_events_replay": "tcp://127.0.0.1:0",
        "kv_events_topic": TOPIC.decode(),
    }  # fmt: skip
    with ExitStack() as stack:
        engine = stack.enter_context(RoguePublisher())
        http = stack.enter_context(EnginePages(pages(engine)))
        context = stack.enter_context(zmq.Context())
        with sidecar_stage(f"a=vllm+{http.url}", **publish) as stage:
            stage.wait_until_watched(1)
            wait_until(stage.page, lambda page: value(page, "source_complete") == 1)
            engine.publish(0, batch(stored(1, 2), ts=time.time()))
            wait_until(stage.page, lambda page: indexed(page) == 2)
            part = next(each for each in stage.sidecar.fleet.watches[0]._options.parts if isinstance(each, KVEvents))
            assert part.publisher.replay_address is not None
            told = [
                event
                for _, payload in fetch_replay(context, part.publisher.replay_address, 0)
                for event in msgspec.msgpack.decode(payload)[1]
                if event["type"] == "BlockStored"
            ]
            assert [(event["block_hashes"], event["block_size"]) for event in told] == [([1, 2], 16)]


def test_beyond_the_limit_nothing_is_counted_and_the_log_says_why_until_a_clear(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with RoguePublisher() as engine, EnginePages(pages(engine)) as http:
        engine.publish(0, batch(stored(*range(90)), ts=time.time()))
        with sidecar_stage(f"a=vllm+{http.url}?max_blocks=100") as stage:
            stage.wait_until_watched(1)
            wait_until(stage.page, lambda page: indexed(page) == 90)
            for number in range(1, 40):
                engine.publish(number, batch(stored(*range(100 * number, 100 * number + 50)), ts=time.time()))
            page = wait_until(stage.page, lambda page: value(page, "source_complete") == 0)
            assert indexed(page) is None
            engine.publish(40, batch(CLEARED, stored(7), ts=time.time()))
            wait_until(stage.page, lambda page: indexed(page) == 1 and value(page, "source_complete") == 1)
    assert caplog.text.count("raise the option max_blocks") == 1


def test_everything_works_over_ipv6() -> None:
    loopback = ("tcp://[::1]:*", "tcp://[::1]:*")
    with RoguePublisher(*loopback) as engine, EnginePages(pages(engine, host="[::1]"), host="::1") as http:
        engine.publish(0, batch(stored(1), ts=time.time()))
        with sidecar_stage(f"a=vllm+{http.url}", metrics_listen="[::1]:0", grpc_listen="off") as stage:
            stage.wait_until_watched(1)
            host, port = stage.sidecar.fleet.metrics_address or ("", 0)
            assert host == "::1"
            engine.publish(1, batch(stored(2), ts=time.time()))
            stage_of_ipv6 = _Elsewhere(stage, f"http://[::1]:{port}")
            wait_until(stage_of_ipv6.page, lambda page: indexed(page) == 2)


class _Elsewhere(SidecarStage):
    def __init__(self, stage: SidecarStage, url: str) -> None:
        super().__init__(stage.sidecar)
        self._url = url

    @property
    def url(self) -> str:
        return self._url


def test_two_sidecars_beside_one_engine_show_the_same_and_one_can_go() -> None:
    with RoguePublisher() as engine, EnginePages(pages(engine)) as http:
        engine.publish(0, batch(stored(1), ts=time.time()))
        with sidecar_stage(f"a=vllm+{http.url}") as stays:
            with sidecar_stage(f"a=vllm+{http.url}") as goes:
                for stage in (stays, goes):
                    stage.wait_until_watched(1)
                    wait_until(stage.page, lambda page: indexed(page) == 1)
            engine.publish(1, batch(stored(2), ts=time.time()))
            wait_until(stays.page, lambda page: indexed(page) == 2)


def test_an_engine_that_connects_is_found_where_the_sidecar_is_told_to_bind() -> None:
    port = free_ports_in_a_row(1)
    with (
        RoguePublisher(f"tcp://127.0.0.1:{port}", connects=True) as engine,
        EnginePages(pages(engine)) as http,
        sidecar_stage(f"a=vllm+{http.url}?mode=bind") as stage,
    ):
        stage.wait_until_watched(1)
        wait_until(stage.page, lambda page: value(page, "source_complete") == 1)
        engine.publish(0, batch(stored(1), ts=time.time()))
        wait_until(stage.page, lambda page: indexed(page) == 1)


def test_an_engine_that_is_killed_in_the_middle_of_a_replay_is_followed_in_its_next_life() -> None:
    def half_of(kept: dict[int, bytes], start: int) -> list[tuple[int, bytes]]:
        return [(seq, kept[seq]) for seq in sorted(kept) if start <= seq < 50]

    with RoguePublisher(answers=half_of, has_end=False) as first, EnginePages(pages(first)) as http:
        for number in range(100):
            first.publish(number, batch(stored(number), ts=time.time()))
        with sidecar_stage(f"a=vllm+{http.url}") as stage:
            deadline = time.monotonic() + 60
            while not first.requests:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            first.close()
            with RoguePublisher(first.live, first.replay) as second:
                second.publish(0, batch(stored(1001, 1002), ts=time.time()))
                stage.wait_until_watched(1)
                page = wait_until(stage.page, lambda page: indexed(page) == 2, 60)
                assert value(page, "source_complete") == 1
                assert value(page, "source_drift_blocks") == 0


def test_sixty_four_engines_that_are_not_there_do_not_hold_up_the_one_that_is() -> None:
    kinds = ("grpc://127.0.0.1:1", "vllm+http://127.0.0.1:1", "sglang+https://127.0.0.1:1")
    dead = [f"e{number}={kinds[number % 3]}" for number in range(63)]
    with RoguePublisher() as engine, EnginePages(pages(engine)) as http:
        engine.publish(0, batch(stored(1), ts=time.time()))
        with sidecar_stage(*dead, f"a=vllm+{http.url}") as stage:
            page = wait_until(stage.page, lambda page: indexed(page) == 1)
            ups = [number for (name, _), number in page.items() if name == "kvwatch_" + m.SOURCE_UP.name]
            assert (len(ups), sum(ups)) == (64, 1)
            began = time.monotonic()
        assert time.monotonic() - began < 15, "SIGTERM would be slow"


def test_garbage_between_batches_costs_neither_what_is_known_nor_the_sidecar() -> None:
    with RoguePublisher() as engine, EnginePages(pages(engine)) as http:
        engine.publish(0, batch(stored(*range(50)), ts=time.time()))
        with sidecar_stage(f"a=vllm+{http.url}") as stage:
            wait_until(stage.page, lambda page: indexed(page) == 50)
            broken_store = {"type": "BlockStored", "block_hashes": "none"}
            garbage = (b"", b"\xc1", b"<html>", batch(broken_store, ts=1.0), bytes(17 << 20))
            for number, payload in enumerate(garbage, 1):
                engine.publish(number, payload)
            engine.send([b"kv", struct.pack(">Q", 6)])
            engine.publish(6, batch(stored(99), ts=-5.0))
            page = wait_until(stage.page, lambda page: value(page, "kv_block_stores_total", tier="device") == 51)
            assert value(page, "source_complete") == 0
            counts = {
                dict(labels)["kind"]: number
                for (name, labels), number in of_engine(page, "a").items()
                if name == "kvwatch_source_decode_errors_total" and number
            }
            assert counts == {"msgpack": 3, "hashes": 1, "size": 1, "frames": 1}
            assert len(stage.sidecar.fleet.watches[0].control.snapshot().indexed[0].hashes) == 51
