"""Whatever the bytes: no exception, no event that was not sent, bounded memory."""

import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_event_recordings import SCRIPTED, payloads

from kvwatch.wire.decoder import Decoder
from kvwatch.wire.foreign import MAX_GROUP, SKIP_KINDS, Cleared, ForeignBatch, ForeignEvent, Removed, Stored

NUM_INPUTS = 50_000
NUM_SLOW_INPUTS = 1_000_000

SEEDS = [payload for name in SCRIPTED for payload in payloads(name)]


def check(batch: ForeignBatch) -> None:
    """Everything that is given to the mirror is of the type that it expects."""
    assert set(batch.skipped) <= set(SKIP_KINDS)
    assert batch.ts is None or type(batch.ts) is float
    assert batch.rank is None or type(batch.rank) is int
    for event in batch.events:
        if isinstance(event, Cleared):
            continue
        assert isinstance(event, Stored | Removed)
        assert all(type(each) is int or (type(each) is bytes and each) for each in event.block_hashes)
        assert event.medium is None or type(event.medium) is str
        assert event.group_idx is None or 0 <= event.group_idx <= MAX_GROUP
        if isinstance(event, Stored):
            assert event.parent_block_hash is None or type(event.parent_block_hash) in (int, bytes)
            assert type(event.block_size) is int
            assert event.block_size >= 0


def flip(data: bytearray, rnd: random.Random) -> None:
    for _ in range(rnd.randint(1, 4)):
        data[rnd.randrange(len(data))] = rnd.randrange(256)


def cut(data: bytearray, rnd: random.Random) -> None:
    del data[rnd.randrange(len(data)) :]


def drop(data: bytearray, rnd: random.Random) -> None:
    start = rnd.randrange(len(data))
    del data[start : start + rnd.randint(1, 8)]


def insert(data: bytearray, rnd: random.Random) -> None:
    start = rnd.randrange(len(data) + 1)
    data[start:start] = rnd.randbytes(rnd.randint(1, 8))


def splice(data: bytearray, rnd: random.Random) -> None:
    other = rnd.choice(SEEDS)
    start = rnd.randrange(len(data))
    data[start : start + rnd.randint(1, 40)] = other[rnd.randrange(len(other)) :][: rnd.randint(1, 40)]


def header(data: bytearray, rnd: random.Random) -> None:
    """A length of up to four billion, or a tag of another type."""
    start = rnd.randrange(len(data))
    tag = rnd.choice(b"\xdc\xdd\xde\xdf\xc4\xc5\xc6\xc7\xc8\xc9\xd9\xda\xdb")
    data[start : start + 5] = bytes([tag]) + rnd.randbytes(4)


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (flip, cut, drop, insert, splice, header)


ODD: list[Any] = [
    None, True, -1, 0, 255, 256, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "gpu", "x" * 70,
    b"", b"h" * 32, b"h" * 2000, [], [1], [[1, 2]], {}, {"cache_salt": "s"}, [b"a", -5, 2**63],
    "BlockStored", "AllBlocksCleared", "BlockMoved",
]  # fmt: skip


def twist(payload: bytes, rnd: random.Random) -> bytes:
    """Return a message that is msgpack still, but says something odd in some place."""
    batch: list[Any] = msgspec.msgpack.decode(payload)
    for _ in range(rnd.randint(1, 3)):
        here: Any = batch
        while isinstance(here, list | dict) and here and (here is batch or rnd.random() < 0.7):
            above, place = here, rnd.choice(list(here) if isinstance(here, dict) else range(len(here)))
            here = above[place]
        above[place] = deepcopy(rnd.choice(ODD))
        if rnd.random() < 0.1:
            batch.append(rnd.choice(ODD))
    return msgspec.msgpack.encode(batch)


def mutants(number: int, seed: int) -> Iterator[bytes]:
    """Yield recorded messages that were damaged, and a few bytes that never were a message."""
    rnd = random.Random(seed)
    for index in range(number):
        if index % 20 == 0:
            yield rnd.randbytes(rnd.randint(0, 60))
            continue
        if index % 2:
            yield twist(rnd.choice(SEEDS), rnd)
            continue
        data = bytearray(rnd.choice(SEEDS))
        for _ in range(rnd.randint(1, 3)):
            if data:
                rnd.choice(MUTATIONS)(data, rnd)
        yield bytes(data)


def hashes_of(event: ForeignEvent) -> list[Any] | None:
    return None if isinstance(event, Cleared) else list(event.block_hashes)


def fuzz(number: int, seed: int) -> dict[str, int]:
    decoders = [Decoder(), Decoder(in_full=True)]
    outcomes = {"whole": 0, "parts": 0, "none": 0}
    for payload in mutants(number, seed):
        fast, full = (decoder.decode(payload) for decoder in decoders)
        check(fast)
        check(full)
        if "msgpack" not in full.skipped:  # fields that nobody needs are stepped over, whatever is in them
            assert len(fast.events) == len(full.events), payload
            for one, other in zip(fast.events, full.events, strict=True):
                assert hashes_of(one) == hashes_of(other), payload
        outcomes["whole" if not fast.skipped else "parts" if fast.events else "none"] += 1
    return outcomes


def test_damaged_recordings_never_raise_and_both_ways_of_decoding_agree() -> None:
    outcomes = fuzz(NUM_INPUTS, seed=int(os.environ.get("KVWATCH_FUZZ_SEED", "1")))

    assert min(outcomes.values()) > NUM_INPUTS // 50, outcomes


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_damaged_recordings_never_raise() -> None:
    outcomes = fuzz(NUM_SLOW_INPUTS, seed=random.SystemRandom().randrange(2**32))

    assert min(outcomes.values()) > NUM_SLOW_INPUTS // 50, outcomes


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_to_something(payload: bytes) -> None:
    for in_full in (False, True):
        check(Decoder(in_full=in_full).decode(payload))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=6)
    | st.binary(max_size=12) | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type"]),
    lambda inner: st.lists(inner, max_size=6)
    | st.dictionaries(st.sampled_from(["type", "block_hashes", "medium", "group_idx", "ts", "events"]), inner),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plain)
def test_any_msgpack_is_decoded_to_something(value: Any) -> None:
    for shape in (value, [1.0, value, 0], [1.0, [value], 0]):
        payload = msgspec.msgpack.encode(shape)
        for in_full in (False, True):
            check(Decoder(in_full=in_full).decode(payload))


HUNDRED_THOUSAND = 100_000


@pytest.mark.parametrize(
    "payload",
    [
        b"\x93\x01" + b"\x91" * HUNDRED_THOUSAND,
        b"\xdd\x00\x01\x86\xa0" + b"\x90" * HUNDRED_THOUSAND,
        b"\x93\x01\xdd\x00\x01\x86\xa0" + b"\x80" * HUNDRED_THOUSAND + b"\x00",
        b"\x93\x01\xdd\x7f\xff\xff\xff" + b"\x00" * HUNDRED_THOUSAND,
        b"\x00" * (15 << 20),
    ],
    ids=["deep", "many arrays", "many maps", "absurd length", "zeros"],
)
def test_hostile_messages_take_memory_in_proportion_to_their_size(payload: bytes) -> None:
    tracemalloc.start()
    try:
        batch = Decoder().decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert batch.events == []
    assert peak < 120 * HUNDRED_THOUSAND
