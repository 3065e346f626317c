"""Which resident block follows which: the forest of prefixes.

        a ── b ── c          a is a root; b has a fan-out of 2: two requests agree up to b, and no further
              └── d

A block whose parent is not resident is a root, whatever it follows. Blocks that are gone stay in the forest while
something resident follows them, so that a block that comes back finds its place.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DEFAULT_MAX_NODES = 1_500_000
"""Blocks in the forest; what is stored beyond it is left out, and the forest says that it is not whole."""

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Subtree:
    """Blocks that have a prefix in common."""

    content: bytes
    """Hash of the prefix's last block."""
    depth: int
    """Blocks of the prefix, as far as they are known."""
    num_blocks: int
    """Resident blocks that follow it."""
    fan_out: int
    """Resident blocks that follow it directly."""


class PrefixForest:
    """The prefixes of one tier and group. One thread; counts may be read on any."""

    def __init__(self, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self._max_nodes = max_nodes
        self._ids: dict[bytes, int] = {}
        self._unused: list[int] = []
        self._hashes: list[bytes | None] = []
        self._parent = array("i")
        self._depth = array("i")
        self._num_children = array("i")
        self._fan_out = array("i")
        """Resident children."""
        self._is_resident = bytearray()
        self._at_depth: list[int] = []
        """Resident blocks by depth."""
        self._with_fan_out: list[int] = []
        """Resident blocks by fan-out."""
        self.num_resident = 0
        self.num_roots = 0
        """Resident blocks whose parent is not."""
        self.num_left_out = 0
        """Stores for which there was no room; not 0: the counts are too small."""

    # ------------------------------------------------------------ changes

    def store(self, hashes: Sequence[bytes], parent: bytes | None) -> None:
        """Blocks became resident: a chain whose first one follows `parent`."""
        if not hashes:
            return
        first = above = _NOBODY if parent is None else self._node(parent, _NOBODY)
        for content in hashes:
            node = self._node(content, above)
            if node == _NOBODY:
                self.num_left_out += 1
            elif not self._is_resident[node]:
                self._enter(node)
            above = node
        self._prune(first)  # nothing may follow the parent after all

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Blocks are gone."""
        for content in hashes:
            node = self._ids.get(content, _NOBODY)
            if node != _NOBODY and self._is_resident[node]:
                self._leave(node)

    def clear(self) -> None:
        """Nothing is resident any more."""
        self.__init__(self._max_nodes)  # type: ignore[misc]

    # ------------------------------------------------------------ reading

    @property
    def num_branches(self) -> int:
        """Resident blocks with at least two resident children."""
        return sum(self._with_fan_out[2:])

    @property
    def max_fan_out(self) -> int:
        """Most resident children of one resident block."""
        return _highest(self._with_fan_out)

    @property
    def max_depth(self) -> int:
        """Most blocks of one prefix: its ancestors as far as they are known, and itself."""
        return _highest(self._at_depth)

    def largest_subtrees(self, limit: int = 10) -> list[Subtree]:
        """Return the blocks with a fan-out of 2 or more that most resident blocks follow. O(blocks)."""
        parent, depth = np.array(self._parent, np.int64), np.array(self._depth, np.int64)
        sizes = np.frombuffer(bytes(self._is_resident), np.uint8).astype(np.int64)
        fan_out, is_resident = np.array(self._fan_out, np.int64), sizes.copy()
        order = np.argsort(-depth, kind="stable")
        starts = np.flatnonzero(np.diff(depth[order], prepend=depth.max(initial=0) + 1))
        for nodes in np.split(order, starts[1:]) if len(order) else ():
            below = nodes[parent[nodes] != _NOBODY]
            np.add.at(sizes, parent[below], sizes[below])
        shared = np.flatnonzero((fan_out >= 2) & (is_resident == 1))
        best = shared[np.argsort(-sizes[shared], kind="stable")[:limit]]
        return [
            Subtree(content, int(depth[node]), int(sizes[node]) - 1, int(fan_out[node]))
            for node in best
            if (content := self._hashes[node]) is not None
        ]

    # ------------------------------------------------------------ parts

    def _node(self, content: bytes, above: int) -> int:
        """Return the node of a hash, made if it is new; one that had no parent yet is given `above`."""
        node = self._ids.get(content, _NOBODY)
        if node == _NOBODY:
            if len(self._ids) >= self._max_nodes:
                return _NOBODY
            node = self._ids[content] = self._new_node(content)
            self._depth[node] = 1
        if above != _NOBODY and self._parent[node] == _NOBODY and above != node and not self._num_children[node]:
            # One that others follow already keeps its place: moving it would move all of them, or make a circle.
            self._parent[node] = above
            self._num_children[above] += 1
            if self._is_resident[node]:
                _add(self._at_depth, self._depth[node], -1)
                _add(self._at_depth, self._depth[above] + 1, 1)
                self._note_child(above, 1)
            self._depth[node] = self._depth[above] + 1
        return node

    def _new_node(self, content: bytes) -> int:
        if self._unused:
            node = self._unused.pop()
            self._hashes[node] = content
            return node
        self._hashes.append(content)
        for column in (self._depth, self._num_children, self._fan_out):
            column.append(0)
        self._parent.append(_NOBODY)
        self._is_resident.append(0)
        return len(self._hashes) - 1

    def _enter(self, node: int) -> None:
        self._is_resident[node] = 1
        self.num_resident += 1
        _add(self._at_depth, self._depth[node], 1)
        _add(self._with_fan_out, self._fan_out[node], 1)
        self.num_roots += 1 - self._fan_out[node]  # its resident children were roots
        parent = self._parent[node]
        if parent != _NOBODY:
            self._note_child(parent, 1)

    def _leave(self, node: int) -> None:
        self._is_resident[node] = 0
        self.num_resident -= 1
        _add(self._at_depth, self._depth[node], -1)
        _add(self._with_fan_out, self._fan_out[node], -1)
        self.num_roots += self._fan_out[node] - 1
        parent = self._parent[node]
        if parent != _NOBODY:
            self._note_child(parent, -1)
        self._prune(node)

    def _prune(self, node: int) -> None:
        """Drop a node that is gone and that nothing follows, then its parent if that holds for it now, and so on."""
        while node != _NOBODY and not self._is_resident[node] and not self._num_children[node]:
            node = self._drop(node)

    def _note_child(self, parent: int, change: int) -> None:
        """A child of `parent` entered (1) or left (-1)."""
        before = self._fan_out[parent]
        self._fan_out[parent] = before + change
        if self._is_resident[parent]:
            _add(self._with_fan_out, before, -1)
            _add(self._with_fan_out, before + change, 1)
            self.num_roots -= change  # below a resident parent nobody is a root

    def _drop(self, node: int) -> int:
        """Take a node that nothing needs out of the forest; return its parent, which may be the next."""
        content, parent = self._hashes[node], self._parent[node]
        assert content is not None, "it is in the forest"
        del self._ids[content]
        self._hashes[node] = None
        self._parent[node] = _NOBODY
        self._unused.append(node)
        if parent != _NOBODY:
            self._num_children[parent] -= 1
        return parent


def _add(counts: list[int], index: int, change: int) -> None:
    if index >= len(counts):
        counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += change


def _highest(counts: list[int]) -> int:
    seen = list(counts)  # one step of the interpreter: another thread may be counting
    return next((index for index in range(len(seen) - 1, 0, -1) if seen[index]), 0)
