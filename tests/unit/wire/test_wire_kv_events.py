"""The codec: byte for byte what vLLM publishes."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch.wire import frames
from kvwatch.wire.kv_events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    WireError,
    decode_batch,
    encode_batch,
    int_hash,
)

hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=64)
optional_text = st.none() | st.text(max_size=8)
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=5),
    parent_block_hash=st.none() | hashes,
    token_ids=st.lists(st.integers(0, 2**31), max_size=20),
    block_size=st.integers(1, 1024),
    lora_id=st.none() | st.integers(0, 9),
    medium=st.sampled_from(["GPU", "CPU", "STORAGE"]),
    lora_name=optional_text,
    extra_keys=st.none() | st.lists(st.none() | st.lists(st.text(max_size=5), max_size=2), max_size=3),
    group_idx=st.none() | st.integers(0, 5),
    kv_cache_spec_kind=optional_text,
)
removed = st.builds(BlockRemoved, block_hashes=st.lists(hashes, max_size=5), medium=optional_text)
batches = st.builds(
    Batch,
    ts=st.floats(0, 4e9),
    events=st.lists(stored | removed | st.just(AllBlocksCleared()), max_size=6),
    data_parallel_rank=st.none() | st.integers(0, 70_000),
)

RECORDING = Path(__file__).resolve().parents[2] / "recordings" / "kv-events-vllm-0.33.0.json"


def recorded() -> dict[str, Any]:
    """Return what vLLM 0.33.0's own publisher put on the wire, frame by frame."""
    found: dict[str, Any] = json.loads(RECORDING.read_text())
    return found


@settings(max_examples=200, deadline=None)
@given(batches)
def test_what_is_encoded_is_decoded_again(batch: Batch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@settings(max_examples=100, deadline=None)
@given(batches)
def test_a_batch_is_an_array_of_time_events_and_rank_and_events_are_maps_that_begin_with_their_type(
    batch: Batch,
) -> None:
    ts, events, rank = msgspec.msgpack.decode(encode_batch(batch))

    assert (ts, rank) == (batch.ts, batch.data_parallel_rank)
    for plain, event in zip(events, batch.events, strict=True):
        assert next(iter(plain)) == "type"
        assert plain["type"] == type(event).__name__


def test_what_vllm_always_sends_is_there_and_what_it_leaves_out_is_not() -> None:
    event = BlockStored(
        block_hashes=[1], parent_block_hash=None, token_ids=[5], block_size=1, lora_id=None, medium="GPU",
        lora_name=None,
    )  # fmt: skip

    (plain,) = msgspec.msgpack.decode(encode_batch(Batch(1.0, [event], 0)))[1]

    always = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    assert list(plain) == always
    (plain,) = msgspec.msgpack.decode(encode_batch(Batch(1.0, [BlockRemoved(block_hashes=[1], medium=None)], 0)))[1]
    assert list(plain) == ["type", "block_hashes", "medium"]


def test_every_payload_of_a_recorded_vllm_is_encoded_to_the_same_bytes() -> None:
    recording = recorded()
    payloads = [base64.b64decode(message["frames"][-1]) for message in recording["live"]]

    assert len(payloads) > 30
    for payload in payloads:
        assert encode_batch(decode_batch(payload)) == payload


def test_frames_are_those_of_a_recorded_vllm() -> None:
    recording = recorded()
    topics = {segment["id"]: segment["topic"].encode() for segment in recording["segments"]}
    num_replies = 0

    for message in recording["live"]:
        topic, seq, payload = (base64.b64decode(frame) for frame in message["frames"])
        number = int.from_bytes(seq, "big")
        assert frames.live_frames(topics[message["segment"]], number, payload) == [topic, seq, payload]
    for replay in recording["replay"]:
        request = [base64.b64decode(frame) for frame in replay["request"]]
        start = replay["start_seq"]
        assert frames.read_request(request) == start
        if start is None:  # no request, hence no answer
            assert replay["replies"] == []
            continue
        assert int.from_bytes(request[1], "big") == start
        assert len(request[1]) < 8 or frames.request_frames(start) == request
        replies = [[base64.b64decode(frame) for frame in reply] for reply in replay["replies"]]
        for _, topic, seq, payload in replies[: -1 if replay["end_marker"] else None]:
            number = int.from_bytes(seq, "big")
            assert frames.reply_frames(topic, number, payload) == [b"", topic, seq, payload]
            num_replies += 1
        if replay["end_marker"]:
            assert list(frames.END_FRAMES) == replies[-1]
    assert num_replies > 20


def test_the_integer_of_a_hash_is_the_low_half_that_vllm_takes() -> None:
    """A reader joins both forms by it: the recordings have the same blocks as integers and as digests."""
    recording = recorded()
    digests = [(row["hashes"], row["hashes_u64"]) for row in recording["expected"] if row.get("hash_kind") == "bytes"]
    assert digests
    for as_bytes, as_ints in digests:
        assert [str(int_hash(bytes.fromhex(each[2:]))) for each in as_bytes] == as_ints


@pytest.mark.parametrize("too_large", [2**64, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_refused(too_large: int) -> None:
    with pytest.raises(WireError, match="a batch of 1 events cannot be encoded"):
        encode_batch(Batch(1.0, [BlockRemoved(block_hashes=[too_large], medium="GPU")], 0))


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93\x01", b"\x92\xcb\x00", b"garbage", b"\x80", b"\x93\xc0\x90\x00"]
)
def test_bytes_that_are_no_batch_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match=f"a payload of {len(payload)} bytes is no batch"):
        decode_batch(payload)


@given(st.lists(st.binary(max_size=12), max_size=4))
def test_only_an_empty_frame_and_a_number_are_a_request(received: list[bytes]) -> None:
    start = frames.read_request(received)

    is_request = len(received) == 2 and received[0] == b"" and 1 <= len(received[1]) <= 8
    assert (start is not None) == is_request
    if is_request:
        assert start == int.from_bytes(received[1], "big")
