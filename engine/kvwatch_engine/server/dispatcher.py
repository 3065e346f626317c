"""Brings outputs from the engine's thread to the event loop: one call across threads for each step.

engine thread   dispatcher(outputs) --call_soon_threadsafe-->   event loop: mailbox.put for each output
event loop      outputs = await mailbox.get()                   once for each step and HTTP request
                or, while the reader waits, mailbox.taker(output)   without waking it up
"""

import asyncio
from collections.abc import Callable, Sequence

from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.server.errors import ClientGone
from kvwatch_engine.server.patience import Patience


class Mailbox:
    """What the engine produced for one HTTP request and nobody has read yet. Event loop only."""

    __slots__ = (
        "_failure",
        "_gone",
        "_has_news",
        "_items",
        "_limit",
        "_num_unread",
        "_on_overflow",
        "_patience",
        "_waiter",
        "taker",
    )

    def __init__(self, max_unread_tokens: int, on_overflow: Callable[[], None]) -> None:
        """Create an empty mailbox.

        Args:
            max_unread_tokens: tokens that may wait to be read; one more, and everything is dropped.
            on_overflow: called then, once.
        """
        self._items: list[SequenceOutput] = []
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._patience = Patience()
        self._gone = ""
        self._limit = max_unread_tokens
        self._num_unread = 0
        self._on_overflow = on_overflow
        self._failure: Exception | None = None
        self.taker: Callable[[SequenceOutput], bool] | None = None
        """Is offered each output for which the reader waits, and returns whether it has dealt with it: then the reader
        waits on. Whatever it raises, the reader is told."""

    def put(self, output: SequenceOutput) -> None:
        """Add one output."""
        if self._gone or self._is_taken(output):
            return
        # What comes as a whole could not be read before: it counts once.
        self._num_unread += len(output.token_ids) if output.score is None else 1
        self._items.append(output)
        self._wake()
        if self._num_unread > self._limit:
            self.hang_up(f"the client left more than {self._limit} tokens unread")
            self._on_overflow()

    def hang_up(self, why: str) -> None:
        """Drop what waits; `get` raises from now on."""
        self._items.clear()
        self._gone = self._gone or why
        self._wake()

    async def get(self, seconds: float) -> list[SequenceOutput]:
        """Return all that arrived since the last call, in order; nothing after `seconds` without any.

        Raises:
            ClientGone: the client hung up or does not read.
            Exception: as the taker raised it.
        """
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            self._patience.begin(self._waiter, seconds)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._has_news:
            return []
        if self._failure is not None:
            raise self._failure
        if self._gone:
            raise ClientGone(self._gone)
        self._has_news = False
        self._num_unread = 0
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Nobody will read it any more."""
        self.taker = None
        self._patience.end()

    def _is_taken(self, output: SequenceOutput) -> bool:
        if self.taker is None or self._waiter is None or self._waiter.done():
            return False  # the reader has still to do with what came before
        try:
            is_taken = self.taker(output)
        except Exception as error:  # this request's: others get their outputs in the same call
            self._failure = error
            self._wake()
            return True
        if is_taken:
            self._patience.begin_again()
        return is_taken

    def _wake(self) -> None:
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
