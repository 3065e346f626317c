"""One timer for all waits of a request: a wait ends after its own time, however many there were before."""

import asyncio
from collections.abc import Callable

import pytest

from kvwatch_engine.server.patience import Patience


async def waited(patience: Patience, seconds: float) -> float:
    """Wait for something that never comes; return for how long."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    waiter: asyncio.Future[None] = loop.create_future()
    patience.begin(waiter, seconds)
    await asyncio.wait_for(waiter, 60)
    return loop.time() - begin


def test_a_wait_ends_after_its_time_also_if_an_earlier_one_had_more_or_less() -> None:
    async def scenario() -> None:
        patience = Patience()
        loop = asyncio.get_running_loop()
        for seconds in (0.05, 0.2, 0.02, 0.1):
            patience.begin(loop.create_future(), 30)
            assert await waited(patience, seconds) >= seconds
            assert await waited(patience, seconds) >= seconds

    asyncio.run(scenario())


def test_waits_that_end_in_time_set_one_timer_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        timers: list[float] = []
        set_timer = loop.call_at

        def noted(when: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
            timers.append(when)
            return set_timer(when, callback, *args)

        monkeypatch.setattr(loop, "call_at", noted)
        patience = Patience()
        for _ in range(100):
            waiter: asyncio.Future[None] = loop.create_future()
            patience.begin(waiter, 30)
            waiter.set_result(None)

        assert len(timers) == 1

    asyncio.run(scenario())


def test_a_timer_that_goes_off_between_two_waits_ends_neither() -> None:
    async def scenario() -> None:
        patience = Patience()
        loop = asyncio.get_running_loop()
        early: asyncio.Future[None] = loop.create_future()
        patience.begin(early, 0.02)
        early.set_result(None)
        late: asyncio.Future[None] = loop.create_future()
        patience.begin(late, 60)
        await asyncio.sleep(0.1)
        assert not late.done()

        late.set_result(None)
        assert await waited(patience, 0.02) >= 0.02

    asyncio.run(scenario())


def test_after_the_end_nothing_is_ended() -> None:
    async def scenario() -> None:
        patience = Patience()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        patience.begin(waiter, 0.01)
        patience.end()
        patience.end()
        await asyncio.sleep(0.05)
        assert not waiter.done()

    asyncio.run(scenario())
