"""When those who look at the log look: all at the same moments.

Waking up costs more than most batches take to apply: the interpreter has to be taken from the engine for it. So nobody
sleeps for a while of their own; all sleep until the loop's clock is a multiple of the period, and wake up together.
"""

import asyncio
import contextlib

POLL_SECONDS = 1.0
"""How often the log is looked at: one wake-up a second, whoever follows it. The engine wakes nobody.

Each wake-up finds the processor's caches full of the model's weights: it costs about a millisecond, however few events
there are. The metrics page is rendered once a second; a reader of the stream sees events within a second."""

BESIDE_SECONDS = 0.1
"""The same in a process of its own, which takes the processor from no engine: a replay brings a hundred thousand events
a second, and the log must hold what comes between two looks."""


async def next_tick(period_seconds: float = POLL_SECONDS) -> None:
    """Sleep until the clock of the running loop is the next multiple of `period_seconds`."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()
    timer = loop.call_at(next_tick_at(loop.time(), period_seconds), _wake, woken)
    try:
        await woken
    finally:
        timer.cancel()


async def pause(stop: asyncio.Event, period_seconds: float = POLL_SECONDS) -> None:
    """The same, but return at once when `stop` is set."""
    now = asyncio.get_running_loop().time()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), next_tick_at(now, period_seconds) - now)


def next_tick_at(now: float, period_seconds: float) -> float:
    """Return the next multiple of `period_seconds`; all who sleep ask here."""
    return (now // period_seconds + 1) * period_seconds


def _wake(woken: "asyncio.Future[None]") -> None:
    if not woken.done():
        woken.set_result(None)
