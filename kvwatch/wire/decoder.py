"""Decodes KV events of every version of vLLM and SGLang that is known, and of what comes near to them.

    batch   array [time, events, rank] or map; more items and fewer are taken
    event   map with a `type`, or array that begins with it; more fields and fewer are taken

Never raises, whatever the bytes are. What cannot be understood is left out: one event where possible, else the message.

Nearly all messages are well-formed, so two typed decoders are tried first, one for each way of writing events. They are
several times as fast, since they step over the token ids, which are most of a message, without making objects of
them. What they refuse is decoded as it comes and looked at piece by piece.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from kvwatch.wire.foreign import MAX_GROUP, MAX_HASH_BYTES, MAX_MEDIUM_LETTERS, Cleared, ForeignBatch, Removed, Stored
from kvwatch.wire.pieces import read_batch

MAX_PAYLOAD_BYTES = 16 << 20
"""Largest message that is looked at. A million tokens take 5 MB."""

MAX_UNTYPED_BYTES = 1 << 20
"""Largest message that is looked at piece by piece: one byte can become an object of 64 and more."""

MAX_FULL_BYTES = 4 << 20
"""The same where every message is, since token ids are asked for."""

_Hash = int | Annotated[bytes, Meta(min_length=1, max_length=MAX_HASH_BYTES)]
_Medium = Annotated[str, Meta(max_length=MAX_MEDIUM_LETTERS)] | None
_Group = Annotated[int, Meta(ge=0, le=MAX_GROUP)] | None
_BlockSize = Annotated[int, Meta(ge=0)]


class _MapStored(Stored, kw_only=True, frozen=True, gc=False, tag_field="type", tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    block_size: _BlockSize = 0
    medium: _Medium = None
    group_idx: _Group = None


class _MapRemoved(Removed, kw_only=True, frozen=True, gc=False, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: _Medium = None
    group_idx: _Group = None


class _MapCleared(Cleared, frozen=True, gc=False, tag_field="type", tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    ts: float
    events: list[_MapStored | _MapRemoved | _MapCleared]
    rank: int | None = None


class _ArrayStored(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: Raw
    block_size: _BlockSize
    lora_id: Raw = Raw()
    medium: _Medium = None
    lora_name: Raw = Raw()
    extra_keys: Raw = Raw()
    group_idx: _Group = None


class _ArrayRemoved(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: _Medium = None
    group_idx: _Group = None


class _ArrayCleared(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="AllBlocksCleared"):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    ts: float
    events: list[_ArrayStored | _ArrayRemoved | _ArrayCleared]
    rank: int | None = None


_UNTYPED = msgspec.msgpack.Decoder()
_MAPS = msgspec.msgpack.Decoder(_MapBatch)
_ARRAYS = msgspec.msgpack.Decoder(_ArrayBatch)

_REFUSED = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)
"""What msgspec raises on bytes that it does not like."""


class Decoder:
    """Decodes the messages of one engine, beginning with the form that its last message had.

    Args:
        in_full: Give everything that was sent, token ids too (`StoredInFull`). Slower.
        max_payload_bytes: Larger messages are left out.
    """

    __slots__ = ("_in_full", "_max_payload_bytes", "_max_untyped_bytes", "_prefers_arrays")

    def __init__(self, *, in_full: bool = False, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._in_full = in_full
        self._max_payload_bytes = max_payload_bytes
        self._max_untyped_bytes = MAX_FULL_BYTES if in_full else MAX_UNTYPED_BYTES
        self._prefers_arrays = False

    def decode(self, payload: bytes) -> ForeignBatch:
        """Return the batch of a message. Never raises."""
        if len(payload) > self._max_payload_bytes:
            return _skipped("size")
        batch = None if self._in_full else self._decode_typed(payload)
        if batch is not None:
            return batch
        if len(payload) > self._max_untyped_bytes:
            return _skipped("size")
        try:
            plain: Any = _UNTYPED.decode(payload)
        except _REFUSED:
            return _skipped("msgpack")
        return read_batch(plain) or _skipped("batch")

    def _decode_typed(self, payload: bytes) -> ForeignBatch | None:
        for is_array in (self._prefers_arrays, not self._prefers_arrays):
            try:
                batch = _decode_arrays(payload) if is_array else _decode_maps(payload)
            except _REFUSED:
                continue
            if batch.events:  # a batch without events fits both
                self._prefers_arrays = is_array
            return batch
        return None


def _decode_maps(payload: bytes) -> ForeignBatch:
    batch = _MAPS.decode(payload)
    return ForeignBatch(batch.events, batch.ts, batch.rank)  # type: ignore[arg-type]  # lists are invariant


def _decode_arrays(payload: bytes) -> ForeignBatch:
    batch = _ARRAYS.decode(payload)
    return ForeignBatch([_from_array(event) for event in batch.events], batch.ts, batch.rank)


def _from_array(event: _ArrayStored | _ArrayRemoved | _ArrayCleared) -> Stored | Removed | Cleared:
    if isinstance(event, _ArrayStored):
        return Stored(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            block_size=event.block_size,
            medium=event.medium,
            group_idx=event.group_idx,
        )
    if isinstance(event, _ArrayRemoved):
        return Removed(block_hashes=event.block_hashes, medium=event.medium, group_idx=event.group_idx)
    return Cleared()


def _skipped(kind: str) -> ForeignBatch:
    return ForeignBatch([], skipped=(kind,))
