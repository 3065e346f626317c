"""What can be learnt of a remote kvwatch engine's cache from which hashes come and go, beside what its events count.

The same as of a foreign engine: premature evictions, the shape of shared prefixes, the lag of the stream.
"""

from collections.abc import Iterable

from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.insight.observer import Insight
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.events import BlocksEvicted, BlocksLaidOut, BlocksStored, CacheCleared
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

_OF_PREFIXES = {m.KV_PREFIX_ROOTS, m.KV_PREFIX_BRANCHES, m.KV_PREFIX_FAN_OUT_MAX, m.KV_PREFIX_DEPTH_MAX}


class RemoteInsight:
    """Follows one engine. Changed on one thread; `samples` on any."""

    def __init__(self) -> None:
        self._insight = Insight()
        self._unknown: set[str] = set()
        """Tiers that held hashes before anybody looked: a snapshot does not tell which follows which."""

    def load(self, snapshot: EngineSnapshot) -> None:
        """Begin anew from a state; what happened before it is forgotten."""
        for tier in snapshot.tiers:
            self._insight.on_cleared(tier.tier, snapshot.time_ns)
        self._unknown = {tier.tier for tier in snapshot.tiers if any(each is not None for each in tier.hashes)}

    def apply(self, event: Event) -> None:
        """Follow one event. O(blocks of the event)."""
        if isinstance(event, BlocksStored):
            for hashes, parent in _chains(event):
                self._insight.on_stored(event.tier, event.group, hashes, parent, event.time_ns, None)
        elif isinstance(event, BlocksEvicted):
            if event.reason != "reset":  # the CacheCleared that follows says all of it
                self._insight.on_removed(event.tier, event.group, event.hashes, event.ages_ns, event.time_ns)
        elif isinstance(event, CacheCleared | BlocksLaidOut):
            self._insight.on_cleared(event.tier, event.time_ns)
            self._unknown.discard(event.tier)

    def note_lag(self, lag_ns: int) -> None:
        """Events came so long after they happened."""
        self._insight.on_lag(lag_ns)

    def samples(self) -> Iterable[Sample | HistogramSample]:
        """Return what is known: shapes of prefixes only where all of them are. Any thread."""
        unknown = self._unknown
        return [
            sample
            for sample in self._insight.samples()
            if sample.metric not in _OF_PREFIXES or sample.labels[0] not in unknown
        ]


def _chains(event: BlocksStored) -> list[tuple[list[bytes], bytes | None]]:
    """Return blocks that follow each other, and what the first of them follows; those of other tiers one by one."""
    if event.parents is None:
        return [(event.hashes, event.parent)]
    return [([content], parent or None) for content, parent in zip(event.hashes, event.parents, strict=True)]
