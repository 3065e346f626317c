"""All places of one rank: every medium and group that its events have named, a bounded number."""

from collections.abc import Iterator
from typing import cast

from kvwatch.sources.place import Place
from kvwatch.telemetry.events.block import Group, Tier
from kvwatch.wire.foreign import MAX_MEDIA, canonical_medium, tier_of

MAX_PLACES = 1_024
"""Pairs of medium and group; more are no engine's."""

_MAX_SPELLINGS = 4 * MAX_MEDIA


class Places:
    """Places by medium and group. Iterating gives them in the order in which they were first named."""

    __slots__ = ("_media", "_places")

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], Place] = {}
        self._media: dict[str | None, str] = {}
        """Spellings of media that were seen."""

    def __iter__(self) -> Iterator[Place]:
        return iter(list(self._places.values()))

    def find(self, medium: str | None, group: int | None) -> Place | None:
        """Return the place that an event names, made if it is new; None if there are too many."""
        name = self._media.get(medium)
        if name is None:
            name = canonical_medium(medium)
            if len(self._media) < _MAX_SPELLINGS:
                self._media[medium] = name
        key = (name, group or 0)
        place = self._places.get(key)
        return place if place is not None else self._make(key)

    def _make(self, key: tuple[str, int]) -> Place | None:
        medium, group = key
        media = {known for known, _ in self._places}
        if len(self._places) >= MAX_PLACES or (medium not in media and len(media) >= MAX_MEDIA):
            return None
        place = Place(cast(Tier, tier_of(medium)), cast(Group, str(group)))
        for other in self._places.values():
            if (other.tier, other.group) == (place.tier, place.group):
                other.siblings.append(place)
                place.siblings.append(other)
        self._places[key] = place
        return place
