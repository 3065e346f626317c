"""The source of a vLLM or an SGLang: finds its publishers and keeps following them, for ever.

Discovery and the scraper of `/metrics` may fail as long as they like: what was found before is followed on. Addresses
are asked for again while a rank is not connected, since a restarted engine may publish elsewhere.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Protocol

import zmq
import zmq.asyncio

from kvwatch.errors import KVWatchError
from kvwatch.ledger.view import HistogramSample, Sample
from kvwatch.sources.complaints import Complaints
from kvwatch.sources.discovery import MAX_RANKS, Discovered
from kvwatch.sources.endpoints import Target
from kvwatch.sources.engine_http import EngineHTTP
from kvwatch.sources.engines import EngineSpec
from kvwatch.sources.foreign_rank import ForeignRank, RankObserver
from kvwatch.sources.source import FOREIGN_FEEDS, Rank
from kvwatch.sources.who_binds import Listener, bound, who_listens
from kvwatch.telemetry.clock import SystemClock

FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 3.0
"""An engine takes minutes to start; asking it this often costs nothing and finds it soon."""

LOOK_AGAIN_SECONDS = 60.0
"""While all ranks are connected."""

SOCKETS_PER_RANK = 4
"""Of ZeroMQ: live events, two ends of what watches their connection, replays."""

MAX_NAME_LETTERS = 256
"""Of a model's name: it stands in every series."""

Discover = Callable[[EngineHTTP], Awaitable[Discovered]]
"""Asks an engine where it publishes. Raises KVWatchError."""


class Scraper(Protocol):
    """Reads an engine's `/metrics`."""

    @property
    def is_up(self) -> bool:
        """Whether the last scrape succeeded."""
        ...

    @property
    def model_name(self) -> str:
        """Name of the model as the metrics say it; empty while it is not known."""
        ...

    async def run(self, stop: asyncio.Event) -> None:
        """Scrape until `stop` is set."""
        ...

    def samples(self, dp_rank: int) -> Iterable[Sample | HistogramSample]:
        """Return a rank's metrics. Any thread."""
        ...

    def capacity(self, dp_rank: int) -> int | None:
        """Return the blocks of a rank's pool on the device; None while the engine has not said it."""
        ...


class ForeignSource:
    """One engine of another make. Event loop only, but for properties and samples.

    Args:
        spec: The engine, as configured.
        discover: Asks it where it publishes.
        given: Where it publishes, as configured; nothing is asked then, but its name.
        scraper: Reads its metrics.
        make_observer: Makes what learns from a rank's transitions.
    """

    def __init__(
        self,
        spec: EngineSpec,
        discover: Discover,
        *,
        given: tuple[Target, ...] | None = None,
        scraper: Scraper | None = None,
        make_observer: Callable[[], RankObserver] | None = None,
    ) -> None:
        self._spec = spec
        self._discover = discover
        self._given = given
        self._scraper = scraper
        self._make_observer = make_observer
        self._clock = SystemClock()
        self._complaints = Complaints(engine=spec.name)
        self._ranks: dict[int, ForeignRank] = {}
        self._is_reached = False
        self._model_name = ""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self._spec.name

    @property
    def model_name(self) -> str:
        """Name of the model; empty while it is not known."""
        name = self._model_name or (self._scraper.model_name if self._scraper is not None else "")
        return name[:MAX_NAME_LETTERS]

    @property
    def is_up(self) -> bool:
        """Whether the engine answers, or a publisher of it is connected."""
        return self._is_reached_somehow() or any(rank.is_up() for rank in list(self._ranks.values()))

    async def run(self, stop: asyncio.Event, on_rank: Callable[[Rank], None]) -> None:
        """Follow the engine until `stop` is set."""
        context = zmq.asyncio.Context()
        context.set(zmq.MAX_SOCKETS, SOCKETS_PER_RANK * (MAX_RANKS + 1))
        http = EngineHTTP(self._spec)
        scraping = None if self._scraper is None else asyncio.create_task(self._scrape(self._scraper, stop))
        try:
            if self._given is not None:
                await self._follow(self._given, context, on_rank)
            retry_seconds = FIRST_RETRY_SECONDS
            while not stop.is_set():
                was_found = await self._look_whatever_comes(http, context, on_rank)
                if was_found and self._are_all_up():
                    await self._pause_while_all_are_up(stop)
                    retry_seconds = FIRST_RETRY_SECONDS
                else:
                    await _pause(stop, retry_seconds)
                    retry_seconds = min(2 * retry_seconds, MAX_RETRY_SECONDS)
        finally:
            for rank in self._ranks.values():
                await rank.stop()
            if scraping is not None:
                scraping.cancel()
                await asyncio.gather(scraping, return_exceptions=True)
            await http.close()
            context.destroy(0)

    # ------------------------------------------------------------ parts

    def _are_all_up(self) -> bool:
        return all(rank.is_up() for rank in self._ranks.values())

    async def _pause_while_all_are_up(self, stop: asyncio.Event) -> None:
        due = time.monotonic() + LOOK_AGAIN_SECONDS
        while time.monotonic() < due and not stop.is_set() and self._are_all_up():
            await _pause(stop, FIRST_RETRY_SECONDS)

    async def _look_whatever_comes(
        self, http: EngineHTTP, context: zmq.asyncio.Context, on_rank: Callable[[Rank], None]
    ) -> bool:
        """Do what is to be done from time to time; a defect in it must not end the source."""
        try:
            was_found = await self._look(http, context, on_rank)
            self._limit()
        except Exception as error:
            self._complaints.warn("following an engine failed; trying again", error=repr(error))
            return False
        return was_found

    async def _look(self, http: EngineHTTP, context: zmq.asyncio.Context, on_rank: Callable[[Rank], None]) -> bool:
        """Ask the engine and follow what it says; return whether it answered."""
        try:
            found = await self._discover(http)
        except KVWatchError as error:
            self._is_reached = False
            self._complaints.warn("an engine does not say where it publishes KV events; asking on", error=str(error))
            if self._given is not None:
                await self._follow(self._given, context, on_rank)
            await self._let_go()
            return False
        except Exception as error:  # a defect: what was found before is followed on
            self._complaints.warn("asking an engine failed", error=repr(error))
            return False
        self._is_reached = True
        self._model_name = found.model_name or self._model_name
        targets = found.targets if self._given is None else self._given
        if not targets:
            self._complaints.warn(
                "an engine publishes no KV events: only its metrics are shown; start it with KV events, or name their "
                "address with the option kv_events"
            )
            self._rank(0, on_rank)
        await self._follow(targets, context, on_rank)
        return True

    async def _follow(
        self, targets: Iterable[Target], context: zmq.asyncio.Context, on_rank: Callable[[Rank], None]
    ) -> None:
        for target in targets:
            if target.dp_rank not in self._ranks and len(self._ranks) >= MAX_RANKS:
                self._complaints.warn(f"an engine has named more than {MAX_RANKS} ranks; further ones are not followed")
                return
            rank = self._rank(target.dp_rank, on_rank)
            await rank.follow(await self._settled(rank, target), context)

    async def _settled(self, rank: ForeignRank, target: Target) -> Target:
        """Return a target of which it is decided who binds it."""
        if not target.may_be_bound:
            return target
        if rank.target == bound(target) or (rank.target == target and rank.is_up()):
            return rank.target
        listener = await who_listens(target)
        if listener is Listener.NOT_HERE:
            self._complaints.warn(
                "an engine connects its KV events to an address that is not of this machine, so that they do not come "
                "here; have it publish at tcp://*:PORT, or run the sidecar where that address is",
                address=target.live,
            )
        return bound(target) if listener is Listener.NOBODY else target

    async def _let_go(self) -> None:
        """Unbind what was bound on trial: an engine that starts anew, and binds it itself now, must be able to."""
        for rank in self._ranks.values():
            if rank.target is not None and rank.target.may_be_bound and rank.target.is_bound and not rank.is_up():
                await rank.stop()

    def _rank(self, dp_rank: int, on_rank: Callable[[Rank], None]) -> ForeignRank:
        known = self._ranks.get(dp_rank)
        if known is not None:
            return known
        rank = ForeignRank(
            dp_rank,
            spec=self._spec,
            clock=self._clock,
            observer=None if self._make_observer is None else self._make_observer(),
            is_reached=self._is_reached_somehow,
        )
        self._ranks[dp_rank] = rank
        on_rank(
            Rank(
                dp_rank=dp_rank,
                log=rank.log,
                control=rank.control,
                samples=lambda: self._samples(rank),
                feeds=FOREIGN_FEEDS,
                is_up=rank.is_up,
                block_size=lambda: rank.mirror.block_size,
            )
        )
        return rank

    def _limit(self) -> None:
        """Tell the mirrors what the engine's metrics say of its pools."""
        for rank in self._ranks.values():
            num_blocks = None if self._scraper is None else self._scraper.capacity(rank.dp_rank)
            if num_blocks:
                rank.mirror.limit("device", num_blocks)

    def _samples(self, rank: ForeignRank) -> list[Sample | HistogramSample]:
        scraped = () if self._scraper is None else self._scraper.samples(rank.dp_rank)
        # What both know, such as the size of a block, the engine's own page says.
        by_series = {(sample.metric, sample.labels): sample for sample in (*rank.samples(), *scraped)}
        return list(by_series.values())

    def _is_reached_somehow(self) -> bool:
        return self._is_reached or (self._scraper is not None and self._scraper.is_up)

    async def _scrape(self, scraper: Scraper, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await scraper.run(stop)
            except Exception as error:  # a defect in what reads metrics must not cost the events
                self._complaints.warn("reading an engine's metrics failed; trying again", error=repr(error))
            await _pause(stop, MAX_RETRY_SECONDS)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
