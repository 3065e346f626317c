"""What the engine thread is asked to do between two steps, in order."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from kvwatch.errors import ChangeRefused, ControlError
from kvwatch_engine.core import EngineCore

T = TypeVar("T")
Command = Callable[[EngineCore], object]


_BUSY_POLL_SECONDS: Final = 0.02
"""Pause before a change that had to wait for something that passes is asked for again."""


def ask_patiently(ask: Callable[[float], T], timeout_seconds: float) -> T:
    """Ask, and again while what stands against it passes by itself.

    Args:
        ask: is given the seconds that are left.
        timeout_seconds: how long to go on.

    Raises:
        ControlError: whatever `ask` says at last.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return ask(left)
        except ChangeRefused as error:
            if not error.is_passing or left == 0.0:
                raise
            time.sleep(_BUSY_POLL_SECONDS)


class Inbox:
    """Commands from any thread for the engine thread."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        """Have something done; nobody hears of it. It must not raise."""
        self._commands.put(command)

    def ask(self, question: Callable[[EngineCore], T], timeout_seconds: float) -> T:
        """Have something answered; what it raises is raised here.

        Raises:
            ControlError: nobody began with it in time, and nobody will.
        """
        future: Future[T] = Future()

        def answer(core: EngineCore) -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                future.set_result(question(core))
            except Exception as error:  # it belongs to whoever asked
                future.set_exception(error)

        self._commands.put(answer)
        try:
            return future.result(timeout_seconds)
        except TimeoutError:
            if not future.cancel():
                return future.result()  # it was begun: whoever asked must know what came of it
        raise ControlError(f"the engine did not answer within {timeout_seconds:g} s: a step takes longer; ask again")

    def carry_out(self, core: EngineCore, first: Command | None = None) -> None:
        """Carry out `first` and whatever is here. Engine thread only."""
        while first is not None:
            first(core)
            first = self.next()

    def next(self, wait_seconds: float = 0.0) -> Command | None:
        """Return the next command, waiting so long for one; none if there is none. Engine thread only."""
        try:
            return self._commands.get(timeout=wait_seconds) if wait_seconds else self._commands.get_nowait()
        except queue.Empty:
            return None
