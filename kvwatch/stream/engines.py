"""The engines whose events a server offers, and which of them a caller means.

An engine's own process has one, and callers need not name it. A sidecar may have several, which appear one by one.
"""

import asyncio
from collections.abc import Callable, Mapping

from kvwatch.ledger.pace import POLL_SECONDS, next_tick
from kvwatch.stream.codec import StreamError, StructCodec
from kvwatch.stream.contract import Update
from kvwatch.stream.snapshots import Snapshots
from kvwatch.stream.subscription import EncodedEvents, News, Source
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot

Rank = tuple[str, str]
"""Labels `engine` and `dp_rank`."""

MAX_NAMES = 8
"""Engines that an error lists."""


class StreamedEngines:
    """Engines by name and rank. Observatory's loop only, except that the first may be added before it runs.

    Args:
        period_seconds: How often their logs are looked at.
    """

    def __init__(self, period_seconds: float = POLL_SECONDS) -> None:
        self._period_seconds = period_seconds
        self._sources: dict[Rank, Source] = {}
        self._updates = StructCodec(Update)

    def add(
        self, log: EventLog, take_snapshot: Callable[[float], EngineSnapshot], labels: Mapping[str, str], epoch: str
    ) -> None:
        """Offer one more engine.

        Args:
            log: Its events.
            take_snapshot: Gives its state, with a timeout in seconds.
            labels: Its labels in all metrics; told to subscribers.
            epoch: Names this run of the log.
        """
        rank = (labels.get("engine", ""), labels.get("dp_rank", "0"))
        self._sources[rank] = Source(
            log=log,
            epoch=epoch,
            labels=labels,
            snapshots=Snapshots(take_snapshot),
            news=News(log),
            encoded=EncodedEvents(),
            encoded_with_token_ids=EncodedEvents(with_token_ids=True),
            updates=self._updates,
        )

    def find(self, engine: str, dp_rank: int | None) -> Source:
        """Return the engine that is meant; what is left open must leave no choice.

        Raises:
            StreamError: there is no such engine, or several.
        """
        found = [
            source
            for (name, rank), source in self._sources.items()
            if engine in {"", name} and dp_rank in {None, int(rank)}
        ]
        if len(found) == 1:
            return found[0]
        if not self._sources:
            raise StreamError("no engine was reached yet; connect again later")
        known = [f"{name} (dp_rank {rank})" for name, rank in self._sources]
        listed = ", ".join(known[:MAX_NAMES]) + (", ..." if len(known) > MAX_NAMES else "")
        if found:
            raise StreamError(f"several engines are offered here; name one of them with engine and dp_rank: {listed}")
        wanted = engine + ("" if dp_rank is None else f" (dp_rank {dp_rank})")
        raise StreamError(f"engine {wanted} is not offered here; offered: {listed}")

    async def run(self, stop: asyncio.Event) -> None:
        """Look at all logs until `stop` is set, then wake everybody who waits for events."""
        while not stop.is_set():
            await next_tick(self._period_seconds)
            for source in self._sources.values():
                source.news.look()
        for source in self._sources.values():
            source.news.end()
