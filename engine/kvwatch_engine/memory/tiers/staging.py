"""Contiguous memory in which evicted blocks wait until the worker has carried them to the next tier.

    |  free  | batch 7 | batch 8 |   free   |        a ring: batches leave in the order in which they came

A place is given to another batch only after the worker has ended the one before. Engine thread only.
"""

from collections import deque

from kvwatch_engine.memory.tiers.stores import Bytes


class StagingRing:
    """A ring of block-sized places."""

    def __init__(self, memory: Bytes) -> None:
        """Use `memory`, uint8[places, block_bytes]."""
        self.memory = memory
        self._batches: deque[tuple[int, int]] = deque()

    def take(self, num_blocks: int) -> range:
        """Return at most so many adjacent places, the largest run that is free where the ring goes on; maybe none."""
        size = len(self.memory)
        if not self._batches:
            start, room = 0, size
        else:
            oldest, newest_end = self._batches[0][0], self._batches[-1][1]
            if newest_end <= oldest:
                start, room = newest_end, oldest - newest_end
            elif size - newest_end >= min(num_blocks, oldest) and newest_end < size:
                start, room = newest_end, size - newest_end
            else:
                start, room = 0, oldest
        places = range(start, start + min(room, num_blocks))
        if places:
            self._batches.append((places.start, places.stop))
        return places

    def give_back(self) -> None:
        """Free the places of the oldest batch."""
        self._batches.popleft()

    def take_back(self, places: range) -> None:
        """Undo the last `take`, which gave these places or more."""
        if self._batches and self._batches[-1][0] == places.start:
            self._batches.pop()
