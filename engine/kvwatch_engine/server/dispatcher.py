"""Brings outputs from the engine's thread to the event loop: one call across threads for each step.

engine thread   dispatcher(outputs) --call_soon_threadsafe-->   event loop: mailbox.put for each output
event loop      outputs = await mailbox.get()                   once for each step and HTTP request
"""

import asyncio
from collections.abc import Callable, Sequence

from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.server.errors import ClientGone


class Mailbox:
    """What the engine produced for one HTTP request and nobody has read yet. Event loop only."""

    __slots__ = ("_event", "_gone", "_items", "_limit", "_num_unread", "_on_overflow")

    def __init__(self, max_unread_tokens: int, on_overflow: Callable[[], None]) -> None:
        """Create an empty mailbox.

        Args:
            max_unread_tokens: tokens that may wait to be read; one more, and everything is dropped.
            on_overflow: called then, once.
        """
        self._items: list[SequenceOutput] = []
        self._event = asyncio.Event()
        self._gone = ""
        self._limit = max_unread_tokens
        self._num_unread = 0
        self._on_overflow = on_overflow

    def put(self, output: SequenceOutput) -> None:
        """Add one output."""
        if self._gone:
            return
        # What comes as a whole could not be read before: it counts once.
        self._num_unread += len(output.token_ids) if output.score is None else 1
        self._items.append(output)
        self._event.set()
        if self._num_unread > self._limit:
            self.hang_up(f"the client left more than {self._limit} tokens unread")
            self._on_overflow()

    def hang_up(self, why: str) -> None:
        """Drop what waits; `get` raises from now on."""
        self._items.clear()
        self._gone = self._gone or why
        self._event.set()

    async def get(self, seconds: float) -> list[SequenceOutput]:
        """Return all that arrived since the last call, in order; nothing after `seconds` without any.

        Raises:
            ClientGone: the client hung up or does not read.
        """
        if not self._event.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._event.wait()
            except TimeoutError:
                return []
        if self._gone:
            raise ClientGone(self._gone)
        self._event.clear()
        self._num_unread = 0
        items, self._items = self._items, []
        return items


class OutputDispatcher:
    """The engine's output listener. Called on the engine's thread; everything else belongs to the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}

    def __call__(self, outputs: Sequence[SequenceOutput]) -> None:
        """Hand over all outputs of a step. Never blocks, never raises."""
        loop = self._loop
        if loop is None or not outputs:
            return
        try:
            loop.call_soon_threadsafe(self._deliver, tuple(outputs))
        except RuntimeError:
            # The loop is closed: the server has stopped before the engine, and nobody is left to read.
            self._loop = None

    def open(self, request_id: str, mailbox: Mailbox) -> None:
        """Send the outputs of a request to `mailbox`. Call it before the request is submitted."""
        self._loop = asyncio.get_running_loop()
        self._mailboxes[request_id] = mailbox

    def close(self, request_id: str) -> None:
        """Ignore further outputs of a request."""
        self._mailboxes.pop(request_id, None)

    @property
    def num_open(self) -> int:
        """Requests whose outputs are wanted."""
        return len(self._mailboxes)

    def _deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)
