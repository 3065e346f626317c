"""Follows one publisher of KV events: live through a SUB socket, what was missed through replays.

    SUB ──► number as expected ──► decode ──► mirror
              │ a hole, a connection made anew, silence after activity
              ▼
            heal: hold live batches, replay from the last batch that was seen, apply what is contiguous,
            ask again for holes, give up what cannot be had, go on with what was held

A replay begins with the last batch that was seen, so that it also tells whether the publisher is still the same: a
restarted engine has other batches under the same numbers, or none.
"""

import asyncio
import time

import zmq
import zmq.asyncio

from kvwatch.sources.complaints import Complaints
from kvwatch.sources.connection import attach, changes, open_live
from kvwatch.sources.endpoints import Target
from kvwatch.sources.healer import Healer
from kvwatch.sources.replay import Replay, drain
from kvwatch.sources.stream_reader import StreamReader
from kvwatch.wire.frames import read_live

SETTLE_SECONDS = 0.2
"""From a connection to the replay: the subscription must have reached the publisher, else batches between are lost."""

QUIET_SECONDS = 10.0
"""Silence after which one replay makes sure that the last batches before it were not lost."""

SLICE_SECONDS = 0.005
"""How long batches are applied before others on the loop get their turn."""


class Subscription:
    """One publisher, for as long as `run` runs. Event loop only; `is_connected` on any thread.

    Args:
        target: Where the publisher is.
        reader: Applies what comes. It may have followed another address before.
        complaints: Counts messages that are none.
        context: ZeroMQ's.
    """

    def __init__(
        self, target: Target, reader: StreamReader, complaints: Complaints, context: zmq.asyncio.Context
    ) -> None:
        self.target = target
        self._reader = reader
        self._complaints = complaints
        self._context = context
        self._healer = Healer(reader, self._replay_from, complaints) if target.replay else None
        self._wants_healing = asyncio.Event()
        self._num_peers = 0
        self._has_activity = False
        self._must_settle = False
        reader.can_replay = self._healer is not None

    @property
    def is_connected(self) -> bool:
        """Whether the publisher is at the other end."""
        return self._num_peers > 0

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the publisher until `stop` is set, through restarts of it.

        Raises:
            SourceError: the address cannot be used.
        """
        live = open_live(self._context, self.target)
        tasks: set[asyncio.Task[None]] = set()
        try:
            tasks.add(asyncio.create_task(self._watch(live)))
            await asyncio.sleep(0)  # the monitor is there before the first connection
            attach(live, self.target)
            if self.target.live.startswith("inproc:"):  # has no connections that could be seen
                self._on_connected()
            tasks |= {
                asyncio.create_task(self._read(live)),
                asyncio.create_task(self._heal()),
                asyncio.create_task(_wait(stop)),
            }
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            live.close(0)
            self._num_peers = 0

    # ------------------------------------------------------------ tasks

    async def _watch(self, live: zmq.asyncio.Socket) -> None:
        async for is_connected in changes(live):
            if is_connected:
                self._on_connected()
            else:
                self._num_peers = max(0, self._num_peers - 1)

    async def _read(self, live: zmq.asyncio.Socket) -> None:
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(live)
        while True:
            if not await live.poll(int(QUIET_SECONDS * 1000)):
                self._on_quiet()
                continue
            self._has_activity = True
            began = time.monotonic()
            for frames in drain(plain):
                self._take(frames)
                if time.monotonic() - began > SLICE_SECONDS:
                    break
            await asyncio.sleep(0)

    async def _heal(self) -> None:
        while True:
            await self._wants_healing.wait()
            self._wants_healing.clear()
            if self._healer is not None:
                if self._must_settle:
                    self._must_settle = False
                    await asyncio.sleep(SETTLE_SECONDS)
                await self._healer.heal()

    # ------------------------------------------------------------ what happens

    def _replay_from(self, start: int) -> Replay:
        assert self.target.replay is not None, "no replay is asked for where there is none"
        return Replay(self._context, self.target.replay, start, self._complaints)

    def _take(self, frames: list[bytes]) -> None:
        message = read_live(frames)
        if message is None:
            self._complaints.skipped(["frames"])
            return
        self._reader.take_live(*message)
        if self._reader.wants_healing:
            self._wants_healing.set()

    def _on_connected(self) -> None:
        self._num_peers += 1
        self._must_settle = True
        self._reader.note_connected()
        self._ask_for_healing()

    def _on_quiet(self) -> None:
        if self._has_activity and self.is_connected:
            self._has_activity = False
            self._ask_for_healing()

    def _ask_for_healing(self) -> None:
        if self._healer is not None:
            self._reader.wants_healing = True
            self._wants_healing.set()


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()
