"""Fills holes of a stream by replays, and gives up those that cannot be filled: it never asks for ever."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal, Protocol

from kvwatch.sources.complaints import Complaints
from kvwatch.sources.held_batches import Numbered
from kvwatch.sources.stream_reader import StreamReader

Outcome = Literal["complete", "incomplete", "failed", "other life"]

MAX_REQUESTS = 4
"""Replays for one hole, as long as each brings something."""

MAX_FAILURES = 3
"""Replays without any answer, one after the other, before none is asked for a while."""

PAUSE_SECONDS = 30.0


class Answer(Protocol):
    """What comes of one request for a replay."""

    num_replies: int
    """Batches that came."""
    has_ended: bool
    """Whether the end marker came."""

    def batches(self) -> AsyncGenerator[Numbered, None]:
        """Yield them in the order in which they come, until the end marker or for as long as they come."""
        ...


class Healer:
    """Heals one stream. Event loop only.

    Args:
        reader: Of the stream.
        ask: Asks the publisher for everything from a number on.
        complaints: Gets failures.
    """

    def __init__(self, reader: StreamReader, ask: Callable[[int], Answer], complaints: Complaints) -> None:
        self._reader = reader
        self._ask = ask
        self._complaints = complaints
        self._num_failures = 0
        self._paused_until = 0.0

    async def heal(self) -> None:
        """Ask for what is missing, apply it and what was held, and let the stream go on live."""
        reader = self._reader
        reader.wants_healing = True
        try:
            for attempt in range(MAX_REQUESTS):
                if time.monotonic() < self._paused_until:
                    return
                before = reader.order.next_seq
                outcome = await self._replay()
                if outcome == "other life":
                    reader.begin_new_life()
                    continue
                if reader.advance() and outcome != "failed":
                    return
                if attempt > 0 and reader.order.next_seq == before:
                    return  # asked twice for the same: it does not exist
        finally:
            reader.end_healing()

    async def _replay(self) -> Outcome:
        reader = self._reader
        next_seq = reader.order.next_seq
        answer = self._ask(max(0, (next_seq or 0) - 1))
        async with aclosing(answer.batches()) as batches:
            async for seq, payload in batches:
                if not reader.take_replayed(seq, payload):
                    return "other life"
        outcome = self._judge(answer, next_seq)
        if outcome == "other life":
            return outcome
        reader.counts.replays[outcome] += 1
        if outcome == "failed":
            self._num_failures += 1
            reader.note_unverified()
            self._complaints.warn("an engine does not answer when asked for a replay")
            if self._num_failures >= MAX_FAILURES:
                self._num_failures, self._paused_until = 0, time.monotonic() + PAUSE_SECONDS
        else:
            self._num_failures = 0
        return outcome

    def _judge(self, answer: Answer, next_seq: int | None) -> Outcome:
        reader = self._reader
        if answer.num_replies:
            return "complete" if answer.has_ended and not reader.has_hole else "incomplete"
        if not answer.has_ended:
            return "failed"
        if next_seq is None:
            reader.begin_at_zero()
            return "complete"
        if next_seq == 0:
            return "complete"
        # A publisher that has not even the last batch that was seen of it is another one, unless it goes on from there.
        return "incomplete" if reader.has_hole else "other life"
