"""Which resident block follows which: the forest of prefixes.

        a ── b ── c          a is a root; b has a fan-out of 2: two requests agree up to b, and no further
              └── d

A block whose parent is not resident is a root, whatever it follows: nothing before it can be hit.

What happens only notes each block's parent, since an engine stores and removes thousands of blocks a second; the shape
is found when somebody asks, from all of them at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DEFAULT_MAX_BLOCKS = 1_500_000
"""Blocks whose parents are kept; what is stored beyond it is left out, and the forest says that it is not whole."""

_NOBODY = -1
Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Subtree:
    """Blocks that have a prefix in common."""

    content: bytes
    """Hash of the prefix's last block."""
    depth: int
    """Blocks of the prefix."""
    num_blocks: int
    """Resident blocks that follow it."""
    fan_out: int
    """Resident blocks that follow it directly."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The forest at one moment."""

    num_blocks: int = 0
    num_roots: int = 0
    """Blocks whose parent is not resident."""
    num_branches: int = 0
    """Blocks that at least two blocks follow directly."""
    max_fan_out: int = 0
    """Most blocks that follow one directly."""
    max_depth: int = 0
    """Most blocks in a row from a root on."""
    largest: tuple[Subtree, ...] = ()
    """Branches that most blocks follow, the largest first."""


class PrefixForest:
    """The prefixes of one tier and group. One thread changes it; `shape` may be asked on any."""

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._parents: dict[bytes, bytes | None] = {}
        self.num_left_out = 0
        """Stores for which there was no room; not 0: the shape is not that of all blocks."""

    def store(self, hashes: Sequence[bytes], parent: bytes | None) -> None:
        """Blocks became resident: a chain whose first one follows `parent`."""
        parents = self._parents
        if self.num_left_out or len(parents) + len(hashes) > self._max_blocks:
            self.num_left_out += len(hashes)
            if parents:
                self._parents = {}  # half a forest has no shape, so its room is given back until all is cleared
            return
        for content in hashes:
            parents[content] = parent
            parent = content

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Blocks are gone."""
        parents = self._parents
        for content in hashes:
            parents.pop(content, None)

    def clear(self) -> None:
        """Nothing is resident any more."""
        self._parents = {}
        self.num_left_out = 0

    def shape(self, num_largest: int = 10) -> Shape:
        """Return the forest as it is now, with its largest subtrees. O(blocks): about a second for a million."""
        parents = self._parents
        hashes = list(parents)  # this and the next are one step of the interpreter each: another thread may be storing
        above = _places_of(list(map(parents.get, hashes)), hashes)
        if not hashes:
            return Shape()
        fan_out = np.bincount(above[above != _NOBODY], minlength=len(hashes)).astype(np.int32)
        depth = _depths(above)
        return Shape(
            num_blocks=len(hashes),
            num_roots=int(np.count_nonzero(above == _NOBODY)),
            num_branches=int(np.count_nonzero(fan_out >= 2)),
            max_fan_out=int(fan_out.max()),
            max_depth=int(depth.max()),
            largest=tuple(_largest(hashes, above, depth, fan_out, num_largest)),
        )


def _places_of(wanted: Sequence[bytes | None], hashes: Sequence[bytes]) -> Indices:
    """Return the place of each wanted hash among all hashes, `_NOBODY` where it is not there.

    They are compared by the interpreter's keyed 64-bit hash of them, which takes a quarter of a dictionary's memory:
    that any two of a million blocks are taken for each other has a probability below 1e-7.
    """
    if not hashes:
        return np.empty(0, np.int32)
    keys = np.fromiter(map(hash, hashes), np.int64, len(hashes))
    order = np.argsort(keys).astype(np.int32)
    keys = keys[order]
    sought = np.fromiter(map(hash, wanted), np.int64, len(wanted))
    found = np.searchsorted(keys, sought).astype(np.int32)
    np.minimum(found, len(hashes) - 1, out=found)
    is_there = keys[found] == sought
    return np.where(is_there, order[found], np.int32(_NOBODY))


def _depths(above: Indices) -> Indices:
    """Return how many blocks lie on the way from each block's root to it, both included.

    Each round doubles how far a block has looked up, so that a chain of n blocks takes log2(n) rounds; parents in a
    circle, which no honest engine has, end with the last round.
    """
    depth = np.ones(len(above), np.int32)
    ancestor = above.copy()
    for _ in range(len(above).bit_length()):
        has_more = ancestor != _NOBODY
        if not has_more.any():
            break
        depth[has_more] += depth[ancestor[has_more]]
        ancestor[has_more] = ancestor[ancestor[has_more]]
    return np.minimum(depth, np.int32(len(above)))


def _largest(hashes: Sequence[bytes], above: Indices, depth: Indices, fan_out: Indices, limit: int) -> list[Subtree]:
    branches = np.flatnonzero(fan_out >= 2)
    if not len(branches):
        return []
    sizes = np.ones(len(hashes), np.int32)
    order = np.argsort(-depth, kind="stable")
    for level in np.split(order, np.flatnonzero(np.diff(depth[order])) + 1):  # the deepest first
        below = level[above[level] != _NOBODY]
        np.add.at(sizes, above[below], sizes[below])
    best = branches[np.argsort(-sizes[branches], kind="stable")[:limit]]
    return [Subtree(hashes[i], int(depth[i]), int(sizes[i]) - 1, int(fan_out[i])) for i in best]
