"""Tells what became resident and what is gone: to the log as events, and to an observer."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvwatch.sources.place import Place
from kvwatch.telemetry.events import BlocksEvicted, BlocksStored, CacheCleared
from kvwatch.telemetry.events.block import Tier
from kvwatch.telemetry.log import EventLog
from kvwatch.wire.foreign import Stored

MAX_BLOCKS_PER_EVENT = 64
"""With the log's capacity this bounds its memory, however many blocks the engine tells at once."""


class TransitionObserver(Protocol):
    """Is told of every transition, in order, with the mirror's lock held: it must be quick and may not raise."""

    def on_stored(
        self,
        tier: str,
        group: str,
        hashes: Sequence[bytes],
        parent: bytes | None,
        at_ns: int,
        token_ids: list[list[int]] | None,
    ) -> None:
        """Hashes became resident: a chain, whose first one follows `parent`. `at_ns` is the engine's Unix time."""
        ...

    def on_removed(self, tier: str, group: str, hashes: Sequence[bytes], ages_ns: Sequence[int], at_ns: int) -> None:
        """The last copies of hashes are gone; `ages_ns` since each became resident."""
        ...

    def on_cleared(self, tier: str, at_ns: int) -> None:
        """Nothing is resident in a tier any more."""
        ...


class Transitions:
    """Who is told of transitions. With the mirror's lock held."""

    __slots__ = ("_log", "_observer")

    def __init__(self, log: EventLog, observer: TransitionObserver | None) -> None:
        self._log = log
        self._observer = observer

    def stored(
        self, place: Place, run: list[bytes], parent: bytes | None, at_ns: int, token_ids: list[list[int]] | None
    ) -> None:
        """A chain became resident, whose first hash follows `parent`."""
        if self._observer is not None:
            self._observer.on_stored(place.tier, place.group, run, parent, at_ns, token_ids)
        if not self._log.active:
            return
        for start in range(0, len(run), MAX_BLOCKS_PER_EVENT):
            stop = start + MAX_BLOCKS_PER_EVENT
            self._log.append(
                BlocksStored(
                    hashes=run[start:stop],
                    block_ids=[],
                    parent=run[start - 1] if start else parent,
                    tier=place.tier,
                    group=place.group,
                    token_ids=None if token_ids is None else token_ids[start:stop],
                )
            )

    def removed(self, place: Place, gone: list[bytes], ages_ns: list[int], at_ns: int) -> None:
        """The last copies of hashes are gone."""
        if self._observer is not None:
            self._observer.on_removed(place.tier, place.group, gone, ages_ns, at_ns)
        if not self._log.active:
            return
        for start in range(0, len(gone), MAX_BLOCKS_PER_EVENT):
            stop = start + MAX_BLOCKS_PER_EVENT
            self._log.append(
                BlocksEvicted(
                    hashes=gone[start:stop],
                    block_ids=[],
                    ages_ns=ages_ns[start:stop],
                    idles_ns=[],
                    hits=[],
                    reason="removed",
                    request="",
                    tier=place.tier,
                    group=place.group,
                )
            )

    def cleared(self, tier: Tier, at_ns: int) -> None:
        """The engine says that nothing is resident in a tier any more."""
        self.forgotten(tier, at_ns)
        if self._log.active:
            self._log.append(CacheCleared(block_ids=[], tier=tier))

    def forgotten(self, tier: Tier, at_ns: int) -> None:
        """Nothing is known of a tier any more, which another event tells."""
        if self._observer is not None:
            self._observer.on_cleared(tier, at_ns)


def tokens_by_block(event: Stored, first: int, num_blocks: int) -> list[list[int]] | None:
    """Return the tokens of each block of a run, if the event says them for every block."""
    tokens: list[Any] | None = getattr(event, "token_ids", None)
    size = event.block_size
    if not tokens or size <= 0 or len(tokens) != size * len(event.block_hashes):
        return None
    if not all(type(token) is int for token in tokens):
        return None
    starts = range(first * size, (first + num_blocks) * size, size)
    return [tokens[start : start + size] for start in starts]
