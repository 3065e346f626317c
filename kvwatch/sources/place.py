"""The hashes that one medium holds in one KV group, with the number of copies of each.

A million of them is usual, so a hash costs one entry of a dictionary: the time at which it was stored, which all hashes
of a batch share. Copies beyond the first are rare and have a dictionary of their own.
"""

from collections.abc import Sequence

from kvwatch.telemetry.events.block import Group, Tier
from kvwatch.telemetry.snapshot import IndexState
from kvwatch.wire.foreign import hash_bytes
from kvwatch.wire.kv_events import WireHash

Run = tuple[int, list[bytes], bytes | None]
"""Hashes that became resident, one after the other: index of the first in its event, hashes, parent of the first."""


class Place:
    """One medium and group. Not locked: see `Mirror`."""

    __slots__ = ("_believes_copies", "_more_copies", "group", "num_more", "siblings", "stored_at", "tier")

    def __init__(self, tier: Tier, group: Group) -> None:
        self.tier = tier
        self.group = group
        self.stored_at: dict[bytes, int] = {}
        """For each resident hash: the engine's Unix time in ns at which it became resident."""
        self.siblings: list[Place] = []
        """Other media of the same tier and group."""
        self.num_more = 0
        """Copies beyond the first of each hash."""
        self._more_copies: dict[bytes, int] = {}
        self._believes_copies = True

    @property
    def num_copies(self) -> int:
        """All copies of all hashes."""
        return len(self.stored_at) + self.num_more

    def store(self, hashes: Sequence[WireHash], parent: bytes | None, at_ns: int) -> list[Run]:
        """One more copy of each hash; return the runs that became resident. A run ends where a hash already was."""
        stored_at = self.stored_at
        runs: list[Run] = []
        run: list[bytes] = []
        for index, each in enumerate(hashes):
            key = hash_bytes(each)
            if key in stored_at:
                if self._believes_copies:
                    self._more_copies[key] = self._more_copies.get(key, 0) + 1
                    self.num_more += 1
                run = []
            else:
                stored_at[key] = at_ns
                if not run:
                    runs.append((index, run, parent))
                run.append(key)
            parent = key
        return runs

    def remove(self, hashes: Sequence[WireHash], at_ns: int) -> tuple[list[bytes], list[int], int]:
        """One copy less of each hash; return those of which none is left, their ages in ns, and how many had none."""
        stored_at, more = self.stored_at, self._more_copies
        gone: list[bytes] = []
        ages_ns: list[int] = []
        num_unknown = 0
        for each in hashes:
            key = hash_bytes(each)
            if more and key in more:
                self.num_more -= 1
                if more[key] == 1:
                    del more[key]
                else:
                    more[key] -= 1
                continue
            since_ns = stored_at.pop(key, None)
            if since_ns is None:
                num_unknown += 1
            else:
                gone.append(key)
                ages_ns.append(at_ns - since_ns)
        return gone, ages_ns, num_unknown

    def is_held_by_sibling(self, key: bytes) -> bool:
        """Whether another medium of the tier holds it."""
        return any(key in sibling.stored_at for sibling in self.siblings)

    def clear(self) -> None:
        """Nothing is held any more."""
        self.stored_at = {}  # not `.clear()`: the old one may be large, and nobody else has it
        self._more_copies = {}
        self.num_more = 0
        self._believes_copies = True

    def disbelieve_copies(self) -> int:
        """Take each hash to be there once until all is cleared; return how many copies were dropped."""
        dropped, self.num_more = self.num_more, 0
        self._more_copies.clear()
        self._believes_copies = False
        return dropped

    @staticmethod
    def to_state(places: "Sequence[Place]") -> IndexState:
        """Return what places of one tier and group hold together, in the form of a snapshot."""
        first = places[0]
        if len(places) == 1:
            hashes = list(first.stored_at)
            counts = [1] * len(hashes)
            if first._more_copies:
                counts = [1 + first._more_copies.get(each, 0) for each in hashes]
            return IndexState(first.tier, first.group, hashes, counts)
        totals: dict[bytes, int] = {}
        for place in places:
            for each in place.stored_at:
                totals[each] = totals.get(each, 0) + 1 + place._more_copies.get(each, 0)
        return IndexState(first.tier, first.group, list(totals), list(totals.values()))
