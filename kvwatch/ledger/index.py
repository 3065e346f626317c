"""How many hashes are resident in a foreign engine, by tier and group: counts alone, whatever the engine's size.

Which hashes they are is known by the source that turned the engine's own events into these; its snapshots tell it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvwatch.telemetry.events import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    SourceCompleteness,
    SourceGap,
    SourceReset,
)
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

Place = tuple[str, str]
"""Tier and group."""


class IndexCounts:
    """Resident hashes of one foreign engine, counted. Observatory thread only.

    Every event is O(1): a source tells only what really changed, so that a hash that becomes resident was not before.
    `on_fault` is called with a sentence when an event contradicts the counts.
    """

    def __init__(self, snapshot: EngineSnapshot, on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        self._counts: dict[Place, int] = {}
        for state in snapshot.indexed:
            place = (state.tier, state.group)
            self._counts[place] = self._counts.get(place, 0) + len(state.hashes)
        self.is_complete = snapshot.is_complete
        """Whether the counts are the engine's: its history is known from a moment at which its cache was empty."""
        self.handlers: Mapping[type[Event], Callable[[Any], None]] = {
            BlocksStored: self._store,
            BlocksEvicted: self._evict,
            CacheCleared: self._clear,
            SourceReset: self._reset,
            SourceGap: self._miss,
            SourceCompleteness: self._complete,
        }
        """What changes the counts, by event class."""

    @property
    def counts(self) -> Mapping[Place, int]:
        """Resident hashes by tier and group; a place that once held some stays, at 0."""
        return self._counts

    def _store(self, event: BlocksStored) -> None:
        place = (event.tier, event.group)
        self._counts[place] = self._counts.get(place, 0) + len(event.hashes)

    def _evict(self, event: BlocksEvicted) -> None:
        place = (event.tier, event.group)
        left = self._counts.get(place, 0) - len(event.hashes)
        if left < 0:
            self._on_fault(f"{event.tier} group {event.group}: {len(event.hashes)} hashes left, {-left} too many")
        self._counts[place] = max(left, 0)

    def _clear(self, event: CacheCleared) -> None:
        for place in self._counts:
            if place[0] == event.tier:
                self._counts[place] = 0

    def _reset(self, event: SourceReset) -> None:
        self._counts = dict.fromkeys(self._counts, 0)
        self.is_complete = event.is_complete

    def _miss(self, _: SourceGap) -> None:
        self.is_complete = False

    def _complete(self, event: SourceCompleteness) -> None:
        self.is_complete = event.is_complete
