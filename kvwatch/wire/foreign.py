"""Events as engines of any version put them on the wire, after the differences between those versions were taken away.

Fields keep the wire's names. What a version does not send, or sends in a form that nothing here needs, is None.
"""

from hashlib import sha256
from typing import Any

import msgspec

from kvwatch.wire.kv_events import ExtraKey, WireHash

_MASK = 0xFFFF_FFFF_FFFF_FFFF

MAX_HASH_BYTES = 1_024
"""Longest digest that is taken for a hash; engines send 8 to 96 bytes."""

MAX_KEPT_HASH_BYTES = 128
"""Longest digest that is kept as it is; of a longer one its own digest is, so that memory follows from numbers."""

MAX_GROUP = 255
MAX_MEDIUM_LETTERS = 64
MAX_MEDIA = 32
"""Media of one engine that are told apart."""

DEFAULT_MEDIUM = "GPU"
"""Of engines that name none."""

_TIERS = {"GPU": "device", "STORAGE": "disk", "DISK": "disk"}


class Stored(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Blocks became known under their hashes; each hash's parent is the one before it, the first one's is given."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None = None
    block_size: int = 0
    """Tokens in a block; 0 where the engine does not know it."""
    medium: str | None = None
    """As it is on the wire, in any case; see `tier_of`."""
    group_idx: int | None = None
    lora_name: str | None = None


class StoredInFull(Stored, kw_only=True, frozen=True, gc=False):
    """The same with all that was sent."""

    token_ids: list[Any] | None = None
    """Tokens of all blocks, one after the other, or pairs of them; may be more or fewer than the blocks hold."""
    lora_id: int | None = None
    extra_keys: list[list[ExtraKey] | None] | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[Any] | None = None
    cache_salt: str | None = None


class Removed(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Blocks that had these hashes are gone."""

    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing that this publisher stored is there any more."""


ForeignEvent = Stored | Removed | Cleared


class ForeignBatch(msgspec.Struct, frozen=True, gc=False):
    """What is left of a message after what could not be understood was taken out."""

    events: list[ForeignEvent]
    ts: float | None = None
    """Unix time in seconds, as the engine says; none if it says none. Any number, also NaN."""
    rank: int | None = None
    """Data-parallel rank."""
    skipped: tuple[str, ...] = ()
    """Kind of each part that was left out: one of `SKIP_KINDS`."""

    @property
    def may_have_lost(self) -> bool:
        """Whether what was left out may have told of blocks. An event of an unknown type is taken not to."""
        return any(kind != "type" for kind in self.skipped)

    @property
    def is_illegible(self) -> bool:
        """Whether nothing of the message could be understood: then its number says nothing either."""
        return bool(self.skipped) and self.skipped[0] in MESSAGE_KINDS


MESSAGE_KINDS = ("frames", "size", "msgpack", "batch")
"""Why a whole message is left out: its frames, its size, bytes that are no msgpack, something else than a batch."""

EVENT_KINDS = ("event", "type", "hashes", "parent", "place")
"""Why a single event is left out: it is no event, of an unknown type, or has a field that cannot be."""

SKIP_KINDS = MESSAGE_KINDS + EVENT_KINDS


def hash_bytes(wire_hash: WireHash) -> bytes:
    """Return a hash in the form in which kvwatch keeps it: integers as 8 bytes, big-endian, two's complement."""
    if not isinstance(wire_hash, bytes):
        return (wire_hash & _MASK).to_bytes(8, "big")
    return wire_hash if len(wire_hash) <= MAX_KEPT_HASH_BYTES else sha256(wire_hash).digest()


def canonical_medium(medium: str | None) -> str:
    """Return the medium in the letters in which media are compared."""
    return medium.upper() if medium else DEFAULT_MEDIUM


def tier_of(medium: str) -> str:
    """Return the tier of a canonical medium."""
    if medium.startswith("CPU"):
        return "host"
    return _TIERS.get(medium, "external")
