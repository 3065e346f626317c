"""Snapshots of the engine, shared among all who ask. Observatory's loop only.

However many subscribers need healing, and however often, the engine is interrupted a few times a second at most.
"""

import asyncio
from collections.abc import Callable

from kvwatch.telemetry.snapshot import EngineSnapshot

SPACING_SECONDS = 0.2
"""Least time between two snapshots."""

TIMEOUT_SECONDS = 2.0


class Snapshots:
    """Gives each caller a snapshot that was taken after he asked.

    Args:
        take: Asks the engine, with a timeout in seconds; blocks, and raises `ControlError` if it is late.
    """

    def __init__(self, take: Callable[[float], EngineSnapshot]) -> None:
        self._take = take
        self._next: asyncio.Task[EngineSnapshot] | None = None
        self._lock = asyncio.Lock()
        self._free_at = 0.0

    async def take(self) -> EngineSnapshot:
        """Return a snapshot.

        Raises:
            ControlError: the engine has stopped or did not answer in time.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._take_next())
        return await asyncio.shield(self._next)  # one caller that leaves does not take it from the others

    async def _take_next(self) -> EngineSnapshot:
        loop = asyncio.get_running_loop()
        async with self._lock:
            await asyncio.sleep(max(0.0, self._free_at - loop.time()))
            self._next = None  # whoever asks from now on gets the one after this
            self._free_at = loop.time() + SPACING_SECONDS
            return await asyncio.to_thread(self._take, TIMEOUT_SECONDS)
