"""What moved between tiers, as the worker's jobs say: the part of the metrics' oracle for hosts and disks. No events.

Jobs are noted when they are handed over and when they are taken back; what is held is read between two steps.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pool_oracle import Book, Key, PoolWatch, around

from kvwatch.telemetry import metrics as m
from kvwatch_engine.memory.block_pool import Owner
from kvwatch_engine.memory.tiers.levels import Level
from kvwatch_engine.memory.tiers.tiers import MemoryTiers
from kvwatch_engine.memory.tiers.worker import Job

ALL_OR_NOTHING = ("out", "in")
"""A request of which a block is missing is computed again: what did arrive is of no use, and does not count."""


@dataclass(eq=False)
class Move:
    """One job and what it was begun for."""

    direction: str
    request: str
    tiers: tuple[str, str]
    job: Job
    begun_ns: int
    is_late: bool = False
    is_dropped: bool = False


class TransferWatch:
    """Watches tiers. Attach it before anything moves."""

    def __init__(self, tiers: MemoryTiers, book: Book, now: Callable[[], int], clock: Callable[[], int]) -> None:
        self.tiers = tiers
        self.book = book
        self.now = now
        self.clock = clock
        self.pools: list[PoolWatch] = []
        self.restores: dict[str, list[Move]] = {}
        """The moves of each request's last restore, in order."""
        self._open: dict[Job, Move] = {}
        self._begins = ("", "")
        """Direction and request of what is begun now."""
        around(tiers, "_make", self._make)
        around(tiers, "_make_pool", self._make_pool)
        for name, direction in {"begin_out": "out", "begin_in": "in", "begin_restore": "restore"}.items():
            around(tiers, name, self._beginning(direction))
        for level in tiers._levels:
            self.pools.append(PoolWatch(level.pool, book, now))
        self._attach()

    # ------------------------------------------------------------------ what is noted as it happens

    def _make(self, call: Callable[..., Any], *layout: Any) -> None:
        self.pools.clear()
        call(*layout)
        self._attach()

    def _make_pool(self, call: Callable[..., Any], num_blocks: int, tier: str, ignored: Any) -> Any:
        pool = call(num_blocks, tier, ignored)
        self.pools = [each for each in self.pools if each.tier != tier]
        self.pools.append(PoolWatch(pool, self.book, self.now))
        return pool

    def _attach(self) -> None:
        tiers = self.tiers
        self._open.clear()
        around(tiers._worker, "submit", self._submit)
        around(tiers._worker, "take_ended", self._take_ended)
        around(tiers._desk, "_give_up_late_ones", self._give_up)
        around(tiers._desk, "drop", self._drop)
        around(tiers._offload, "_lose", self._lose)
        around(tiers._restore, "begin", self._begin_restore)
        for level in tiers._levels:
            if level.tier == "host":
                around(level.pool, "allocate", self._allocate_host)

    def _beginning(self, direction: str) -> Callable[..., Any]:
        def begin(call: Callable[..., Any], request: str, *more: Any) -> Any:
            before, self._begins = self._begins, (direction, request)
            if direction == "restore":
                self.restores[request] = []
            try:
                return call(request, *more)
            finally:
                self._begins = before

        return begin

    def _submit(self, call: Callable[..., Any], job: Job) -> None:
        if job.source_keys:
            direction, request = self._begins
            if self.tiers._device not in (job.source, job.target):
                direction, request = "offload", ""  # making room for what is begun evicts
            move = Move(direction, request, self._way(job), job, self.clock())
            self._open[job] = move
            if move.direction == "restore":
                self.restores[request].append(move)
        call(job)

    def _way(self, job: Job) -> tuple[str, str]:
        """Return between which tiers a job moves blocks; staging memory holds what the device has evicted."""
        names = {id(level.store): level.tier for level in self.tiers._levels}
        return names.get(id(job.source), "device"), names.get(id(job.target), "device")

    def _take_ended(self, call: Callable[..., Any]) -> list[Job]:
        ended: list[Job] = call()
        for job in ended:
            move = self._open.pop(job, None)
            if move is not None and not move.is_late:
                self._note_end(move)
        return ended

    def _note_end(self, move: Move) -> None:
        job, direction = move.job, move.direction
        is_whole = job.num_done == len(job.source_keys)
        num_arrived = 0 if move.is_dropped else job.num_done
        if num_arrived and (is_whole or direction not in ALL_OR_NOTHING):
            self.book.add(m.SWAP_BLOCKS, num_arrived, direction)
            self.book.add(m.SWAP_BYTES, num_arrived * self.tiers._block_bytes, direction)
            self.book.observe(m.SWAP_SECONDS, job.duration_ns, direction)
        if num_arrived < len(job.source_keys):
            self.book.add(m.TRANSFER_FAILURES, 1, "dropped" if move.is_dropped else job.reason)

    def _drop(self, call: Callable[..., Any], transfer: Any) -> None:
        self._open[transfer.job].is_dropped = True
        call(transfer)

    def _give_up(self, call: Callable[..., Any]) -> None:
        now, longest = self.clock(), self.tiers._settings.transfer_seconds * 1e9
        late = [each for each in self._open.values() if now - each.begun_ns >= longest and not each.is_dropped]
        call()
        for move in late:
            if not move.is_late and not move.is_dropped:  # others of one restore are dropped with it
                move.is_late = True
                self.book.add(m.TRANSFER_FAILURES, 1, "deadline")

    def _lose(self, call: Callable[..., Any], reason: str, source: str, level: Level, count: int) -> None:
        if count:
            self.book.add(m.TRANSFER_FAILURES, 1, reason)
        call(reason, source, level, count)

    def _begin_restore(self, call: Callable[..., Any], owner: Owner, first_index: int, hits: Any) -> None:
        claims = self.tiers._restore._claims.get(owner, [])
        self.book.add(m.TRANSFER_FAILURES, sum(claim.num_missing > 0 for claim in claims), "missing")
        call(owner, first_index, hits)

    def _allocate_host(self, call: Callable[..., Any], count: int, owner: Any, reason: str, group: int = 0) -> Any:
        blocks = call(count, owner, reason, group)
        if blocks is None and reason == "swap":
            self.book.add(m.TRANSFER_FAILURES, 1, "no_room")
        return blocks

    # ------------------------------------------------------------------ what a view must say

    def num_restored(self, request: str) -> Counter[str]:
        """Return the leading blocks that a request's last restore brought, by tier."""
        found: Counter[str] = Counter()
        for move in self.restores.get(request, []):
            found[move.tiers[0]] += move.job.num_done
            if move.job.num_done < len(move.job.source_keys):
                break
        return found

    @property
    def requests(self) -> set[str]:
        """Whose blocks are on their way; empty text stands for offloads."""
        return {each.request for each in self._open.values() if not each.is_late}

    def num_arriving(self, tier: str) -> int:
        """Return how many blocks of a tier are being written."""
        writing = [each for each in self._open.values() if each.tiers[1] == tier and not each.is_late]
        return sum(len(each.job.source_keys) for each in writing)

    def gauges(self, block_size: int) -> dict[Key, float | None]:
        """Return every gauge of the tiers behind the device, and what is on its way."""
        found: dict[Key, float | None] = {}
        for watch, level in zip(self.pools, self.tiers._levels, strict=True):
            assert watch.pool is level.pool
            found |= watch.gauges(block_size, 1, 0, self.num_arriving(level.tier))
            for reason, number in level.pool.ignored_files.items():
                found[m.KV_TIER_IGNORED_FILES, (level.tier, reason)] = number
        for tier in ("device", *(level.tier for level in self.tiers._levels)):
            moving = [each for each in self._open.values() if tier in each.tiers and not each.is_late]
            found[m.KV_BLOCKS_IN_TRANSFER, (tier,)] = sum(len(each.job.source_keys) for each in moving)
        return found
