"""Turns what became of a foreign engine's KV events into events of the wire again.

A sidecar that publishes tells the same hashes as the engine that it watches, without what the engine told twice, and
with everything resident told anew after a gap.
"""

from collections.abc import Callable
from typing import Any

from kvwatch.exporters.kv_events.residency import Content, Key, Residency, packed, removed_events, stored_event
from kvwatch.telemetry.events import BlocksEvicted, BlocksStored, CacheCleared, SourceReset
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch.wire.kv_events import AllBlocksCleared, WireEvent, WireHash


class ForeignTranslator:
    """Follows one foreign engine. Observatory thread only; memory is O(resident hashes).

    `load` a snapshot first. Every method returns what is to be published, in order.

    Args:
        wire_hash: Makes the wire's hash of a digest.
        media: Tiers in the words of the wire.
        max_blocks: Most blocks in one event when everything resident is told.
        block_size: Tells the tokens of a block as the engine last said them; 0 while it said nothing.
    """

    def __init__(
        self,
        wire_hash: Callable[[bytes], WireHash],
        media: dict[str, str],
        max_blocks: int,
        block_size: Callable[[], int],
    ) -> None:
        self._wire_hash = wire_hash
        self._media = media
        self._max_blocks = max_blocks
        self._block_size = block_size
        self.residency = Residency()
        """What a reader of everything published knows to be resident."""
        self._handlers: dict[type[Event], Callable[[Any], list[WireEvent]]] = {
            BlocksStored: self._store,
            BlocksEvicted: self._evict,
            CacheCleared: self._clear,
            SourceReset: lambda _: self._clear_all(),
        }

    def load(self, snapshot: EngineSnapshot) -> list[WireEvent]:
        """Begin anew from a snapshot: readers forget everything, then are told what is resident."""
        before = self.residency
        self.residency = Residency()
        unknown = Content(snapshot.block_size_tokens or self._block_size())
        for state in snapshot.indexed:
            for digest in state.hashes:
                key = self._key(state.tier, state.group, digest)
                self.residency.add(key, before.get(key) or unknown)
        return [AllBlocksCleared(), *self.residency.events(self._max_blocks)]

    def apply(self, event: Event) -> list[WireEvent]:
        """Follow one event; return what it means to readers."""
        handler = self._handlers.get(type(event))
        return handler(event) if handler is not None else []

    def _store(self, event: BlocksStored) -> list[WireEvent]:
        parent = None if event.parent is None else self._wire_hash(event.parent)
        # Not of the snapshot: an engine that is watched from its start had told nothing then.
        size = self._block_size()
        keys: list[Key] = []
        contents: list[Content] = []
        for index, digest in enumerate(event.hashes):
            key = self._key(event.tier, event.group, digest)
            tokens = packed(event.token_ids[index]) if event.token_ids else ()
            content = Content(len(tokens) or size, parent, tokens)
            self.residency.add(key, content)
            keys.append(key)
            contents.append(content)
            parent = key.content
        return [stored_event(keys, contents)] if keys else []

    def _evict(self, event: BlocksEvicted) -> list[WireEvent]:
        return self._remove([self._key(event.tier, event.group, digest) for digest in event.hashes])

    def _clear(self, event: CacheCleared) -> list[WireEvent]:
        medium = self._medium(event.tier)
        gone = [key for key in self.residency if key.medium == medium]
        if len(gone) < len(self.residency):  # other tiers keep what they have
            return self._remove(gone)
        return self._clear_all()

    def _clear_all(self) -> list[WireEvent]:
        self.residency.clear()
        return [AllBlocksCleared()]

    def _remove(self, keys: list[Key]) -> list[WireEvent]:
        for key in keys:
            self.residency.remove(key)
        return list(removed_events(keys))

    def _key(self, tier: str, group: str, digest: bytes) -> Key:
        number = int(group) if group.isascii() and group.isdigit() else 0
        return Key(self._medium(tier), number, self._wire_hash(digest))

    def _medium(self, tier: str) -> str:
        return self._media.get(tier, tier.upper())
