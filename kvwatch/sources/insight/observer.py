"""Everything that is learnt from the transitions of one rank, as metrics."""

import time
from collections.abc import Iterable, Sequence

from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.insight.ghosts import DEFAULT_MAX_GHOSTS, Ghosts
from kvwatch.sources.insight.prefixes import DEFAULT_MAX_BLOCKS, PrefixForest, Shape
from kvwatch.sources.insight.spread import Spread
from kvwatch.telemetry import metrics as m

NS = 1e-9
LOOK_SECONDS = 5.0
"""Shapes are found at most this often ..."""

LOOK_SHARE = 0.01
"""... and take at most this share of a core."""
MAX_PLACES = 64
"""Pairs of tier and group of which prefixes are followed."""

MAX_FULL_PLACES, FEWER_GHOSTS = 8, 8_192
"""So many places remember `DEFAULT_MAX_GHOSTS` removals, some 25 MB each; further ones no more than these."""


class Insight:
    """Observer of a mirror. What changes it comes from one thread, with the mirror's lock held; reading on any.

    Args:
        look_seconds: Least time between two looks at the shape of prefixes; gauges of it are as old at most, or older
            while the cache is so large that a look takes long.
        max_blocks: Most resident blocks of a place of which the prefixes are followed. Beyond it their shape is given
            up until the place is cleared.
    """

    def __init__(self, look_seconds: float = LOOK_SECONDS, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._look_seconds = look_seconds
        self._max_blocks = max_blocks
        self._shapes: dict[tuple[str, str], tuple[Shape, float]] = {}
        """Newest shapes, and the time at which a look is due again."""
        self._forests: dict[tuple[str, str], PrefixForest] = {}
        self._ghosts: dict[tuple[str, str], Ghosts] = {}
        self._away: dict[str, Spread] = {}
        self._extra: dict[str, Spread] = {}
        self._lag = Spread(m.SOURCE_LAG, ())

    # ------------------------------------------------------------ what happens

    def on_stored(
        self,
        tier: str,
        group: str,
        hashes: Sequence[bytes],
        parent: bytes | None,
        at_ns: int,
        token_ids: list[list[int]] | None,  # noqa: ARG002 - tokens tell nothing that the chain does not
    ) -> None:
        """Hashes became resident."""
        place = (tier, group)
        if not self._knows(place):
            return
        self._forests[place].store(hashes, parent)
        ghosts = self._ghosts[place]
        if not len(ghosts):
            return
        for content in hashes:
            found = ghosts.store(content, at_ns)
            if found is not None:
                self._away[tier].observe(found.away_ns * NS)
                self._extra[tier].observe(found.num_extra_blocks)

    def on_removed(
        self,
        tier: str,
        group: str,
        hashes: Sequence[bytes],
        ages_ns: Sequence[int],  # noqa: ARG002 - the events tell them
        at_ns: int,
    ) -> None:
        """The last copies of hashes are gone."""
        place = (tier, group)
        if not self._knows(place):
            return
        self._forests[place].remove(hashes)
        ghosts = self._ghosts[place]
        for content in hashes:
            ghosts.remove(content, at_ns)

    def on_cleared(self, tier: str, at_ns: int) -> None:  # noqa: ARG002 - part of the protocol
        """Nothing is resident in a tier any more."""
        for place, forest in self._forests.items():
            if place[0] == tier:
                forest.clear()
                self._ghosts[place].clear()

    def on_lag(self, lag_ns: int) -> None:
        """A live batch came so long after it was made."""
        self._lag.observe(max(0, lag_ns) * NS)

    # ------------------------------------------------------------ what it says

    def samples(self) -> Iterable[Sample | HistogramSample]:
        """Return its metrics. Any thread."""
        found: list[Sample | HistogramSample] = [self._lag.sample()]
        for (tier, group), forest in list(self._forests.items()):
            if forest.num_left_out:
                continue  # not whole: too small a number would be no truth
            shape = self.shape(tier, group)
            found += [
                Sample(m.KV_PREFIX_ROOTS, (tier, group), shape.num_roots),
                Sample(m.KV_PREFIX_BRANCHES, (tier, group), shape.num_branches),
                Sample(m.KV_PREFIX_FAN_OUT_MAX, (tier, group), shape.max_fan_out),
                Sample(m.KV_PREFIX_DEPTH_MAX, (tier, group), shape.max_depth),
            ]
        found += [spread.sample() for spreads in (self._away, self._extra) for spread in list(spreads.values())]
        return found

    def shape(self, tier: str, group: str) -> Shape:
        """Return how the prefixes of a tier and group hang together, of now or of the last look. Any thread."""
        place = (tier, group)
        forest = self._forests.get(place)
        if forest is None:
            return Shape()
        shape, due = self._shapes.get(place, (Shape(), 0.0))
        started = time.monotonic()
        if started >= due:
            shape = forest.shape()
            ended = time.monotonic()
            self._shapes[place] = (shape, ended + max(self._look_seconds, (ended - started) / LOOK_SHARE))
        return shape

    def _knows(self, place: tuple[str, str]) -> bool:
        """Whether a place is followed; it is from its first transition on."""
        if place in self._forests:
            return True
        if len(self._forests) >= MAX_PLACES:
            return False
        max_ghosts = DEFAULT_MAX_GHOSTS if len(self._forests) < MAX_FULL_PLACES else FEWER_GHOSTS
        self._forests[place], self._ghosts[place] = PrefixForest(self._max_blocks), Ghosts(max_ghosts)
        tier = place[0]
        self._away.setdefault(tier, Spread(m.KV_PREMATURE_EVICTION_AWAY, (tier,)))
        self._extra.setdefault(tier, Spread(m.KV_PREMATURE_EVICTION_EXTRA, (tier,)))
        return True
