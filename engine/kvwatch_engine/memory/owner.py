"""Whose blocks are meant: the names under which events tell of them."""

from typing import NamedTuple

from kvwatch_engine.contracts.block import BlockHash


class Owner(NamedTuple):
    """A sequence, as events name it."""

    request: str
    sequence: int


class StoredRun(NamedTuple):
    """Where blocks that are stored come from, as their event tells it."""

    owner: Owner
    first_index: int
    """Place of the first block in the owner's block table."""
    token_ids: list[list[int]] | None = None
    """Token ids of each block; none when nobody may know them."""
    group: int = 0
    """KV group of the blocks."""
    parents: list[BlockHash | None] | None = None
    """Hash of the block before each, where they do not follow each other; none where they do."""
