"""Limits of waits that hardly ever last: one timer for all waits of a request, instead of one for each."""

import asyncio


class Patience:
    """Ends waits that take too long. Event loop only.

    A wait that ends in time costs a look at the clock. The timer that was set for an earlier one stays; when it goes
    off, it is set again for the wait that then lasts, if there is one.
    """

    __slots__ = ("_due", "_seconds", "_timer", "_waiter")

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._seconds = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, waiter: "asyncio.Future[None]", seconds: float) -> None:
        """Set the result of `waiter` after so many seconds, unless it is done by then. One at a time."""
        loop = waiter.get_loop()
        self._waiter, self._seconds, self._due = waiter, seconds, loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._look, loop)

    def begin_again(self) -> None:
        """Count the time of the wait that lasts from now."""
        if self._waiter is not None:
            self._due = self._waiter.get_loop().time() + self._seconds

    def end(self) -> None:
        """End none any more."""
        self._waiter = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._look, loop)
        else:
            self._waiter.set_result(None)
