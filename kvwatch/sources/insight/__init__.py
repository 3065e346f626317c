"""What a stream of stores and removals tells beside counts.

- ghosts.py     what was removed and came back: after how long, and how much more room would have kept it
- prefixes.py   which blocks follow which: depth, fan-out, largest shared subtrees
- observer.py   both for a rank, with the lag of its stream, as metrics
- spread.py     a histogram that is filled by hand
"""

from kvwatch.sources.insight.observer import Insight

__all__ = ["make_observer"]


DETAIL_SHARE = 0.75
"""Of the blocks that may be remembered: beyond it the shape of prefixes is given up, so that counts go on."""


def make_observer(max_blocks: int) -> Insight:
    """Return what learns from the transitions of one rank, of which at most `max_blocks` resident ones are counted."""
    return Insight(max_blocks=int(max_blocks * DETAIL_SHARE))
