"""KV events out: what a reader of the wire believes is resident is what the pool holds, exactly, whatever happened."""

import dataclasses
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import zmq
from builders import NullModel, make_core, make_request, make_settings, run_until_idle
from kv_event_reader import TOPIC, KVEventReader, fetch_replay, read_live, wait_for

from kvwatch.exporters.identity import EngineIdentity
from kvwatch.exporters.kv_events.part import KVEvents, KVEventsSettings
from kvwatch.ledger.collector import Collector
from kvwatch.observatory import Observatory
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.errors import EngineOverloaded, RequestInvalid
from kvwatch_engine.contracts.request import Refusal
from kvwatch_engine.core import EngineCore
from kvwatch_engine.engine import Engine
from kvwatch_engine.memory.block_hash import block_hash

NAMES = count()


def wire_ints(core: EngineCore) -> set[int | bytes]:
    """What must be resident: the hashes of used and cached blocks, as integers of the wire."""
    return {int.from_bytes(digest[24:], "big") for digest in core.manager.pool.hashes if digest is not None}


def wire_bytes(core: EngineCore) -> set[int | bytes]:
    return {bytes(digest) for digest in core.manager.pool.hashes if digest is not None}


class Stage:
    """An engine that is stepped by hand, its publisher, and a live reader in the same process."""

    def __init__(self, *, hash_kind: str = "int", log_capacity: int = 100_000, **settings: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.log = EventLog(log_capacity)
        self.core = make_core(NullModel(), self.log, emit_token_ids=True, **settings)
        name = f"inproc://kv-events-{next(NAMES)}"
        config = KVEventsSettings(live=name, topic=TOPIC.decode(), hash_kind=hash_kind)  # type: ignore[arg-type]
        self.part = KVEvents(config, self.log.clock, self.context)
        self.part.open()
        self.collector = Collector(self.log, lambda _: self.core.snapshot(), self.part, "kv_events")
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.subscribe(TOPIC)
        self.socket.connect(self.part.publisher.live_address)
        time.sleep(0.02)  # a publisher looks for subscriptions at most every millisecond or so
        self.reader = KVEventReader()

    def catch_up(self) -> None:
        """Publish what happened and read it."""
        if self.collector.needs_snapshot:
            assert self.collector.heal()
        while self.collector.drain() or self.collector.needs_snapshot:
            if self.collector.needs_snapshot:
                assert self.collector.heal()
        for seq, payload in read_live(self.socket):
            self.reader.take(seq, payload)

    def close(self) -> None:
        self.socket.close(0)
        self.part.close()
        self.context.term()


class RandomLoad:
    """Random requests over few tokens, so that prefixes are shared, and everything that ends them early."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core = core
        self.rng = random.Random(seed)
        self.number = 0
        self.num_resets = 0

    def act(self) -> None:
        """Do one random thing, then step."""
        chosen = self.rng.random()
        live = self.core.live_request_ids()
        if chosen < 0.45 and len(live) < 12:
            self.submit()
        elif chosen < 0.5 and live:
            self.core.abort(self.rng.choice(live))
        elif chosen < 0.51:
            self.core.manager.pool.clear_cache()
            self.num_resets += 1
        self.core.step()

    def submit(self) -> None:
        self.number += 1
        prompt = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 30))]
        n = self.rng.choice([1, 1, 1, 2, 3])
        request = make_request(f"r{self.number}", prompt, n=n, max_tokens=self.rng.randrange(1, 12), ignore_eos=True)
        self.core.add(request, self.core.log.clock.monotonic_ns())


@pytest.fixture
def stage() -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(**options: object) -> Stage:
        made.append(Stage(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("seed", "num_steps"), [*((seed, 250) for seed in range(6)), pytest.param(6, 10_000, marks=pytest.mark.slow)]
)
def test_after_every_step_of_a_random_run_the_reader_knows_exactly_the_used_and_cached_hashes(
    stage: Callable[..., Stage], seed: int, num_steps: int
) -> None:
    """vllm#55092: a hash was removed while another copy was resident. tokenspeed#166: every lookup cleared all."""
    it = stage(num_blocks=30)
    load = RandomLoad(it.core, seed)

    for _ in range(num_steps):
        load.act()
        it.catch_up()

        assert it.reader.hashes == wire_ints(it.core)
    assert it.reader.num_batches > num_steps / 5
    assert not it.reader.has_gap
    assert it.reader.num_clears == 1 + load.num_resets, "the first batch of a life, and resets"


def test_parents_and_tokens_on_the_wire_give_the_hash_that_they_name(stage: Callable[..., Stage]) -> None:
    """vllm#58119: the parent hash was unreported or wrong."""
    it = stage(hash_kind="bytes", num_blocks=40)
    load = RandomLoad(it.core, 7)
    num_checked = 0

    for _ in range(150):
        load.act()
        it.catch_up()
        assert it.reader.hashes == wire_bytes(it.core)
        for digest, block in it.reader.blocks.get(("GPU", 0), {}).items():
            if block.parent is not None:
                assert isinstance(block.parent, bytes)
                assert block_hash(BlockHash(block.parent), block.token_ids) == digest
                num_checked += 1

    assert num_checked > 100


def test_equal_salts_have_equal_marks_and_no_mark_is_the_salt(stage: Callable[..., Stage]) -> None:
    """vllm#33304: a router that is told tokens alone sends requests to blocks that their salt keeps from them."""
    it = stage(num_blocks=40)
    it.catch_up()
    for name, salt in (("a", "blue"), ("b", "red"), ("c", "blue"), ("d", "")):
        request = make_request(name, [ord(name)] * 9, max_tokens=1)
        it.core.add(dataclasses.replace(request, cache_salt=salt), it.log.clock.monotonic_ns())
    run_until_idle(it.core)
    it.catch_up()

    blocks = it.reader.blocks["GPU", 0].values()
    marks = {block.token_ids[0]: block.extra_keys for block in blocks if block.parent is None}
    assert marks[ord("a")] == marks[ord("c")] != marks[ord("b")]
    assert marks[ord("d")] is None
    for mark in (marks[ord("a")], marks[ord("b")]):
        assert mark is not None
        assert [re.fullmatch(r"[0-9a-f]{32}", digest) is not None for digest in mark] == [True]
    assert all(block.extra_keys is None for block in blocks if block.parent is not None)


@pytest.mark.parametrize("seed", range(4))
def test_after_lost_events_readers_are_cleared_and_told_again_what_is_resident(
    stage: Callable[..., Stage], seed: int
) -> None:
    it = stage(num_blocks=30, log_capacity=16)
    load = RandomLoad(it.core, seed)

    for round_number in range(40):
        for _ in range(load.rng.randrange(1, 8)):
            load.act()
        it.catch_up()

        assert it.reader.hashes == wire_ints(it.core), f"round {round_number}"

    assert it.collector.num_gaps > 5
    assert it.reader.num_clears > it.collector.num_gaps
    assert not it.reader.has_gap


def test_what_was_stored_during_the_loss_is_told_with_its_parent(stage: Callable[..., Stage]) -> None:
    """llm-d-kv-cache#372 (O47): a block whose parent nobody tells has no place in a reader's tree."""
    it = stage(hash_kind="bytes", num_blocks=30, log_capacity=16)
    load = RandomLoad(it.core, 3)
    num_untold = 0

    for _ in range(40):
        for _ in range(load.rng.randrange(1, 8)):
            load.act()
        it.catch_up()

        pool = it.core.manager.pool
        for digest, parent in zip(pool.hashes, pool.parents, strict=True):
            if digest is not None:
                block = it.reader.blocks["GPU", 0][bytes(digest)]
                assert block.parent == parent
                num_untold += not block.token_ids and parent is not None

    assert it.collector.num_gaps > 5
    assert num_untold > 20, "whose tokens are not known is told with its parent"


def test_what_was_resident_before_the_loss_is_told_again_with_its_parent_and_tokens(
    stage: Callable[..., Stage],
) -> None:
    it = stage(num_blocks=41, log_capacity=64)
    it.core.add(make_request("a", range(20), max_tokens=1, ignore_eos=True), 0)
    while it.core.has_work:
        it.core.step()
        it.catch_up()
    before = dict(it.reader.blocks["GPU", 0])
    assert len(before) == 5

    for _ in range(100):  # lost: nobody reads
        it.core.reject(Refusal("x", "invalid"))
    it.catch_up()

    assert it.collector.num_gaps == 1
    assert it.reader.blocks["GPU", 0] == before


def test_a_reset_is_one_clear_and_no_removals(stage: Callable[..., Stage]) -> None:
    """aibrix#2287, vllm: an idle engine never flushed it. tokenspeed#166: it came with every lookup."""
    it = stage(num_blocks=41)
    it.core.add(make_request("a", range(20), max_tokens=1, ignore_eos=True), 0)
    while it.core.has_work:
        it.core.step()
    it.catch_up()
    clears, batches = it.reader.num_clears, it.reader.num_batches
    assert it.reader.hashes

    it.core.manager.pool.clear_cache()
    it.catch_up()

    assert it.reader.hashes == set()
    assert (it.reader.num_clears, it.reader.num_batches) == (clears + 1, batches + 1)


def test_an_idle_engine_says_nothing(stage: Callable[..., Stage]) -> None:
    it = stage()
    it.catch_up()
    batches = it.part.publisher.num_batches

    for _ in range(5):
        it.catch_up()

    assert (batches, it.part.publisher.num_batches) == (1, 1)
    assert it.reader.num_clears == 1


# ---------------------------------------------------------------- over TCP, in a running observatory


@contextmanager
def running(buffer_batches: int = 10_000) -> Iterator[tuple[Engine, Observatory, KVEvents]]:
    model = NullModel()
    settings = make_settings(num_blocks=41, emit_token_ids=True)
    model.block_size = settings.block_size
    log = EventLog()
    engine = Engine(settings, model, log, lambda _: None)
    part = KVEvents(
        KVEventsSettings(
            live="tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0", topic=TOPIC.decode(), mode="bind",
            buffer_batches=buffer_batches,
        ),
        log.clock,
    )  # fmt: skip
    observatory = Observatory(log, engine, EngineIdentity("test"), parts=[part])
    engine.start()
    observatory.start()
    try:
        yield engine, observatory, part
    finally:
        observatory.stop()
        engine.stop()


def drive(engine: Engine, part: KVEvents, seed: int, count: int = 60) -> set[int | bytes]:
    """Put a random load on a running engine; return what is resident when all of it was published."""
    rng = random.Random(seed)
    for index in range(count):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        request = make_request(f"{seed}-{index}", prompt, n=rng.choice([1, 1, 2]), max_tokens=rng.randrange(1, 12))
        try:
            engine.submit(request)
        except (EngineOverloaded, RequestInvalid):
            continue
        if rng.random() < 0.1:
            engine.abort(request.request_id)
        if rng.random() < 0.3:
            time.sleep(0.002)
    wait_for(lambda: engine.num_live_requests == 0)
    seen = -1
    deadline = time.monotonic() + 60
    while seen != part.publisher.num_batches and time.monotonic() < deadline:
        seen = part.publisher.num_batches
        time.sleep(0.25)  # several polls of the collector
    hashes = engine.snapshot().tiers[0].hashes
    return {int.from_bytes(digest[24:], "big") for digest in hashes if digest is not None}


def test_a_reader_that_joins_late_and_asks_for_a_replay_knows_everything() -> None:
    with running() as (engine, _, part), zmq.Context() as context:
        resident = drive(engine, part, 1)
        assert part.publisher.replay_address is not None

        replayed = fetch_replay(context, part.publisher.replay_address, 0)

        reader = KVEventReader()
        for seq, payload in replayed:
            reader.take(seq, payload)
        assert [seq for seq, _ in replayed] == list(range(part.publisher.num_batches))
        assert reader.hashes == resident
        assert resident


def test_a_reader_that_joins_after_the_buffer_has_overflowed_knows_everything_too() -> None:
    """vllm#40363: replay is bounded, so that a late reader could never know the whole state."""
    with running(buffer_batches=5) as (engine, _, part), zmq.Context() as context:
        resident = drive(engine, part, 2)
        assert part.publisher.replay_address is not None
        assert part.publisher.num_batches > 20

        replayed = fetch_replay(context, part.publisher.replay_address, 0)

        first, last = replayed[0][0], replayed[-1][0]
        assert [seq for seq, _ in replayed] == list(range(first, part.publisher.num_batches))
        assert last == part.publisher.num_batches - 1
        reader = KVEventReader()
        reader.skip_to(first)
        for seq, payload in replayed:
            reader.take(seq, payload)
        assert reader.hashes == resident


def test_a_reader_that_lost_live_messages_is_whole_again_after_a_replay_from_the_hole() -> None:
    """vllm#45174, sglang#38945: replays lacked the topic, or lost replies without a word."""
    with running() as (engine, _, part), zmq.Context() as context:
        with context.socket(zmq.SUB) as live:
            live.setsockopt(zmq.RCVHWM, 0)
            live.setsockopt(zmq.LINGER, 0)
            live.subscribe(TOPIC)
            live.connect(part.publisher.live_address)
            resident = drive(engine, part, 3)
            rng = random.Random(3)
            reader = KVEventReader()
            messages = list(read_live(live))
            kept = [message for message in messages if rng.random() < 0.6]
            assert 10 < len(kept) < len(messages)
            for seq, payload in kept:
                reader.take(seq, payload)
            assert len(reader.waiting) > 5, "messages wait for those that were lost"
            assert part.publisher.replay_address is not None

            for seq, payload in fetch_replay(context, part.publisher.replay_address, reader.next_seq):
                reader.take(seq, payload)

        assert not reader.waiting
        assert reader.hashes == resident
        live_bytes = dict(messages)
        replayed = dict(fetch_replay(context, part.publisher.replay_address, 0))
        assert all(replayed[seq] == payload for seq, payload in live_bytes.items()), "the bytes are the same"
