"""What is resident in a foreign engine, as its events tell it: one rank's mirror.

    wire events ──► Mirror ──real transitions──► EventLog, observer

State is a number of copies by (medium, group, hash). Engines tell a hash once for each block that holds it and take it
back once for each, so only the first store and the last removal change what can be hit; only those become events.

How far the mirror can be trusted is its *history*:

    unknown   joined in the middle: removals of what was never seen are to be expected
    whole     known from a moment at which the cache was empty: the start of the engine, a clear
    broken    was whole, then something was lost; counts may be wrong, contradictions are counted as drift

*Drift* is the number of blocks for which events contradicted a history that is, or was, whole: removals of hashes that
are not resident, and copies beyond what the pool can hold.
"""

import threading
from typing import Literal

from kvwatch.sources.place import Place
from kvwatch.sources.places import Places
from kvwatch.sources.transitions import TransitionObserver, Transitions, tokens_by_block
from kvwatch.telemetry.clock import Clock
from kvwatch.telemetry.events import (
    SourceCompleteness,
    SourceGap,
    SourceReset,
)
from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch.wire.foreign import (
    Cleared,
    ForeignBatch,
    Removed,
    Stored,
    hash_bytes,
)

History = Literal["unknown", "whole", "broken"]
ResetReason = Literal["restart", "sequence", "unknown"]

LOG_CAPACITY = 16_384
"""Events that the log of a foreign rank should keep."""

DEFAULT_MAX_BLOCKS = 4_000_000
"""Resident hashes that are kept, all tiers together; each takes about 150 bytes."""

_FUTURE_SECONDS = 60.0
"""How far an engine's clock may go before ours."""


class Mirror:
    """The mirror of one rank. `snapshot` and reading on any thread; everything that changes it on one.

    Args:
        log: Gets the transitions; a step is a batch.
        clock: For batches that tell no time that can be.
        max_blocks: Resident hashes kept; stores beyond it are left out and break the history.
        observer: Is told of transitions, too.
    """

    def __init__(
        self,
        log: EventLog,
        clock: Clock,
        *,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        observer: TransitionObserver | None = None,
    ) -> None:
        self._log = log
        self._clock = clock
        self._max_blocks = max_blocks
        self._transitions = Transitions(log, observer)
        self._lock = threading.Lock()
        self._places = Places()
        self._touched: set[Place] = set()
        """Places in which something was stored since all were cleared: a clear costs as much as it clears."""
        self._limits: dict[str, int] = {}
        self._time_ns = 0
        self.history: History = "unknown"
        self.block_size = 0
        """Tokens in a block of the device; 0 before it is known."""
        self.num_batches = 0
        self.num_blocks = 0
        """Resident hashes, by medium and group."""
        self.num_unknown_removals = 0
        """Removals of hashes that were not resident, of the whole history or not."""
        self.num_shed = 0
        """Blocks whose store was left out for want of room."""
        self.num_clears = 0
        self._num_drifted = 0

    # ------------------------------------------------------------ reading

    @property
    def is_whole(self) -> bool:
        """Whether the history is whole."""
        return self.history == "whole"

    @property
    def drift_blocks(self) -> int | None:
        """Blocks for which events contradicted the history since it was whole; None while it never was."""
        return None if self.history == "unknown" else self._num_drifted

    def is_resident(self, tier: str, group: str, block_hash: bytes) -> bool:
        """Whether a hash can be hit in a tier and group."""
        return any(
            block_hash in place.stored_at for place in list(self._places) if place.tier == tier and place.group == group
        )

    def num_resident(self, tier: str, group: str) -> int:
        """Count the hashes that can be hit in a tier and group. O(1) unless the tier has several media."""
        places = [p for p in list(self._places) if p.tier == tier and p.group == group]
        if len(places) == 1:
            return len(places[0].stored_at)
        return len({each for place in places for each in place.stored_at})

    def snapshot(self) -> EngineSnapshot:
        """Return what is resident, with the number of the event from which to go on. Any thread; O(blocks)."""
        with self._lock:
            by_tier: dict[tuple[str, str], list[Place]] = {}
            for place in self._places:
                if place.stored_at:
                    by_tier.setdefault((place.tier, place.group), []).append(place)
            return EngineSnapshot(
                seq=self._log.head,
                step=self.num_batches,
                time_ns=self._log.now_ns,
                block_size_tokens=self.block_size,
                block_bytes=0,
                watermark_blocks=0,
                max_queued_requests=0,
                max_queued_tokens=0,
                tiers=[],
                sequences=[],
                requests=[],
                indexed=[Place.to_state(places) for places in by_tier.values()],
                is_foreign=True,
                is_complete=self.is_whole,
            )

    # ------------------------------------------------------------ changing

    def apply(self, batch: ForeignBatch) -> None:
        """Follow one batch. O(its blocks)."""
        with self._lock:
            self._begin_step()
            at_ns = self._advance_time(batch.ts)
            for event in batch.events:
                if isinstance(event, Stored):
                    self._store(event, at_ns)
                elif isinstance(event, Removed):
                    self._remove(event, at_ns)
                else:
                    self._clear(event, at_ns)
            if batch.may_have_lost:
                self._break()

    def lose(self, num_batches: int) -> None:
        """Batches are lost for good: what is resident stays, the history is not whole any more."""
        with self._lock:
            self._begin_step()
            if self._log.active:
                self._log.append(SourceGap(num_batches=num_batches))
            self.history = "broken" if self.history == "whole" else self.history

    def doubt(self) -> None:
        """Nothing was seen to be lost, but it cannot be said that nothing was."""
        with self._lock:
            self._begin_step()
            self._break()

    def reset(self, reason: ResetReason, *, is_whole: bool) -> None:
        """The engine began anew: nothing is resident, and the history is whole from here on, or not."""
        with self._lock:
            self._begin_step()
            for tier in self._occupied_tiers():
                self._transitions.forgotten(tier, self._time_ns)
            self._forget_all()
            self._time_ns = 0
            self.history = "whole" if is_whole else "unknown"
            if self._log.active:
                self._log.append(SourceReset(reason=reason, is_complete=is_whole))

    def confirm(self) -> None:
        """The history is known to be whole after all: all batches from the first on were seen, or none was missed."""
        with self._lock:
            self._begin_step()
            self._make_whole()

    def limit(self, tier: str, num_blocks: int) -> None:
        """Say how many blocks a tier has. More copies cannot be: then stores are told again for blocks that stay.

        Copies beyond the first of each hash are not believed from then on, until everything is cleared.
        """
        with self._lock:
            self._limits[tier] = num_blocks
            self._reconcile(tier)

    # ------------------------------------------------------------ events

    def _store(self, event: Stored, at_ns: int) -> None:
        place = self._places.find(event.medium, event.group_idx)
        if place is None or self.num_blocks + len(event.block_hashes) > self._max_blocks:
            self.num_shed += len(event.block_hashes)
            self._break()
            return
        self._touched.add(place)
        if event.block_size and place.tier == "device":
            self.block_size = event.block_size
        parent = None if event.parent_block_hash is None else hash_bytes(event.parent_block_hash)
        runs = place.store(event.block_hashes, parent, at_ns)
        for first, run, above in runs:
            self.num_blocks += len(run)
            if place.siblings:
                self._tell_stored_beside_siblings(place, run, above, at_ns)
            else:
                self._transitions.stored(place, run, above, at_ns, tokens_by_block(event, first, len(run)))
        if place.num_more and place.tier in self._limits:
            self._reconcile(place.tier)

    def _tell_stored_beside_siblings(self, place: Place, run: list[bytes], parent: bytes | None, at_ns: int) -> None:
        """Tell those of a run that no other medium of the tier holds; each as its own chain, which is always true."""
        for each in run:
            if not place.is_held_by_sibling(each):
                self._transitions.stored(place, [each], parent, at_ns, None)
            parent = each

    def _remove(self, event: Removed, at_ns: int) -> None:
        place = self._places.find(event.medium, event.group_idx)
        if place is None:
            return
        gone, ages_ns, num_unknown = place.remove(event.block_hashes, at_ns)
        self.num_blocks -= len(gone)
        if num_unknown:
            self.num_unknown_removals += num_unknown
            if self.history != "unknown":
                self._num_drifted += num_unknown
        if place.siblings and gone:
            left = [(h, age) for h, age in zip(gone, ages_ns, strict=True) if not place.is_held_by_sibling(h)]
            gone, ages_ns = [h for h, _ in left], [age for _, age in left]
        if gone:
            self._transitions.removed(place, gone, ages_ns, at_ns)

    def _clear(self, _: Cleared, at_ns: int) -> None:
        self.num_clears += 1
        tiers = self._occupied_tiers()
        self._forget_all()
        for tier in tiers:
            self._transitions.cleared(tier, at_ns)
        self._make_whole()

    # ------------------------------------------------------------ parts

    def _begin_step(self) -> None:
        self.num_batches += 1
        self._log.begin(self.num_batches)

    def _advance_time(self, seconds: float | None) -> int:
        """Return the engine's time in ns: it never goes back, nor far before ours."""
        wall_ns = self._clock.wall_ns()
        if seconds is None or not 0 < seconds < wall_ns / 1e9 + _FUTURE_SECONDS:
            self._time_ns = max(self._time_ns, wall_ns)
        else:
            self._time_ns = max(self._time_ns, int(seconds * 1e9))
        return self._time_ns

    def _occupied_tiers(self) -> list[Tier]:
        return sorted({place.tier for place in self._touched if place.stored_at})

    def _forget_all(self) -> None:
        for place in self._touched:
            place.clear()
        self._touched.clear()
        self.num_blocks = 0
        self._num_drifted = 0

    def _make_whole(self) -> None:
        if self.history != "whole":
            self.history = "whole"
            if self._log.active:
                self._log.append(SourceCompleteness(is_complete=True))

    def _break(self) -> None:
        if self.history == "whole":
            self.history = "broken"
            if self._log.active:
                self._log.append(SourceCompleteness(is_complete=False))

    def _reconcile(self, tier: str) -> None:
        places = [place for place in self._places if place.tier == tier]
        if sum(place.num_copies for place in places) <= self._limits[tier]:
            return
        for place in places:
            self._num_drifted += place.disbelieve_copies() if self.history != "unknown" else 0
