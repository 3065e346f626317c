"""What was removed and came back: the blocks that a larger cache would have kept.

    removed, newest first    c  b  a       a comes back: it is the third, so 3 more blocks of room would have kept it
                             1  2  3

An engine that removes the least recently used block first keeps, with n more blocks, exactly the n newest removals (the
inclusion property of LRU; Mattson and others, 1970). So the place of a hash among the removed ones that are still away
is the extra room that would have kept it. For an engine with another order it is an estimate.
"""

from array import array
from typing import NamedTuple

DEFAULT_MAX_GHOSTS = 131_072
"""Removals that are remembered: one that comes back later than that counts as new."""

_CHUNK = 512


class Return(NamedTuple):
    """A removed block that came back."""

    away_ns: int
    """Time since its removal."""
    num_extra_blocks: int
    """The least extra room, in blocks, with which it would not have been removed."""


class Ghosts:
    """Removed hashes in the order of their removal. One thread.

    Each removal takes the next place of a ring; a place is 1 while its hash is away. Counting ones is a sum over
    chunks: some microseconds for each return, nothing to speak of for each removal.
    """

    def __init__(self, max_ghosts: int = DEFAULT_MAX_GHOSTS) -> None:
        self._size = -(-max_ghosts // _CHUNK) * _CHUNK
        self._is_away = bytearray()
        self._in_chunk = [0] * (self._size // _CHUNK)
        self._hashes: list[bytes | None] = []
        self._removed: dict[bytes, int] = {}
        """Hash -> number of its removal."""
        self._removed_ns = array("q")
        self._num_removals = 0

    def __len__(self) -> int:
        """Number of hashes that are away and remembered."""
        return len(self._removed)

    def remove(self, content: bytes, at_ns: int) -> None:
        """A hash is gone since `at_ns`."""
        if content in self._removed:
            self._forget(content)
        number = self._num_removals
        self._num_removals += 1
        if not self._hashes:  # megabytes, which a place without removals does not need
            self._make_room()
        place = number % self._size
        overwritten = self._hashes[place]
        if overwritten is not None:
            self._forget(overwritten)
        self._hashes[place] = content
        self._is_away[place] = 1
        self._in_chunk[place // _CHUNK] += 1
        self._removed[content] = number
        self._removed_ns[place] = at_ns

    def store(self, content: bytes, at_ns: int) -> Return | None:
        """A hash is there again or for the first time; tell of its return if its removal is remembered."""
        number = self._removed.get(content)
        if number is None:
            return None
        removed_ns = self._removed_ns[number % self._size]
        found = Return(max(0, at_ns - removed_ns), self._num_away_since(number))
        self._forget(content)
        return found

    def clear(self) -> None:
        """Forget everything: what a clear removes would have been removed from any cache.

        Costs as much as there is to forget: an engine may clear its cache thousands of times a second.
        """
        for content in list(self._removed):
            self._forget(content)
        self._removed = {}

    def _make_room(self) -> None:
        self._is_away = bytearray(self._size)
        self._hashes = [None] * self._size
        self._removed_ns = array("q", bytes(8 * self._size))

    def _num_away_since(self, number: int) -> int:
        """Return how many removals from `number` on, itself included, are still away."""
        first, end = number % self._size, self._num_removals % self._size
        if first < end:
            return self._count(first, end)
        return self._count(first, self._size) + self._count(0, end)

    def _count(self, first: int, end: int) -> int:
        first_chunk, end_chunk = -(-first // _CHUNK), end // _CHUNK
        if first_chunk >= end_chunk:
            return self._is_away.count(1, first, end)
        inner = sum(self._in_chunk[first_chunk:end_chunk])
        return (
            self._is_away.count(1, first, first_chunk * _CHUNK)
            + inner
            + self._is_away.count(1, end_chunk * _CHUNK, end)
        )

    def _forget(self, content: bytes) -> None:
        number = self._removed.pop(content, None)
        if number is not None:
            place = number % self._size
            self._hashes[place] = None
            self._is_away[place] = 0
            self._in_chunk[place // _CHUNK] -= 1
