"""Makes events of decoded msgpack, piece by piece: what cannot be is left out and the rest kept.

Fields that decide which blocks are meant (hashes, parent, medium, group) must be right, else the event is left out. Of
the others only what has the right type is kept.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from kvwatch.wire.foreign import (
    MAX_GROUP,
    MAX_HASH_BYTES,
    MAX_MEDIUM_LETTERS,
    Cleared,
    ForeignBatch,
    ForeignEvent,
    Removed,
    StoredInFull,
)
from kvwatch.wire.kv_events import WireHash

T = TypeVar("T")

Fields = dict[Any, Any]

_STORED_ORDER = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
"""Fields of an event that is an array, after its type. Some versions put a map in the place of `lora_name`."""

_REMOVED_ORDER = ("block_hashes", "medium", "group_idx")


class _SkippedError(Exception):
    """An event is left out; the message is the kind."""


def read_batch(plain: object) -> ForeignBatch | None:
    """Return the batch that decoded msgpack says, or None if it is none."""
    if isinstance(plain, dict):
        ts, events = plain.get("ts"), plain.get("events")
        rank = plain.get("data_parallel_rank", plain.get("attn_dp_rank"))
    elif isinstance(plain, list) and len(plain) >= 2:
        ts, events = plain[0], plain[1]
        rank = plain[2] if len(plain) > 2 else None
    else:
        return None
    if not isinstance(events, list):
        return None
    read: list[ForeignEvent] = []
    skipped: list[str] = []
    for event in events:
        try:
            read.append(_read_event(event))
        except _SkippedError as error:
            skipped.append(str(error))
    seconds = float(ts) if isinstance(ts, int | float) and not isinstance(ts, bool) else None
    return ForeignBatch(read, seconds, _exact(rank, int), tuple(skipped))


def _read_event(plain: object) -> ForeignEvent:
    if isinstance(plain, dict):
        fields: Fields = plain
        name = plain.get("type")
    elif isinstance(plain, list) and plain:
        name = plain[0]
        order = _REMOVED_ORDER if name == "BlockRemoved" else _STORED_ORDER
        fields = dict(zip(order, plain[1:], strict=False))
    else:
        _skip("event")
    if not isinstance(name, str):
        _skip("event")
    reader = _READERS.get(name)
    if reader is None:
        _skip("type")
    return reader(fields)


def _read_stored(fields: Fields) -> StoredInFull:
    lora_name = fields.get("lora_name")
    more = lora_name if isinstance(lora_name, dict) else {}
    parent = fields.get("parent_block_hash")
    if parent is not None and not _is_hash(parent):
        _skip("parent")
    return StoredInFull(
        block_hashes=_hashes(fields),
        parent_block_hash=parent,
        block_size=max(0, _exact(fields.get("block_size"), int) or 0),
        medium=_medium(fields),
        group_idx=_group(fields),
        lora_name=_exact(lora_name, str),
        token_ids=_exact(fields.get("token_ids"), list),
        lora_id=_exact(fields.get("lora_id"), int),
        extra_keys=_exact(fields.get("extra_keys"), list),
        kv_cache_spec_kind=_exact(fields.get("kv_cache_spec_kind"), str),
        kv_cache_spec_sliding_window=_exact(fields.get("kv_cache_spec_sliding_window"), int),
        locality=_exact(fields.get("locality"), str),
        ownership=_exact(fields.get("ownership"), str),
        session_id=_exact(fields.get("session_id"), str),
        lookahead_token_ids=_exact(fields.get("lookahead_token_ids"), list),
        cache_salt=_exact(fields.get("cache_salt", more.get("cache_salt")), str),
    )


def _read_removed(fields: Fields) -> Removed:
    return Removed(
        block_hashes=_hashes(fields),
        medium=_medium(fields),
        group_idx=_group(fields),
        locality=_exact(fields.get("locality"), str),
        ownership=_exact(fields.get("ownership"), str),
    )


def _read_cleared(_: Fields) -> Cleared:
    return Cleared()


_READERS: dict[str, Callable[[Fields], ForeignEvent]] = {
    "BlockStored": _read_stored,
    "BlockRemoved": _read_removed,
    "AllBlocksCleared": _read_cleared,
}


def _hashes(fields: Fields) -> list[WireHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(map(_is_hash, hashes)):
        _skip("hashes")
    return hashes


def _is_hash(value: object) -> bool:
    return type(value) is int or (isinstance(value, bytes) and 1 <= len(value) <= MAX_HASH_BYTES)


def _medium(fields: Fields) -> str | None:
    medium = fields.get("medium")
    if medium is not None and (not isinstance(medium, str) or len(medium) > MAX_MEDIUM_LETTERS):
        _skip("place")
    return medium


def _group(fields: Fields) -> int | None:
    group = fields.get("group_idx")
    if group is not None and (type(group) is not int or not 0 <= group <= MAX_GROUP):
        _skip("place")
    return group


def _exact(value: object, wanted: type[T]) -> T | None:
    """Return what has exactly the type that is wanted, else None: a boolean is no number."""
    return value if type(value) is wanted else None


def _skip(kind: str) -> NoReturn:
    raise _SkippedError(kind)
