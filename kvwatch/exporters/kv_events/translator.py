"""Turns the engine's block events into events of the wire.

The two differ in what they speak of: kvwatch tells what happens to blocks, the wire tells which hashes can be found. So
a hash that two blocks hold is told once, and removed when the last of them has lost it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from kvwatch.exporters.kv_events.foreign import ForeignTranslator
from kvwatch.exporters.kv_events.residency import (
    FULL,
    SLIDING,
    Content,
    Key,
    Residency,
    packed,
    removed_events,
    stored_event,
)
from kvwatch.telemetry.events import (
    BlocksEvicted,
    BlocksLaidOut,
    BlocksRelocated,
    BlocksStored,
    CacheCleared,
    EngineEnded,
    RequestFinished,
    RequestQueued,
)
from kvwatch.telemetry.events.block import GROUPS, Tier
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, TierState
from kvwatch.wire.kv_events import AllBlocksCleared, ExtraKey, WireEvent, WireHash, int_hash

HashKind = Literal["int", "bytes"]

MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
"""Tiers in the words of the wire, whatever the device is."""

MAX_BLOCKS_PER_EVENT = 512
"""Blocks in one event when everything resident is told."""

Place = tuple[str, str, int]
"""Tier, group, block id."""


class Spec(TypedDict):
    """Attention of a KV group, as `Content` names it."""

    kind: str
    window: int | None


@dataclass(frozen=True, slots=True)
class Origin:
    """What the blocks of a request depend on beside tokens."""

    adapter: str = ""
    salt: str = ""
    """Digest of its salts."""
    images: tuple[tuple[int, int, bytes], ...] = ()
    """First token, number of tokens and digest of each image."""

    def keys_in(self, place: int, block_size: int) -> tuple[ExtraKey, ...]:
        """Return the extra keys of the block at a place in the table."""
        begin, end = place * block_size, (place + 1) * block_size
        # A salt marks the first block, as in vLLM: the others follow from it. An image marks each block that it is in.
        texts = filter(None, (self.adapter, self.salt if place == 0 else ""))
        images = (
            [digest.hex(), position - begin]
            for position, num_tokens, digest in self.images
            if position < end and begin < position + num_tokens
        )
        return (*texts, *images)


_NO_ORIGIN = Origin()


def foreign_translator(hash_kind: HashKind, block_size: Callable[[], int]) -> ForeignTranslator:
    """Return what tells the blocks of an engine that is watched from outside."""
    return ForeignTranslator(_wire_hash(hash_kind), MEDIA, MAX_BLOCKS_PER_EVENT, block_size)


def _wire_hash(hash_kind: HashKind) -> Callable[[bytes], WireHash]:
    return int_hash if hash_kind == "int" else bytes


class Translator:
    """Follows one engine. Observatory thread only; memory is O(blocks that have a hash).

    `load` a snapshot first. Every method returns what is to be published, in order.
    """

    def __init__(self, hash_kind: HashKind = "int") -> None:
        self._wire_hash = _wire_hash(hash_kind)
        self._held: dict[Place, Key] = {}
        """What each block holds."""
        self._num_holders: dict[Key, int] = {}
        self._origins: dict[str, Origin] = {}
        """Of each live request whose blocks depend on more than tokens."""
        self._windows: dict[str, int | None] = {}
        """Window of each KV group; empty while there is only one, with full attention."""
        self._block_size = 0
        self.residency = Residency()
        """What a reader of everything published knows to be resident."""
        self._handlers: dict[type[Event], Callable[[Any], list[WireEvent]]] = {
            BlocksStored: self._store,
            BlocksEvicted: self._evict,
            CacheCleared: self._clear,
            BlocksRelocated: self._relocate,
            BlocksLaidOut: self._lay_out,
            EngineEnded: self._end,
            RequestQueued: self._note_origin,
            RequestFinished: self._forget_origin,
        }

    def load(self, snapshot: EngineSnapshot) -> list[WireEvent]:
        """Begin anew from a snapshot: readers forget everything, then are told what is resident.

        Parents and tokens of what was resident before are still true, since a hash names its content and all before it.
        Of what was stored meanwhile the parent is told, and no tokens: the engine does not keep them.
        """
        before = self.residency
        self._block_size = snapshot.block_size_tokens
        self.residency = Residency()
        self._held.clear()
        self._num_holders.clear()
        self._windows = {each.group: each.sliding_window for each in snapshot.groups}
        for tier in snapshot.tiers:
            for block, digest in enumerate(tier.hashes):
                if digest is not None:
                    group = GROUPS[tier.block_groups[block]] if tier.block_groups else GROUPS[0]
                    key = self._key(tier.tier, group, digest)
                    self._hold((tier.tier, group, block), key)
                    self.residency.add(key, before.get(key) or self._untold(tier, block, group))
        live = {request.request for request in snapshot.requests}
        self._origins = {request: origin for request, origin in self._origins.items() if request in live}
        return [AllBlocksCleared(), *self.residency.events(MAX_BLOCKS_PER_EVENT)]

    def apply(self, event: Event) -> list[WireEvent]:
        """Follow one event; return what it means to readers, usually nothing."""
        handler = self._handlers.get(type(event))
        return handler(event) if handler is not None else []

    # ------------------------------------------------------------ events

    def _store(self, event: BlocksStored) -> list[WireEvent]:
        """Tell the hashes that are new; a run ends where a hash was known already, since its parent must be given."""
        told: list[WireEvent] = []
        keys: list[Key] = []
        contents: list[Content] = []
        for index, parent in self._in_order(event):
            key = self._key(event.tier, event.group, event.hashes[index])
            told += self._replace((event.tier, event.group, event.block_ids[index]), key)
            is_known = key in self.residency
            if keys and (is_known or parent != keys[-1].content):
                told += _run(keys, contents)
                keys, contents = [], []
            if not is_known:
                content = self._content(event, index, parent)
                self.residency.add(key, content)
                keys.append(key)
                contents.append(content)
        return told + _run(keys, contents)

    def _in_order(self, event: BlocksStored) -> list[tuple[int, WireHash | None]]:
        """Return which blocks to tell, one after the other, and the parent of each."""
        parents = event.parents
        if parents is None:
            parents = [event.parent or b"", *event.hashes[:-1]]
        found = [(index, self._wire_hash(parent) if parent else None) for index, parent in enumerate(parents)]
        # In tiers behind the device the end of a chain comes first, since it was evicted first.
        return found if event.parents is None else found[::-1]

    def _evict(self, event: BlocksEvicted) -> list[WireEvent]:
        if event.reason == "reset":  # the CacheCleared that follows tells all of it at once
            return []
        gone = [self._let_go((event.tier, event.group, block)) for block in event.block_ids]
        return self._remove([key for key in gone if key is not None])

    def _clear(self, event: CacheCleared) -> list[WireEvent]:
        return self._clear_tier(event.tier)

    def _clear_tier(self, tier: Tier) -> list[WireEvent]:
        gone = [key for key in self.residency if key.medium == MEDIA[tier]]
        self._held = {place: key for place, key in self._held.items() if place[0] != tier}
        for key in gone:
            del self._num_holders[key]
        if len(gone) < len(self.residency):  # other tiers keep what they have
            return self._remove(gone)
        self.residency.clear()
        return [AllBlocksCleared()]

    def _relocate(self, event: BlocksRelocated) -> list[WireEvent]:
        """Hashes stay resident, in other blocks: readers do not know blocks."""
        for source, destination in zip(event.sources, event.destinations, strict=True):
            key = self._held.pop((event.tier, event.group, source), None)
            if key is not None:
                self._held[event.tier, event.group, destination] = key
        return []

    def _lay_out(self, event: BlocksLaidOut) -> list[WireEvent]:
        if event.tier == "device":
            self._block_size = event.block_size_tokens
        has_any = any(key.medium == MEDIA[event.tier] for key in self.residency)
        return self._clear_tier(event.tier) if has_any else []

    def _end(self, _event: EngineEnded) -> list[WireEvent]:
        """An engine that has ended holds nothing; who looks for its blocks should look elsewhere."""
        self._held.clear()
        self._num_holders.clear()
        self.residency.clear()
        return [AllBlocksCleared()]

    def _note_origin(self, event: RequestQueued) -> list[WireEvent]:
        if event.adapter or event.salt or event.image_hashes:
            images = zip(event.image_positions, event.image_tokens, event.image_hashes, strict=True)
            self._origins[event.request] = Origin(event.adapter, event.salt, tuple(images))
        return []

    def _forget_origin(self, event: RequestFinished) -> list[WireEvent]:
        self._origins.pop(event.request, None)
        return []

    # ------------------------------------------------------------ parts

    def _key(self, tier: str, group: str, digest: bytes) -> Key:
        return Key(MEDIA[tier], int(group), self._wire_hash(digest))

    def _untold(self, tier: TierState, block: int, group: str) -> Content:
        """Return what the engine's snapshot says of a block whose event was lost: what it is a block after."""
        parent = tier.parents[block] if tier.parents else None
        return Content(self._block_size, None if parent is None else self._wire_hash(parent), **self._spec(group))

    def _content(self, event: BlocksStored, index: int, parent: WireHash | None) -> Content:
        tokens = packed(event.token_ids[index]) if event.token_ids is not None else ()
        origin = self._origins.get(event.request, _NO_ORIGIN)
        keys = origin.keys_in(event.first_index + index, self._block_size)
        return Content(self._block_size, parent, tokens, origin.adapter or None, keys, **self._spec(event.group))

    def _spec(self, group: str) -> Spec:
        window = self._windows.get(group)
        return Spec(kind=FULL if window is None else SLIDING, window=window)

    def _remove(self, keys: list[Key]) -> list[WireEvent]:
        for key in keys:
            self.residency.remove(key)
        return list(removed_events(keys))

    def _replace(self, place: Place, key: Key) -> list[WireEvent]:
        """Let a block hold `key`, and whatever it held before, which no engine should do, be gone."""
        gone = self._let_go(place)
        self._hold(place, key)
        return self._remove([gone]) if gone is not None and gone != key else []

    def _hold(self, place: Place, key: Key) -> None:
        self._held[place] = key
        self._num_holders[key] = self._num_holders.get(key, 0) + 1

    def _let_go(self, place: Place) -> Key | None:
        """Forget what a block held; return it if that was the last block to hold it."""
        key = self._held.pop(place, None)
        if key is None:
            return None
        left = self._num_holders[key] - 1
        if left:
            self._num_holders[key] = left
            return None
        del self._num_holders[key]
        return key


def _run(keys: Sequence[Key], contents: Sequence[Content]) -> list[WireEvent]:
    return [stored_event(keys, contents)] if keys else []
