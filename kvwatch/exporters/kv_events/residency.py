"""Which hashes are resident, by group and medium, with what is needed to tell somebody who knows nothing.

A hash is resident while at least one block holds it. Parents and tokens are remembered for as long as the hash is
resident; what was never seen (it was stored while events were lost) stays unknown.
"""

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvwatch.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKey,
    WireEvent,
    WireHash,
)

FULL, SLIDING = "full_attention", "sliding_window"
"""What the wire calls the attention of a KV group."""

SPEC_KINDS = {0: FULL}
"""Attention of the groups of an engine that says nothing of it."""


class Key(NamedTuple):
    """A hash in one place."""

    medium: str
    group: int
    content: WireHash


class Content(msgspec.Struct, frozen=True, gc=False):
    """What is known of a hash's block."""

    block_size: int
    """Tokens in the block."""
    parent: WireHash | None = None
    """Hash of the block before; none at the start of a sequence, and where it is not known."""
    token_ids: Sequence[int] = ()
    """Its tokens, packed; empty where they are not known."""
    lora_name: str | None = None
    extra_keys: tuple[ExtraKey, ...] = ()
    kind: str | None = None
    """Attention of its KV group, if the engine says it."""
    window: int | None = None
    """Tokens that a query of its group sees; none sees all."""

    @property
    def is_known(self) -> bool:
        """Whether anything but the hash is known."""
        return self.parent is not None or len(self.token_ids) > 0


class Residency:
    """Resident hashes in the order in which they became resident. One thread at a time."""

    __slots__ = ("_contents",)

    def __init__(self) -> None:
        self._contents: dict[Key, Content] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, key: object) -> bool:
        return key in self._contents

    def __iter__(self) -> Iterator[Key]:
        return iter(self._contents)

    def add(self, key: Key, content: Content) -> None:
        """A hash became resident, or more became known of it."""
        before = self._contents.get(key)
        if before is None or not before.is_known:
            self._contents[key] = content

    def remove(self, key: Key) -> None:
        """A hash is resident no more. One that was not is ignored."""
        self._contents.pop(key, None)

    def get(self, key: Key) -> Content | None:
        """Return what is known of a resident hash."""
        return self._contents.get(key)

    def clear(self) -> None:
        """Nothing is resident any more."""
        self._contents.clear()

    def apply(self, event: WireEvent) -> None:
        """Follow one event of the wire, as a reader would."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif isinstance(event, BlockRemoved):
            for each in event.block_hashes:
                self.remove(Key(event.medium or "", event.group_idx or 0, each))
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        for index, each in enumerate(event.block_hashes):
            keys = event.extra_keys[index] if event.extra_keys else None
            tokens = event.token_ids[index * size : (index + 1) * size]
            content = Content(size, parent, packed(tokens), event.lora_name, tuple(keys or ()))
            self.add(Key(event.medium or "", event.group_idx or 0, each), content)
            parent = each

    def events(self, max_blocks: int) -> Iterator[BlockStored]:
        """Yield everything resident as stores of at most `max_blocks` blocks, each block after its parent.

        Strict readers drop a block whose parent they have not seen. A parent that is not resident cannot come before.
        """
        keys: list[Key] = []
        contents: list[Content] = []
        for key in self._parents_first():
            content = self._contents[key]
            if keys and (len(keys) == max_blocks or not _continues(keys[-1], contents[-1], key, content)):
                yield stored_event(keys, contents)
                keys, contents = [], []
            keys.append(key)
            contents.append(content)
        if keys:
            yield stored_event(keys, contents)

    def _parents_first(self) -> Iterator[Key]:
        done: set[Key] = set()
        for key in self._contents:
            chain: list[Key] = []
            here: Key | None = key
            while here is not None and here not in done:
                done.add(here)  # also ends a circle, which only a lying engine could make
                chain.append(here)
                here = self._resident_parent(here)
            yield from reversed(chain)

    def _resident_parent(self, key: Key) -> Key | None:
        parent = self._contents[key].parent
        if parent is None:
            return None
        above = Key(key.medium, key.group, parent)
        return above if above in self._contents else None


def packed(token_ids: Sequence[int]) -> Sequence[int]:
    """Return tokens in a fifth of the memory of a list: there is one such sequence for each resident block."""
    return array("q", token_ids)


def _continues(last_key: Key, last: Content, key: Key, content: Content) -> bool:
    """Whether one event can tell both: the second block follows the first in one chain and is of the same kind."""
    return (
        content.parent == last_key.content
        and key[:2] == last_key[:2]
        and content.lora_name == last.lora_name
        and content.block_size == last.block_size
        and len(content.token_ids) == len(last.token_ids)
    )


def stored_event(keys: Sequence[Key], contents: Sequence[Content]) -> BlockStored:
    """Return the event that tells consecutive blocks of one chain in one place."""
    first, place = contents[0], keys[0]
    has_extra_keys = any(content.extra_keys for content in contents)
    return BlockStored(
        block_hashes=[key.content for key in keys],
        parent_block_hash=first.parent,
        token_ids=[token for content in contents for token in content.token_ids],
        block_size=first.block_size,
        lora_id=None,
        medium=place.medium,
        lora_name=first.lora_name,
        extra_keys=[list(content.extra_keys) or None for content in contents] if has_extra_keys else None,
        group_idx=place.group,
        kv_cache_spec_kind=first.kind or SPEC_KINDS.get(place.group),
        kv_cache_spec_sliding_window=first.window,
    )


def removed_events(keys: Collection[Key]) -> list[BlockRemoved]:
    """Return the events that tell that hashes are gone: one for each place."""
    places: dict[tuple[str, int], list[WireHash]] = {}
    for medium, group, content in keys:
        places.setdefault((medium, group), []).append(content)
    return [
        BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group) for (medium, group), hashes in places.items()
    ]
