"""The sockets of KV events: nothing is lost in silence, nobody can hold the publisher up."""

import asyncio
import struct
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import structlog
import zmq
from kv_event_reader import TOPIC, fetch_replay

from kvwatch.errors import ExporterError
from kvwatch.exporters.kv_events import publisher as publisher_module
from kvwatch.exporters.kv_events.endpoints import resolve_endpoints
from kvwatch.exporters.kv_events.history import History
from kvwatch.exporters.kv_events.publisher import Publisher
from kvwatch.wire.kv_events import BlockRemoved, BlockStored, WireError

Context = zmq.Context[zmq.Socket[bytes]]


def store(number: int, num_tokens: int = 16) -> BlockStored:
    return BlockStored(
        block_hashes=[number], parent_block_hash=None, token_ids=[number] * num_tokens, block_size=num_tokens,
        lora_id=None, medium="GPU", lora_name=None,
    )  # fmt: skip


def make(live: str = "tcp://127.0.0.1:0", replay: str | None = "tcp://127.0.0.1:0", rank: int = 0) -> Publisher:
    publisher = Publisher(resolve_endpoints(live, replay, rank, "bind"), TOPIC.decode(), History(10_000, 1 << 28), rank)
    publisher.open()
    return publisher


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = make()
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(0)


def while_serving(publisher: Publisher, act: Callable[[str], object], seconds: float = 60) -> object:
    """Let `act` talk to the replay address from another thread while replays are served."""

    async def run() -> object:
        stop = asyncio.Event()
        serving = asyncio.create_task(publisher.serve_replays(stop))
        assert publisher.replay_address is not None
        try:
            return await asyncio.wait_for(asyncio.to_thread(act, publisher.replay_address), seconds)
        finally:
            stop.set()
            await asyncio.wait_for(serving, 60)

    return asyncio.run(run())


def test_a_reader_that_is_slow_gets_its_whole_replay(publisher: Publisher, context: Context) -> None:
    """sglang#38945: a ROUTER at its high-water mark dropped the replay, 2 of 1,024 batches arrived, no end marker."""
    num_batches = 4_000
    for number in range(num_batches):
        publisher.publish(1.0, [store(number, 512)])

    def read_slowly(address: str) -> list[int]:
        with context.socket(zmq.DEALER) as dealer:
            for option, value in [(zmq.RCVHWM, 2), (zmq.RCVBUF, 4096), (zmq.LINGER, 0), (zmq.RCVTIMEO, 20_000)]:
                dealer.setsockopt(option, value)
            dealer.connect(address)
            dealer.send_multipart([b"", struct.pack(">Q", 0)])
            time.sleep(1.5)
            seen: list[int] = []
            while True:
                seq = dealer.recv_multipart()[-2]
                if seq == b"\xff" * 8:
                    return seen
                seen.append(struct.unpack(">Q", seq)[0])

    assert while_serving(publisher, read_slowly) == list(range(num_batches))
    assert (publisher.num_replays, publisher.num_replays_given_up) == (1, 0)


def test_readers_that_stop_reading_are_given_up_and_others_are_served(
    publisher: Publisher, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "STALL_SECONDS", 0.3)
    for number in range(6_000):
        publisher.publish(1.0, [store(number, 512)])

    def act(address: str) -> int:
        stuck = [context.socket(zmq.DEALER) for _ in range(6)]
        for dealer in stuck:
            for option, value in [(zmq.RCVHWM, 2), (zmq.RCVBUF, 4096), (zmq.LINGER, 0)]:
                dealer.setsockopt(option, value)
            dealer.connect(address)
            dealer.send_multipart([b"", struct.pack(">Q", 0)])
        time.sleep(0.3)
        try:
            return len(fetch_replay(context, address, 5_990))
        finally:
            for dealer in stuck:
                dealer.close()

    with structlog.testing.capture_logs() as lines:
        assert while_serving(publisher, act) == 10
    assert publisher.num_replays_given_up >= 3
    assert sum("did not take its replay" in line["event"] for line in lines) == 1, "one line a minute, not one each"


def test_a_reader_that_goes_away_in_the_middle_hurts_nobody(publisher: Publisher, context: Context) -> None:
    for number in range(3_000):
        publisher.publish(1.0, [store(number, 512)])

    def act(address: str) -> int:
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.RCVHWM, 2)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(address)
            dealer.send_multipart([b"", struct.pack(">Q", 0)])
            dealer.recv_multipart()
        return len(fetch_replay(context, address, 0))

    assert while_serving(publisher, act) == 3_000


def test_what_is_no_request_is_not_answered(publisher: Publisher, context: Context) -> None:
    publisher.publish(1.0, [store(1)])

    def act(address: str) -> list[int]:
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, 300)
            dealer.connect(address)
            for frames in ([b""], [b"", b"", b""], [b"x", b"\0" * 8], [b"", b"\0" * 9], [b"", b""]):
                dealer.send_multipart(frames)
            with pytest.raises(zmq.Again):
                dealer.recv_multipart()
        return [seq for seq, _ in fetch_replay(context, address, 0)]

    assert while_serving(publisher, act) == [0]


@pytest.mark.parametrize(("start", "expected"), [(0, [0, 1, 2]), (2, [2]), (3, []), (2**64 - 2, []), (2**64 - 1, [])])
def test_a_replay_begins_where_it_is_asked_to(
    publisher: Publisher, context: Context, start: int, expected: list[int]
) -> None:
    for number in range(3):
        publisher.publish(1.0, [store(number)])

    replayed = while_serving(publisher, lambda address: fetch_replay(context, address, start))

    assert [seq for seq, _ in replayed] == expected  # type: ignore[attr-defined]


def test_a_batch_that_cannot_be_encoded_uses_up_no_number(publisher: Publisher, context: Context) -> None:
    """vLLM: a failed encode leaves a hole that no replay can ever fill."""
    publisher.publish(1.0, [store(1)])
    with pytest.raises(WireError):
        publisher.publish(1.0, [BlockRemoved(block_hashes=[2**64], medium="GPU")])
    publisher.publish(1.0, [store(2)])

    replayed = while_serving(publisher, lambda address: fetch_replay(context, address, 0))

    assert [seq for seq, _ in replayed] == [0, 1]  # type: ignore[attr-defined]


def test_live_messages_have_three_frames_and_numbers_without_holes(publisher: Publisher, context: Context) -> None:
    """vllm#55679 and others: the frame with the sequence number was missing."""
    with context.socket(zmq.SUB) as live:
        live.setsockopt(zmq.RCVTIMEO, 5_000)
        live.setsockopt(zmq.LINGER, 0)
        live.subscribe(TOPIC)
        live.connect(publisher.live_address)
        deadline = time.monotonic() + 60
        while not live.poll(20) and time.monotonic() < deadline:
            publisher.publish(1.0, [store(0)])  # until the subscription has arrived
        for number in range(200):
            publisher.publish(1.0, [store(number)])
        last = publisher.num_batches - 1
        seqs: list[int] = []
        while not seqs or seqs[-1] != last:
            topic, seq, _ = live.recv_multipart()
            assert topic == TOPIC
            seqs.append(struct.unpack(">Q", seq)[0])

    assert len(seqs) >= 200
    assert all(after == before + 1 for before, after in pairwise(seqs))


def test_a_live_reader_that_never_reads_costs_bounded_memory_and_no_time(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "LIVE_HWM", 100)
    bounded = make()
    with context.socket(zmq.SUB) as live:
        live.setsockopt(zmq.RCVHWM, 1)
        live.setsockopt(zmq.LINGER, 0)
        live.subscribe(b"")
        live.connect(bounded.live_address)
        time.sleep(0.2)
        started = time.monotonic()
        for number in range(20_000):
            bounded.publish(1.0, [store(number)])
        seconds = time.monotonic() - started
    bounded.close()

    assert seconds < 10, "the publisher waited for a reader"


def test_a_taken_endpoint_is_an_error_that_says_what_to_do(publisher: Publisher) -> None:
    with pytest.raises(
        ExporterError, match=r"--kv-events: cannot bind tcp://127\.0\.0\.1:\d+ .* choose another endpoint"
    ):
        make(live=publisher.live_address)
    with pytest.raises(ExporterError, match=r"--kv-events-replay: cannot bind"):
        make(replay=publisher.live_address)


def test_ipc_and_ipv6_endpoints_work(tmp_path: Path, context: Context) -> None:
    """vLLM never switches IPv6 on, so that tcp://[::]:PORT fails there."""
    for live in (f"ipc://{tmp_path}/kv.sock", "tcp://[::1]:0"):
        try:
            publisher = make(live=live, replay=None)
        except ExporterError as error:
            pytest.skip(f"this machine has no IPv6 loopback ({error})")
        with context.socket(zmq.SUB) as reader:
            reader.setsockopt(zmq.IPV6, 1)
            reader.setsockopt(zmq.LINGER, 0)
            reader.subscribe(b"")
            reader.connect(publisher.live_address)
            deadline = time.monotonic() + 60
            while not reader.poll(20) and time.monotonic() < deadline:
                publisher.publish(1.0, [store(0)])
            assert reader.recv_multipart(zmq.DONTWAIT)[0] == TOPIC
        publisher.close()


def test_a_publisher_that_connects_reaches_a_reader_that_binds(context: Context) -> None:
    with context.socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.subscribe(b"")
        port = reader.bind_to_random_port("tcp://127.0.0.1")
        publisher = Publisher(
            resolve_endpoints(f"tcp://127.0.0.1:{port}", None, 0), TOPIC.decode(), History(10, 1 << 20)
        )
        publisher.open()
        deadline = time.monotonic() + 60
        while not reader.poll(20) and time.monotonic() < deadline:
            publisher.publish(1.0, [store(0)])
        assert reader.recv_multipart(zmq.DONTWAIT)[0] == TOPIC
        publisher.close()


def test_closing_twice_and_without_opening_is_safe() -> None:
    publisher = Publisher(resolve_endpoints("tcp://127.0.0.1:0", None, 0, "bind"), "", History(10, 1 << 20))
    publisher.close()
    publisher.open()

    publisher.close()
    publisher.close()
