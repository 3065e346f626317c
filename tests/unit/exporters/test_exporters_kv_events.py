"""KV events: endpoints, translation, history. The sockets are tested in integration/test_kv_events_out.py."""

import base64
import json
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_event_reader import KVEventReader

from kvwatch.errors import ConfigError
from kvwatch.exporters.kv_events.endpoints import resolve_endpoints
from kvwatch.exporters.kv_events.history import History
from kvwatch.exporters.kv_events.residency import Content, Key, removed_events, stored_event
from kvwatch.exporters.kv_events.translator import Translator
from kvwatch.telemetry.events import (
    BlocksEvicted,
    BlocksRelocated,
    BlocksStored,
    CacheCleared,
    EngineEnded,
    RequestFinished,
    RequestQueued,
)
from kvwatch.telemetry.events.block import EvictionReason
from kvwatch.telemetry.snapshot import EngineSnapshot, RequestState, TierState
from kvwatch.wire.kv_events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    WireEvent,
    decode_batch,
    encode_batch,
)

SIZE = 2


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def snapshot(hashes: Sequence[int | None] = (None,) * 9, requests: Sequence[str] = ()) -> EngineSnapshot:
    columns = [None if each is None else digest(each) for each in hashes]
    tier = TierState("device", len(columns), [0] * len(columns), columns, [0] * len(columns))
    return EngineSnapshot(
        seq=0, step=0, time_ns=0, block_size_tokens=SIZE, block_bytes=1, watermark_blocks=0, max_queued_requests=1,
        max_queued_tokens=1, tiers=[tier], sequences=[], requests=[RequestState(r, "running", 0) for r in requests],
    )  # fmt: skip


def stored(hashes: Sequence[int], blocks: Sequence[int], parent: int | None = None, request: str = "r") -> BlocksStored:
    tokens = [[each, each + 1] for each in hashes]
    return BlocksStored(
        [digest(each) for each in hashes], list(blocks), None if parent is None else digest(parent),
        request=request, token_ids=tokens,
    )  # fmt: skip


def evicted(hashes: Sequence[int], blocks: Sequence[int], reason: EvictionReason = "pressure") -> BlocksEvicted:
    zeros = [0] * len(blocks)
    return BlocksEvicted([digest(each) for each in hashes], list(blocks), zeros, zeros, zeros, reason, "r")


def translator(hash_kind: str = "int") -> Translator:
    made = Translator(hash_kind)  # type: ignore[arg-type]
    assert made.load(snapshot()) == [AllBlocksCleared()]
    return made


def queued(request: str, adapter: str, salt: str = "") -> RequestQueued:
    return RequestQueued(request, 4, 1, 0, adapter=adapter, salt=salt)


# ---------------------------------------------------------------- endpoints


@pytest.mark.parametrize(
    ("text", "rank", "address", "is_bound"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557", True),
        ("tcp://*:5557", 3, "tcp://*:5560", True),
        ("tcp://0.0.0.0:5557", 0, "tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558", True),
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557", False),
        ("tcp://collector.svc:5557", 2, "tcp://collector.svc:5559", False),
        ("tcp://*:0", 0, "tcp://*:*", True),
        ("tcp://*:0", 4, "tcp://*:*", True),
        ("ipc:///run/kv.sock", 0, "ipc:///run/kv.sock", True),
        ("inproc://kv", 0, "inproc://kv", True),
        ("inproc://kv", 2, "inproc://kv_dp2", True),
        ("tcp://*:65535", 0, "tcp://*:65535", True),
    ],
)
def test_endpoints_follow_the_rules_of_vllm(text: str, rank: int, address: str, is_bound: bool) -> None:
    found = resolve_endpoints(text, None, rank)

    assert (found.live.address, found.live.is_bound, found.replay) == (address, is_bound, None)


def test_what_is_bound_can_be_said_and_replays_are_always_bound() -> None:
    found = resolve_endpoints("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", 0, "bind")
    connected = resolve_endpoints("tcp://*:5557", "tcp://127.0.0.1:5657", 0, "connect")

    assert found.live.is_bound
    assert not connected.live.is_bound
    assert found.replay is not None
    assert connected.replay is not None
    assert found.replay.is_bound
    assert connected.replay.is_bound


@pytest.mark.parametrize(
    ("live", "replay", "rank", "complaint"),
    [
        ("tcp://*:65535", None, 1, "port 65535 plus data-parallel rank 1 is 65536, beyond 65535; choose a lower"),
        ("tcp://*:5557", "tcp://*:65530", 6, "--kv-events-replay: port 65530 plus data-parallel rank 6"),
        ("tcp://*:5557", "tcp://*:5557", 0, "are one place; give them different ports"),
        ("tcp://*:5557", "tcp://127.0.0.1:5557", 0, "are one place"),
        ("tcp://*:5557", "tcp://*:5558", 1, "ports 1 apart, but ranks 0 to 1 add their rank"),
        ("tcp://*:5560", "tcp://*:5557", 3, "ports 3 apart"),
        ("ipc:///run/kv.sock", None, 1, "ranks cannot share"),
        ("*:5557", None, 0, "is no endpoint; write tcp://HOST:PORT"),
        ("tcp://*", None, 0, "is no endpoint"),
        ("tcp://*:port", None, 0, "is no endpoint"),
        ("udp://*:5557", None, 0, "is no endpoint"),
        ("tcp://*:\uff15\uff15\uff15\uff17", None, 0, "is no endpoint"),
        ("", None, 0, "is no endpoint"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused_at_the_start(
    live: str, replay: str | None, rank: int, complaint: str
) -> None:
    """Dynamo#4121, vllm#55679, llm-d-router#1242: port collisions, offsets past 65535."""
    with pytest.raises(ConfigError, match=complaint):
        resolve_endpoints(live, replay, rank)


def test_ports_far_enough_apart_for_all_ranks_are_accepted() -> None:
    found = resolve_endpoints("tcp://*:5557", "tcp://*:5657", 99)

    assert (found.live.port, found.replay and found.replay.port) == (5656, 5756)


# ---------------------------------------------------------------- translation


def test_a_hash_that_two_blocks_hold_is_told_once_and_removed_with_the_last() -> None:
    """vllm#55092: BlockRemoved was sent while another copy of the hash was resident."""
    it = translator()
    assert len(it.apply(stored([7], [1]))) == 1

    assert it.apply(stored([7], [2])) == []
    assert it.apply(evicted([7], [1])) == []
    (gone,) = it.apply(evicted([7], [2]))

    assert gone == BlockRemoved(block_hashes=[7], medium="GPU", group_idx=0)
    assert len(it.residency) == 0


def test_a_store_is_told_with_its_parent_its_tokens_and_where_it_is() -> None:
    it = translator()

    (told,) = it.apply(stored([7, 8], [1, 2], parent=5))

    assert told == BlockStored(
        block_hashes=[7, 8], parent_block_hash=5, token_ids=[7, 8, 8, 9], block_size=SIZE, lora_id=None, medium="GPU",
        lora_name=None, group_idx=0, kv_cache_spec_kind="full_attention",
    )  # fmt: skip


def test_a_run_is_told_apart_where_its_middle_was_known_before() -> None:
    """vllm#58119, TensorRT-LLM#3543: the parent hash was unreported or wrong."""
    it = translator()
    it.apply(stored([8], [9], parent=7))

    told = it.apply(stored([7, 8, 9], [1, 2, 3]))

    pairs = [(event.block_hashes, event.parent_block_hash) for event in told if isinstance(event, BlockStored)]
    assert pairs == [([7], None), ([9], 8)]


def test_storing_the_same_block_again_changes_nothing() -> None:
    it = translator()
    it.apply(stored([7], [1]))

    assert it.apply(stored([7], [1])) == []
    assert it.apply(evicted([7], [1])) == [BlockRemoved(block_hashes=[7], medium="GPU", group_idx=0)]


def test_an_eviction_of_something_unknown_is_no_removal() -> None:
    """LMCache#4185: a late word about something that is gone killed the engine."""
    it = translator()

    assert it.apply(evicted([7], [1])) == []


def test_a_reset_is_one_clear() -> None:
    it = translator()
    it.apply(stored([7, 8], [1, 2]))

    assert it.apply(evicted([8], [2], "reset")) == []
    assert it.apply(CacheCleared([1])) == [AllBlocksCleared()]
    assert it.apply(stored([7], [3])) != [], "what is stored again is told again"


def test_an_engine_that_ends_holds_nothing_any_more() -> None:
    it = translator()
    it.apply(stored([7, 8], [1, 2]))

    assert it.apply(EngineEnded("stopped")) == [AllBlocksCleared()]
    assert len(it.residency) == 0


def test_raw_digests_go_out_when_they_are_asked_for() -> None:
    it = translator("bytes")

    (told,) = it.apply(stored([7], [1], parent=5))

    assert isinstance(told, BlockStored)
    assert (told.block_hashes, told.parent_block_hash) == ([digest(7)], digest(5))


def test_the_adapter_of_the_request_that_stored_a_block_is_told() -> None:
    it = translator()
    it.apply(queued("a", "sql"))
    it.apply(queued("b", ""))

    (with_adapter,) = it.apply(stored([7], [1], request="a"))
    (without,) = it.apply(stored([8], [2], request="b"))

    assert isinstance(with_adapter, BlockStored)
    assert isinstance(without, BlockStored)
    assert (with_adapter.lora_name, with_adapter.extra_keys) == ("sql", [["sql"]])
    assert (without.lora_name, without.extra_keys) == (None, None)


def test_a_salt_marks_the_first_block_of_a_sequence_and_no_other() -> None:
    it = translator()
    it.apply(queued("a", "sql", "5a17"))

    (first,) = it.apply(stored([7, 8], [1, 2], request="a"))
    (next_one,) = it.apply(msgspec.structs.replace(stored([9], [3], parent=8, request="a"), first_index=2))

    assert isinstance(first, BlockStored)
    assert isinstance(next_one, BlockStored)
    assert first.extra_keys == [["sql", "5a17"], ["sql"]]
    assert next_one.extra_keys == [["sql"]]


def test_an_image_marks_every_block_that_it_reaches_into_with_its_place() -> None:
    """Placeholder tokens are the same for all images: a router that knows tokens alone would send all of them here."""
    it = translator()
    # A prompt of four blocks: one image in tokens 1 to 4, another in tokens 6 and 7.
    asked = RequestQueued(
        "a", 8, 1, 0, adapter="sql", image_positions=[1, 6], image_tokens=[4, 2], image_hashes=[b"\x01", b"\xff"]
    )
    it.apply(asked)

    (first,) = it.apply(stored([7, 8], [1, 2], request="a"))
    (next_one,) = it.apply(msgspec.structs.replace(stored([9, 10], [3, 4], parent=8, request="a"), first_index=2))
    it.apply(queued("b", ""))
    (other,) = it.apply(stored([20], [5], request="b"))

    assert isinstance(first, BlockStored)
    assert isinstance(next_one, BlockStored)
    assert isinstance(other, BlockStored)
    assert first.extra_keys == [["sql", ["01", 1]], ["sql", ["01", -1]]]
    assert next_one.extra_keys == [["sql", ["01", -3]], ["sql", ["ff", 0]]]
    assert other.extra_keys is None


def test_the_bytes_of_stores_removals_and_clears_are_those_of_a_recorded_vllm() -> None:
    recording = json.loads((Path(__file__).resolve().parents[2] / "recordings/kv-events-vllm-0.33.0.json").read_text())
    seen: dict[str, int] = {}
    for message in recording["live"]:
        payload = base64.b64decode(message["frames"][-1])
        batch = decode_batch(payload)
        if not batch.events or not all(is_of_our_kind(event) for event in batch.events):
            continue
        rebuilt = [event for told in batch.events for event in told_again(told)]

        assert encode_batch(Batch(batch.ts, rebuilt, batch.data_parallel_rank)) == payload
        for event in batch.events:
            seen[type(event).__name__] = seen.get(type(event).__name__, 0) + 1

    assert min(seen[name] for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared")) >= 1
    assert seen["BlockStored"] > 8


def is_of_our_kind(event: WireEvent) -> bool:
    """Whether kvwatch can have such an event: full attention, on the device, nothing but tokens and adapters."""
    if isinstance(event, AllBlocksCleared):
        return True
    if event.medium != "GPU" or event.group_idx != 0 or event.locality or not event.block_hashes:
        return False
    if isinstance(event, BlockRemoved):
        return True
    is_whole = len(event.token_ids) == len(event.block_hashes) * event.block_size
    return is_whole and event.lora_id is None and event.session_id is None and not event.lookahead_token_ids


def told_again(event: WireEvent) -> list[WireEvent]:
    """Return what the exporter makes of the same facts."""
    if isinstance(event, AllBlocksCleared):
        return list(translator().apply(CacheCleared([])))
    keys = [Key("GPU", 0, each) for each in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return list(removed_events(keys))
    contents, parent, size = [], event.parent_block_hash, event.block_size
    for index, each in enumerate(event.block_hashes):
        extra = tuple((event.extra_keys[index] if event.extra_keys else None) or ())
        tokens = event.token_ids[index * size : (index + 1) * size]
        contents.append(Content(size, parent, tokens, event.lora_name, extra))
        parent = each
    return [stored_event(keys, contents)]


def test_requests_that_ended_are_forgotten() -> None:
    it = translator()
    for number in range(100):
        it.apply(queued(f"r{number}", "sql"))
        it.apply(RequestFinished(f"r{number}", "stop", 1, 1, 0, 0, 1, 1, 1, 1, 1))

    (told,) = it.apply(stored([7], [1], request="r5"))

    assert isinstance(told, BlockStored)
    assert told.lora_name is None


def test_after_a_snapshot_everything_is_told_again_parents_first_with_what_is_known() -> None:
    it = translator()
    it.apply(stored([9], [3], parent=8))
    it.apply(stored([7, 8], [1, 2]))

    told = it.load(snapshot([None, 7, 8, 9, 30]))

    assert told[0] == AllBlocksCleared()
    seen: list[int | bytes] = []
    for event in told[1:]:
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash is None or event.parent_block_hash in seen
        seen += event.block_hashes
    assert sorted(seen) == [7, 8, 9, 30]
    (chain,) = (event for event in told if isinstance(event, BlockStored) and 7 in event.block_hashes)
    assert (chain.block_hashes, chain.token_ids) == ([7, 8, 9], [7, 8, 8, 9, 9, 10])


def test_what_was_stored_while_nobody_listened_is_told_without_a_claim_about_its_content() -> None:
    it = translator()

    (_, told) = it.load(snapshot([None, 30]))

    assert isinstance(told, BlockStored)
    assert (told.block_hashes, told.parent_block_hash, told.token_ids) == ([30], None, [])
    assert told.block_size == SIZE


# ---------------------------------------------------------------- history


def batch_of(*events: WireEvent) -> bytes:
    return encode_batch(Batch(1.0, list(events), 0))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_batches=st.integers(1, 60),
    max_batches=st.integers(1, 20),
    start=st.integers(0, 70),
)
def test_a_reader_that_has_all_before_any_number_has_everything_after_the_replay_from_there(
    seed: int, num_batches: int, max_batches: int, start: int
) -> None:
    rng = random.Random(seed)
    it = translator()
    history = History(max_batches, 1 << 30)
    whole, late = KVEventReader(), KVEventReader()
    held: dict[int, int] = {}
    for seq in range(num_batches):
        events = random_events(rng, it, held)
        payload = batch_of(*events)
        assert history.append(payload) == seq
        whole.take(seq, payload)
        if seq < start:
            late.take(seq, payload)
    late.is_strict = False  # what the base tells may be known already

    replay = history.since(start)

    assert len(history) <= max_batches
    assert [sent.seq for sent in replay] == list(range(replay[0].seq, num_batches)) if replay else start >= num_batches
    if replay:
        assert replay[0].seq >= start
        late.skip_to(replay[0].seq)
    for sent in replay:
        late.take(sent.seq, sent.payload)
    assert late.hashes == whole.hashes
    assert late.hashes == {key.content for key in it.residency}
    place = ("GPU", 0)
    assert late.blocks.get(place, {}) == whole.blocks.get(place, {}), "with parents and tokens"


def random_events(rng: random.Random, it: Translator, held: dict[int, int]) -> list[WireEvent]:
    """Let random blocks be stored, evicted and cleared; return what readers are told."""
    told: list[WireEvent] = []
    for _ in range(rng.randrange(1, 4)):
        chosen = rng.random()
        if chosen < 0.05:
            told += it.apply(CacheCleared(list(held)))
            held.clear()
        elif chosen < 0.4 and held:
            block = rng.choice(list(held))
            told += it.apply(evicted([held.pop(block)], [block]))
        else:
            block, content = rng.randrange(1, 40), rng.randrange(1, 60)
            if block not in held:
                held[block] = content
                told += it.apply(stored([content], [block], parent=content - 1 or None))
    return told


def test_history_is_bounded_in_bytes_too_and_keeps_the_newest_batch_whatever_its_size() -> None:
    history = History(1_000, 2_000)
    it = translator()
    for number in range(1, 200):
        history.append(batch_of(*it.apply(stored([number], [number]))))
        assert history.num_bytes <= 2_000

    history.append(batch_of(*it.apply(stored(range(1_000, 1_400), range(1_000, 1_400)))))

    assert len(history) == 1
    reader = KVEventReader()
    replay = history.since(0)
    reader.skip_to(replay[0].seq)
    for sent in replay:
        reader.take(sent.seq, sent.payload)
    assert len(reader.hashes) == 199 + 400


def test_a_hash_that_moved_to_another_block_is_gone_only_when_that_block_loses_it() -> None:
    made = translator()
    told = made.apply(stored([1, 2], [3, 4]))
    assert isinstance(told[0], BlockStored)
    moved = told[0].block_hashes[1]

    assert made.apply(BlocksRelocated([4], [5])) == []
    (other,) = made.apply(stored([9], [4]))  # block 4 is free for something else
    (gone,) = made.apply(evicted([2], [5]))

    assert isinstance(other, BlockStored)
    assert isinstance(gone, BlockRemoved)
    assert gone.block_hashes == [moved]


# ---------------------------------------------------------------- tiers behind the device


def test_blocks_that_were_offloaded_together_have_each_its_own_parent() -> None:
    """vllm#58119 (O46): the end of a chain is evicted first, and was told as the parent of what comes before it."""
    event = BlocksStored(
        [digest(each) for each in (13, 12, 27, 11)], [1, 2, 3, 4], None, tier="host",
        parents=[digest(12), digest(11), digest(26), b""],
    )  # fmt: skip

    told = translator().apply(event)

    stores = [each for each in told if isinstance(each, BlockStored)]
    assert len(stores) == len(told)
    assert [(each.block_hashes, each.parent_block_hash) for each in stores] == [
        ([11], None),
        ([27], 26),
        ([12, 13], 11),
    ]
    assert {each.medium for each in stores} == {"CPU"}


def test_blocks_of_a_chain_that_were_offloaded_together_are_told_as_one_run() -> None:
    event = BlocksStored(
        [digest(each) for each in (13, 12, 11)], [1, 2, 3], None, tier="host",
        parents=[digest(12), digest(11), digest(10)],
    )  # fmt: skip

    (told,) = translator().apply(event)

    assert isinstance(told, BlockStored)
    assert (told.block_hashes, told.parent_block_hash) == ([11, 12, 13], 10)
