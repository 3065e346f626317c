"""Looks into an engine one after the other, with time between them: whoever looks all the time holds up no steps.

Each look is answered between two steps and costs the engine some milliseconds at most. Knows no request and no route.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvwatch.admin.threads import off_loop

PAUSE_SECONDS = 0.04
"""From the end of a look to the next: a look of 4 ms, which is a long one, then takes a tenth of the engine's time."""

P = ParamSpec("P")
T = TypeVar("T")


class Looks:
    """The looks of all callers of a listener. Its loop only."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._next = 0.0
        """Time of the loop at which the next look may begin."""

    async def look(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that asks the engine, when it is its turn; return what it returns."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(max(0.0, self._next - loop.time()))
            try:
                return await off_loop(function, *args, **kwargs)
            finally:
                self._next = loop.time() + PAUSE_SECONDS
