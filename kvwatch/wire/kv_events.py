"""Event classes of the KV-event wire and their bytes: msgpack, a batch as an array, each event as a map.

    batch  = [ unix seconds (float), [event, ...], data-parallel rank ]
    event  = { "type": "BlockStored", "block_hashes": [...], ... }

Fields stand in the order of the wire. Fields that default to None are left out when they are None; the others are
always there, null or not.
"""

from typing import Any

import msgspec

from kvwatch.errors import KVWatchError

WireHash = int | bytes
"""A block's hash: an unsigned integer of 64 bits, or the raw digest."""

ExtraKey = Any
"""What a block's content depends on beside its tokens: text (an adapter's name, a salt), bytes (a digest of prompt
embeddings), or a list (multimodal id, offset). The wire mixes them, so that no narrower type can be decoded."""


class WireError(KVWatchError):
    """A payload is not what its sender's protocol says."""


class BlockStored(
    msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True, frozen=True, kw_only=True, gc=False
):
    """Blocks became known under their hashes; each hash's parent is the one before it, the first one's is given."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    """Null at the start of a sequence, and where the parent is not known."""
    token_ids: list[int]
    """Tokens of all blocks, one after the other; empty where they are not known."""
    block_size: int
    lora_id: int | None
    medium: str | None
    """`GPU`, `CPU` or `STORAGE`."""
    lora_name: str | None
    extra_keys: list[list[ExtraKey] | None] | None = None
    """One entry for each block."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(
    msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True, frozen=True, kw_only=True, gc=False
):
    """No block of this group and medium has these hashes any more."""

    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(
    msgspec.Struct, tag_field="type", tag="AllBlocksCleared", omit_defaults=True, frozen=True, kw_only=True, gc=False
):
    """Nothing that this publisher stored is there any more."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What happened in one step."""

    ts: float
    """Unix time in seconds."""
    events: list[WireEvent]
    data_parallel_rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Batch)


def encode_batch(batch: Batch) -> bytes:
    """Return the payload of a batch.

    Raises:
        WireError: an integer does not fit 64 bits.
    """
    try:
        return _ENCODER.encode(batch)
    except (OverflowError, TypeError, ValueError) as error:
        raise WireError(f"a batch of {len(batch.events)} events cannot be encoded ({error})") from error


def decode_batch(payload: bytes) -> Batch:
    """Return the batch of a payload in the form that `encode_batch` writes.

    Raises:
        WireError: it is something else.
    """
    try:
        return _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"a payload of {len(payload)} bytes is no batch of KV events ({error})") from error


def int_hash(digest: bytes) -> int:
    """Return the integer that stands for a digest: its low 64 bits."""
    return int.from_bytes(digest[-8:], "big")
