"""What was done to one block pool, and what it holds: the part of the metrics' oracle that each tier has. No events.

Calls of the pool are noted as they happen, the rest is read between two steps.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_pool import BlockPool

Key = tuple[Metric, tuple[str, ...]]
WINDOW_NS = 60_000_000_000


class Book:
    """Counts and observations by metric and labels."""

    def __init__(self) -> None:
        self.counts: Counter[Key] = Counter()
        self.observed: defaultdict[Key, list[int]] = defaultdict(list)
        self._bins: dict[Key, list[int]] = {}
        self._totals: Counter[Key] = Counter()

    def add(self, metric: Metric, amount: int = 1, *labels: str) -> None:
        self.counts[metric, labels] += amount

    def observe(self, metric: Metric, quantity: int, *labels: str) -> None:
        self.observed[metric, labels].append(quantity)

    def binned(self, metric: Metric, labels: tuple[str, ...], bounds: Sequence[float]) -> tuple[tuple[int, ...], float]:
        """Return how many observations lie in each bucket, and their sum in the metric's unit."""
        key, scale = (metric, labels), 1e9 if metric.unit == "seconds" else 1
        counts = self._bins.setdefault(key, [0] * (len(bounds) + 1))
        limits = [round(bound * scale) for bound in bounds]
        for quantity in self.observed.get(key, ())[sum(counts) :]:
            counts[bisect_left(limits, quantity)] += 1
            self._totals[key] += quantity
        return tuple(counts), self._totals[key] / scale


class PoolWatch:
    """Watches one pool. Attach it before anything happens to the pool.

    Args:
        pool: the pool.
        book: where what happens is noted.
        now: tells the time of the log.
    """

    def __init__(self, pool: BlockPool, book: Book, now: Callable[[], int]) -> None:
        self.pool = pool
        self.book = book
        self.now = now
        self.tier = pool.tier
        self.allocated_ns: dict[int, int] = {}
        self.released_ns: dict[int, int] = {}
        self.evicted: list[set[bytes]] = [set(), set()]
        """What was evicted for want of room: lately, and before."""
        self.num_evicted_lately = 0
        self.restart()
        notes: dict[str, Callable[..., Any]] = {
            "allocate": self._allocate, "reuse": self._reuse, "release": self._release, "store": self._store,
            "_evict": self._evict, "forget": self._forget, "clear_cache": self._clear, "pin": self._pin,
            "unpin": self._pin, "lay_out": self._lay_out,
        }  # fmt: skip
        for name, note in notes.items():
            around(pool, name, note)

    def restart(self) -> None:
        """The pool is another one: its lowest number of free blocks is that of now."""
        self.free: list[tuple[int, int]] = []
        """(free blocks, end) of stretches of time that are over."""
        self.num_free, self.begin_ns = self.pool.num_free, self.now()

    def move(self, moves: dict[Any, Any]) -> None:
        """Blocks are elsewhere now, with all that is known of them."""
        for times in (self.allocated_ns, self.released_ns):
            times |= {new: times[old] for old, new in moves.items() if old in times}

    # ------------------------------------------------------------------ what is noted as it happens

    def _note_free(self) -> None:
        """The pool has just changed: what it was before lasted until now."""
        self.free.append((self.num_free, self.now()))
        self.num_free = self.pool.num_free

    def _allocate(self, call: Callable[..., Any], count: int, owner: Any, reason: str, group: int = 0) -> Any:
        blocks = call(count, owner, reason, group)
        if blocks is not None:
            self.book.add(m.KV_BLOCK_ALLOCATIONS, count, self.tier, reason)
            if reason == "cow":
                self.book.add(m.KV_BLOCK_COPIES, count, self.tier)
            self.allocated_ns |= dict.fromkeys(blocks, self.now())
        self._note_free()
        return blocks

    def _reuse(self, call: Callable[..., Any], blocks: Any, owner: Any, group: int = 0) -> None:
        for block in blocks:
            if self.pool.ref_counts[block] == 0:
                self.book.observe(m.KV_BLOCK_REUSE_GAP, self.now() - self.released_ns[block])
        call(blocks, owner, group)
        self._note_free()

    def _release(self, call: Callable[..., Any], blocks: Any, owner: Any, reason: str, group: int = 0) -> None:
        self.book.add(m.KV_BLOCK_RELEASES, len(blocks), self.tier, reason)
        call(blocks, owner, reason, group)
        self.released_ns |= {block: self.now() for block in blocks if self.pool.ref_counts[block] == 0}
        self._note_free()

    def _store(self, call: Callable[..., Any], blocks: Any, hashes: list[BlockHash], *more: Any) -> None:
        num_new = sum(self.pool.find(content) is None for content in hashes)
        self.book.add(m.KV_BLOCK_STORES, num_new, self.tier)
        if num_new < len(hashes):
            self.book.add(m.PREFIX_CACHE_DUPLICATE_BLOCKS, len(hashes) - num_new, self.tier)
        call(blocks, hashes, *more)

    def _pin(self, call: Callable[..., Any], hashes: Any) -> None:
        call(hashes)
        self._note_free()

    def _evict(self, call: Callable[..., Any], count: int, beneficiary: str, reason: str) -> Any:
        hashes = list(self.pool.hashes)
        blocks = call(count, beneficiary, reason)
        for block in blocks:
            self._note_evicted(block, reason)
        gone = {content for block in blocks if (content := hashes[block]) is not None}
        if reason == "pressure":
            self.evicted[0] |= gone
            self.num_evicted_lately += len(gone)
            if self.num_evicted_lately >= self.pool.num_blocks:
                self.evicted, self.num_evicted_lately = [set(), self.evicted[0]], 0
        else:
            self.evicted = [some - gone for some in self.evicted]
        return blocks

    def _forget(self, call: Callable[..., Any], block: int) -> None:
        call(block)
        self._note_evicted(block, "unreadable")

    def _note_evicted(self, block: int, reason: str) -> None:
        self.book.add(m.KV_BLOCK_EVICTIONS, 1, self.tier, reason)
        self.book.observe(m.KV_BLOCK_LIFETIME, self.now() - self.allocated_ns[block])
        self.book.observe(m.KV_BLOCK_IDLE, self.now() - self.released_ns[block])

    def _clear(self, call: Callable[..., Any], *by: str) -> Any:
        cached = call(*by)
        self.evicted, self.num_evicted_lately = [set(), set()], 0
        return cached

    def _lay_out(self, call: Callable[..., Any], *layout: Any) -> None:
        call(*layout)
        used = (block for block, count in enumerate(self.pool.ref_counts) if count)
        self.allocated_ns, self.released_ns = dict.fromkeys(used, self.now()), {}
        self._note_free()

    # ------------------------------------------------------------------ what a view must say

    @property
    def used(self) -> list[int]:
        """Blocks that somebody holds."""
        return [block for block in range(1, self.pool.num_blocks) if self.pool.ref_counts[block]]

    @property
    def cached(self) -> list[int]:
        """Blocks that nobody holds and whose content is known."""
        blocks = range(1, self.pool.num_blocks)
        return [b for b in blocks if not self.pool.ref_counts[b] and self.pool.hashes[b] is not None]

    def gauges(
        self, block_size: int, num_groups: int, num_idle_pinned: int, num_arriving: int
    ) -> dict[Key, float | None]:
        """Return every gauge that each tier has; blocks that are arriving are used and hold nothing yet."""
        used, cached, capacity = self.used, self.cached, self.pool.num_blocks - 1
        found: dict[Key, float | None] = {
            (m.KV_BLOCK_CAPACITY, (self.tier,)): capacity,
            (m.KV_BLOCKS, (self.tier, "", "empty")): capacity - len(used) - len(cached),
            (m.KV_FREE_BLOCKS, (self.tier,)): capacity - len(used) - num_idle_pinned,
            (m.KV_USAGE_RATIO, (self.tier,)): len(used) / capacity,
        }
        for number in range(num_groups):
            found |= self._group(number, used, cached, block_size, num_arriving)
        return found | self._extremes(capacity)

    def _group(
        self, number: int, used: list[int], cached: list[int], size: int, num_arriving: int
    ) -> dict[Key, float | None]:
        """Return what one KV group has of the blocks that are used and cached."""
        pool = self.pool
        mine = [block for block in used if not pool.groups or pool.groups[block] == number]
        held, filled = (len(mine) - num_arriving) * size, sum(pool.filled_slots[block] for block in mine)
        place = (self.tier, str(number))
        return {
            (m.KV_BLOCKS, (*place, "used")): len(mine),
            (m.KV_BLOCKS, (*place, "cached")): sum(not pool.groups or pool.groups[b] == number for b in cached),
            (m.KV_TOKEN_CAPACITY, place): (pool.num_blocks - 1) * size,
            (m.KV_HELD_SLOTS, place): held,
            (m.KV_FILLED_SLOTS, place): filled,
            (m.KV_WASTE_RATIO, place): 1 - filled / held if held else 0.0,
            (m.KV_SHARED_BLOCKS, place): sum(pool.ref_counts[block] > 1 for block in mine),
            (m.KV_SHARING_SAVED_BLOCKS, place): sum(pool.ref_counts[block] - 1 for block in mine),
        }

    def _extremes(self, capacity: int) -> dict[Key, float | None]:
        begin = self.now() - WINDOW_NS
        self.free = [(number, end) for number, end in self.free if end > begin]
        if begin < self.begin_ns:
            return {}
        lowest = min([self.pool.num_free, *(number for number, _ in self.free)])
        return {
            (m.KV_FREE_BLOCKS_MIN, (self.tier, "60s")): lowest,
            (m.KV_USAGE_RATIO_MAX, (self.tier, "60s")): (capacity - lowest) / capacity,
        }


def around(thing: Any, name: str, note: Callable[..., Any]) -> None:
    """Have calls of a method go through `note`, which gets the method first."""
    method = getattr(thing, name)

    @wraps(method)
    def noted(*args: Any, **more: Any) -> Any:
        return note(method, *args, **more)

    setattr(thing, name, noted)
