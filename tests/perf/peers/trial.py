"""One trial: one load on one running side, and its figures. The client is that of `kvwatch bench`, for all sides."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Sequence

import httpx
import msgspec
import psutil
from peers.loads import Load, Words
from peers.servers import ServerFailed
from peers.stage import RunningSide

from kvwatch.bench.client import Client, make_http
from kvwatch.bench.connections import Connections
from kvwatch.bench.outcome import RequestOutcome
from kvwatch.bench.runner import Run
from kvwatch.bench.scenarios import RequestSpec
from kvwatch.bench.statistics import Quantiles, quantiles

TRIAL_SECONDS = 900.0
"""No request of a trial begins later, and none may take longer; a side that needs more has failed."""
SCRAPE_SECONDS = 1.0
_WARM_UP_SEED = -1
_WARM_UP_OUTPUT_TOKENS = 8
_WAKE = Load("wake", 32, 4, concurrency=1, num_requests=1)
"""Brings the memory and the threads of a side back that was frozen."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial gave. Times are the client's, in seconds."""

    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    cached_tokens: int | None
    """Prompt tokens that came from the prefix cache; None where the server does not say."""
    ttft: Quantiles
    itl: Quantiles
    client_cpu_ratio: float
    """Part of one core that the client took."""
    busy_percent: float
    """What all others took of the processor meanwhile, in percent of all cores; what a hypervisor took counts."""


def run_trial(side: RunningSide, load: Load, words: Words, round_number: int) -> Figures:
    """Thaw a side, put it under a load, freeze it; return the figures.

    Raises:
        ServerFailed: a request was not answered as asked.
    """
    wake, specs = words.requests(_WAKE, round_number), words.requests(load, round_number)
    with side.thawed():
        asyncio.run(_ask(side, wake, 1))
        before = _Spent.now(side)
        run = asyncio.run(_ask(side, specs, load.concurrency))
        spent = _Spent.now(side).since(before)
    return _figures(side, load, run, spent)


def warm_up(side: RunningSide, load: Load, words: Words) -> None:
    """Show a side the shapes of a load before it is measured, with texts that are never asked again.

    Raises:
        ServerFailed: a request was not answered as asked.
    """
    first = dataclasses.replace(load, num_requests=load.concurrency, num_output_tokens=_WARM_UP_OUTPUT_TOKENS)
    with side.thawed():
        run = asyncio.run(_ask(side, words.requests(first, _WARM_UP_SEED), first.concurrency))
    _check(side, first, run)


@dataclasses.dataclass(frozen=True)
class _Spent:
    """Seconds of processor time: of this client, of the side, of everybody; and of the clock, on all cores."""

    client: float
    side: float
    everybody: float
    clock: float

    @classmethod
    def now(cls, side: RunningSide) -> "_Spent":
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # A virtual machine's guests are counted as user time already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return cls(time.process_time(), side.cpu_seconds(), total - idle, time.perf_counter() * (os.cpu_count() or 1))

    def since(self, before: "_Spent") -> "_Spent":
        return _Spent(
            *(now - then for now, then in zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True))
        )

    @property
    def busy_percent(self) -> float:
        return max(0.0, 100 * (self.everybody - self.client - self.side) / self.clock)


async def _ask(side: RunningSide, specs: Sequence[RequestSpec], concurrency: int) -> Run:
    """Send all requests."""
    async with make_http(None, None) as http, Connections(side.url) as connections:
        client = Client(connections, side.side.dialect, request_timeout_seconds=TRIAL_SECONDS)
        run = Run(client, specs, concurrency, max_seconds=TRIAL_SECONDS)
        await run.run([_Scraper(http, side.url).run] if side.side.has_metrics else [])
        return run


class _Scraper:
    """Reads a page of metrics as Prometheus would, only more often."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = f"{url}/metrics"

    async def run(self, _now: Callable[[], float]) -> None:
        """Read it until it is cancelled."""
        while True:
            (await self._http.get(self._url)).raise_for_status()
            await asyncio.sleep(SCRAPE_SECONDS)


def _check(side: RunningSide, load: Load, run: Run) -> None:
    """Refuse a run in which not exactly what was asked was done.

    Raises:
        ServerFailed: a request failed, or its prompt or answer has another length.
        KeyboardInterrupt: the user broke it off.
    """
    if run.is_interrupted:
        raise KeyboardInterrupt
    if len(run.outcomes) < load.num_requests:
        raise ServerFailed(f"{side.name} did not get {load.name} done within {TRIAL_SECONDS:.0f} s")
    for outcome in run.outcomes:
        if outcome.status != "ok":
            words = f"{outcome.error_kind}: {outcome.error}"
            raise ServerFailed(f"{side.name} failed a request of {load.name} ({words}); its log ends {side.log_tail()}")
        counts = (outcome.prompt_tokens, outcome.output_tokens)
        if counts != (load.num_prompt_tokens, load.num_output_tokens):
            raise ServerFailed(
                f"{side.name} counted {counts[0]} tokens in and {counts[1]} out on {load.name}; "
                f"asked were {load.num_prompt_tokens} and {load.num_output_tokens}"
            )


def _figures(side: RunningSide, load: Load, run: Run, spent: _Spent) -> Figures:
    _check(side, load, run)
    ttft = quantiles(outcome.ttft_seconds for outcome in run.outcomes if outcome.ttft_seconds is not None)
    itl = quantiles(gap for outcome in run.outcomes for gap in outcome.gaps)
    if ttft is None or itl is None:
        raise ServerFailed(f"{side.name} sent no text on {load.name}, so that nothing can be timed")
    num_tokens = load.num_requests * load.num_output_tokens
    return Figures(
        seconds=run.duration_seconds,
        output_tokens=num_tokens,
        output_tokens_per_second=num_tokens / run.duration_seconds,
        cached_tokens=_cached(run.outcomes),
        ttft=ttft,
        itl=itl,
        client_cpu_ratio=spent.client / run.duration_seconds,
        busy_percent=spent.busy_percent,
    )


def _cached(outcomes: Sequence[RequestOutcome]) -> int | None:
    known = [outcome.cached_tokens for outcome in outcomes if outcome.cached_tokens is not None]
    return sum(known) if known else None
