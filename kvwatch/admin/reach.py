"""Whether an engine is reached, and since when. Asks whoever reads it; knows no source, no metric and no HTTP."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class ReachState(StrEnum):
    """How an engine stands to whoever watches it."""

    NEVER = "never_reached"
    """It is to be watched, and has not been reached since watching began."""
    REACHED = "reached"
    LOST = "lost"
    """It was reached, and is looked for again."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A state, and when it began."""

    state: ReachState
    since_ns: int
    """Unix time in ns; as exact as looks are frequent."""


@dataclass(frozen=True, slots=True)
class UnreachedEngine:
    """An engine that is to be watched and of which nothing is known yet but what was configured."""

    name: str
    model_name: str


class ReachObserver:
    """Notes when one engine is reached, and when it is lost. Any thread.

    Args:
        is_up: Whether it is reached now.
        wall_ns: Tells the Unix time in ns.
    """

    def __init__(self, is_up: Callable[[], bool], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._is_up = is_up
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._reach = Reach(ReachState.REACHED if is_up() else ReachState.NEVER, wall_ns())

    def look(self) -> Reach:
        """Return how it stands now; a change since the last look begins with this one."""
        with self._lock:
            is_up, known = self._is_up(), self._reach
            if is_up is not (known.state is ReachState.REACHED):
                self._reach = Reach(ReachState.REACHED if is_up else ReachState.LOST, self._wall_ns())
            return self._reach
