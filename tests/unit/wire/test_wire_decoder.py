"""The decoder of foreign events: every version's recorded bytes, and every way of being broken."""

from typing import Any

import msgspec
import pytest
from kv_event_recordings import DETAILS, SCRIPTED, as_recorded, hex_bytes, mixed_load, payloads, scripted

from kvwatch.wire.decoder import MAX_PAYLOAD_BYTES, MAX_UNTYPED_BYTES, Decoder
from kvwatch.wire.foreign import (
    Cleared,
    ForeignBatch,
    ForeignEvent,
    Removed,
    Stored,
    StoredInFull,
    canonical_medium,
    hash_bytes,
    tier_of,
)

KINDS: dict[str, type[Any]] = {"stored": Stored, "removed": Removed, "cleared": Cleared}


def encode(plain: Any) -> bytes:
    return msgspec.msgpack.encode(plain)


def decode(plain: Any, *, in_full: bool = False) -> ForeignBatch:
    return Decoder(in_full=in_full).decode(encode(plain))


def store(**fields: Any) -> dict[str, Any]:
    always = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5], "block_size": 1}
    return always | fields


def core(batch: ForeignBatch) -> list[tuple[Any, ...]]:
    """What decides which blocks an event speaks of, in the order of the events."""
    fields = ("block_hashes", "parent_block_hash", "medium", "group_idx", "block_size")
    return [tuple(getattr(event, field, None) for field in fields) for event in batch.events]


def check_place(event: ForeignEvent, row: dict[str, Any]) -> None:
    assert isinstance(event, Stored | Removed)
    assert [as_recorded(each) for each in event.block_hashes] == row["hashes"]
    assert [str(int.from_bytes(hash_bytes(each)[-8:], "big")) for each in event.block_hashes] == row["hashes_u64"]
    assert (event.medium, event.group_idx) == (row["medium"], row["group_idx"])
    if isinstance(event, Stored):
        assert as_recorded(event.parent_block_hash) == row["parent"]
        assert event.block_size == row["block_size"]


@pytest.mark.parametrize("in_full", [False, True])
@pytest.mark.parametrize("name", SCRIPTED)
def test_every_recorded_event_is_decoded(name: str, in_full: bool) -> None:
    decoder = Decoder(in_full=in_full)
    batches = [decoder.decode(payload) for payload in payloads(name)]
    rows = scripted(name)["expected"]

    assert len(SCRIPTED) == 7
    assert all(batch.skipped == () for batch in batches)
    assert sum(len(batch.events) for batch in batches) == sum("event_index" in row for row in rows)
    for row in rows:
        batch = batches[row["live_index"]]
        assert (batch.ts, batch.rank) == (row["ts"], row["dp_rank"])
        if row["type"] == "empty-batch":
            assert batch.events == []
            continue
        event = batch.events[row["event_index"]]
        assert isinstance(event, KINDS[row["type"]])
        if row["type"] != "cleared":
            check_place(event, row)


@pytest.mark.parametrize("name", SCRIPTED)
def test_in_full_every_recorded_field_is_there(name: str) -> None:
    decoder = Decoder(in_full=True)
    batches = [decoder.decode(payload) for payload in payloads(name)]
    num_stores = 0

    for row in scripted(name)["expected"]:
        if row["type"] != "stored":
            continue
        event = batches[row["live_index"]].events[row["event_index"]]
        assert isinstance(event, StoredInFull)
        assert event.token_ids == row["token_ids"]
        assert (None if event.token_ids is None else len(event.token_ids)) == row["token_count"]
        assert hex_bytes(event.extra_keys) == row["extra_keys"]
        assert event.lookahead_token_ids == row["lookahead_token_ids"]
        assert {field: getattr(event, field) for field in DETAILS} == {field: row[field] for field in DETAILS}
        num_stores += 1
    assert num_stores > 15


def test_a_recorded_load_is_decoded_without_leaving_anything_out() -> None:
    fast, full = Decoder(), Decoder(in_full=True)

    for message in mixed_load():
        batch = fast.decode(message.payload)
        assert batch.skipped == ()
        assert core(batch) == core(full.decode(message.payload))


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("wire_hash", [0, 2**64 - 1, -1, -(2**63), b"x", b"\xff" * 16, b"a" * 32, b"b" * 96])
def test_hashes_of_every_kind_and_length_are_taken(wire_hash: int | bytes, form: str) -> None:
    event: Any = store(block_hashes=[wire_hash], parent_block_hash=wire_hash)
    if form == "array":
        event = ["BlockStored", [wire_hash], wire_hash, [5], 1]

    (found,) = decode([1.0, [event], 0]).events

    assert isinstance(found, Stored)
    assert (found.block_hashes, found.parent_block_hash) == ([wire_hash], wire_hash)


@pytest.mark.parametrize(
    "batch",
    [
        [1.5, [store()]],
        [1.5, [store()], None],
        [1.5, [store()], 0, "more"],
        {"ts": 1.5, "events": [store()], "data_parallel_rank": 0},
        {"events": [store()], "ts": 1.5, "attn_dp_rank": 0, "more": {}},
    ],
)
def test_batches_of_every_shape_are_taken(batch: Any) -> None:
    found = decode(batch)

    assert (found.ts, found.skipped, len(found.events)) == (1.5, (), 1)


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [1]],
        ["BlockStored", [1], None],
        ["BlockStored", [1], None, None, 16],
        ["BlockStored", [1], None, [[1, 2], [3, 4]], 2, None, "GPU"],
        ["BlockStored", [1], None, [], 0, None, "CPU_PINNED", {"cache_salt": "a"}],
        ["BlockStored", [1], None, [], 0, 3, "GPU", "adapter", [["a"]], 0, "full_attention", None, "new", {"newer": 1}],
        {"type": "BlockStored", "block_hashes": [1]},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": None, "unheard_of": [1, {"a": 2}]},
        {"token_ids": [[1, 2]], "block_hashes": [1], "type": "BlockStored"},
        {"type": "BlockStored", "block_hashes": [1], "block_size": "sixteen", "token_ids": 7, "lora_id": "x"},
    ],
)
def test_stores_with_less_more_or_other_fields_are_taken(event: Any) -> None:
    found = decode([1.0, [event], 0])

    assert found.skipped == ()
    (stored,) = found.events
    assert isinstance(stored, Stored)
    assert stored.block_hashes == [1]


@pytest.mark.parametrize(
    ("ts", "expected"), [(7, 7.0), (7.25, 7.25), ("now", None), (None, None), (True, None), ([], None)]
)
def test_a_time_that_is_none_costs_the_time_only(ts: Any, expected: float | None) -> None:
    found = decode([ts, [store()], 0])

    assert (found.ts, len(found.events), found.skipped) == (expected, 1, ())


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (7, "event"),
        (None, "event"),
        ([], "event"),
        ({}, "event"),
        ([7, [1]], "event"),
        ({"type": 7, "block_hashes": [1]}, "event"),
        (["BlockMoved", [1]], "type"),
        ({"type": "BlockMoved"}, "type"),
        (store(block_hashes=None), "hashes"),
        (store(block_hashes=[None]), "hashes"),
        (store(block_hashes=["1"]), "hashes"),
        (store(block_hashes=[1, 1.5]), "hashes"),
        (store(block_hashes=[True]), "hashes"),
        (store(block_hashes=[b""]), "hashes"),
        (store(block_hashes=[b"x" * 1025]), "hashes"),
        (["BlockStored"], "hashes"),
        ({"type": "BlockRemoved"}, "hashes"),
        (store(parent_block_hash="x"), "parent"),
        (store(parent_block_hash=[1]), "parent"),
        (store(medium=7), "place"),
        (store(medium="x" * 65), "place"),
        (store(group_idx=-1), "place"),
        (store(group_idx=256), "place"),
        (store(group_idx="0"), "place"),
        (["BlockRemoved", [1], 5], "place"),
    ],
)
def test_an_event_that_cannot_be_is_left_out_and_its_neighbours_stay(event: Any, kind: str) -> None:
    """A broken store never becomes anything else, least of all a clear (Dynamo#6569)."""
    before, after = store(block_hashes=[11]), {"type": "BlockRemoved", "block_hashes": [12]}

    found = decode([1.0, [before, event, after], 0])

    assert found.skipped == (kind,)
    assert [e.block_hashes for e in found.events if isinstance(e, Stored | Removed)] == [[11], [12]]
    assert len(found.events) == 2
    assert found.may_have_lost == (kind != "type")


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (b"garbage", "msgpack"),
        (encode([1.0, [store()], 0])[:-9], "msgpack"),
        (b"\x91" * 100_000, "msgpack"),
        (b"\xdd\xff\xff\xff\xff", "msgpack"),
        (b"\x93\x01\xdf\xff\xff\xff\xff", "msgpack"),
        (b"\xc6\xff\xff\xff\xff", "msgpack"),
        (encode(7), "batch"),
        (encode([]), "batch"),
        (encode([1.0]), "batch"),
        (encode([1.0, {"type": "AllBlocksCleared"}, 0]), "batch"),
        (encode({"ts": 1.0}), "batch"),
        (encode("AllBlocksCleared"), "batch"),
    ],
)
@pytest.mark.parametrize("in_full", [False, True])
def test_a_message_that_is_no_batch_is_left_out_whole(payload: bytes, kind: str, in_full: bool) -> None:
    found = Decoder(in_full=in_full).decode(payload)

    assert (found.events, found.skipped, found.may_have_lost) == ([], (kind,), True)


def test_a_message_beyond_the_limit_is_not_looked_at() -> None:
    payload = encode([1.0, [store(token_ids=[0] * MAX_PAYLOAD_BYTES)], 0])

    assert Decoder().decode(payload).skipped == ("size",)


def test_a_large_message_is_taken_if_it_is_well_formed() -> None:
    payload = encode([1.0, [store(token_ids=[70_000] * 1_000_000, block_size=16)], 0])

    assert len(payload) > MAX_UNTYPED_BYTES
    assert len(Decoder().decode(payload).events) == 1


def test_a_large_message_that_is_broken_is_not_looked_at_piece_by_piece() -> None:
    """An empty map is one byte of a message and 64 of memory."""
    payload = encode([1.0, [{}] * (MAX_UNTYPED_BYTES + 1), 0])

    assert Decoder().decode(payload).skipped == ("size",)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, "device"), ("", "device"), ("GPU", "device"), ("gpu", "device"), ("CPU", "host"), ("cpu", "host"),
        ("CPU_PINNED", "host"), ("Cpu_Tier2", "host"), ("STORAGE", "disk"), ("disk", "disk"),
        ("EXTERNAL", "external"), ("mooncake", "external"), ("\U0001f4be", "external"),
    ],
)  # fmt: skip
def test_media_are_compared_without_regard_to_case_and_have_a_tier(medium: str | None, tier: str) -> None:
    assert tier_of(canonical_medium(medium)) == tier


@pytest.mark.parametrize(
    ("wire_hash", "kept"),
    [
        (1, b"\0" * 7 + b"\1"), (-1, b"\xff" * 8), (2**64 - 1, b"\xff" * 8), (b"abc", b"abc"),
        (-(2**63), b"\x80" + b"\0" * 7),
    ],
)  # fmt: skip
def test_signed_and_unsigned_integers_of_the_same_bits_are_one_hash(wire_hash: int | bytes, kept: bytes) -> None:
    assert hash_bytes(wire_hash) == kept
