"""Asks a publisher for batches that it keeps, through a DEALER socket: a REQ socket would get one reply only.

What comes may have holes, and an end marker proves nothing: publishers drop replies to a reader that is slow. So who
asks looks at the numbers, and asks again.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator

import zmq
import zmq.asyncio

from kvwatch.sources.complaints import Complaints
from kvwatch.sources.held_batches import Numbered
from kvwatch.wire.decoder import MAX_PAYLOAD_BYTES
from kvwatch.wire.frames import END_SEQ, read_reply, request_frames

FIRST_REPLY_SECONDS = 3.0
"""Publishers answer between two looks at their queue; a busy one takes its time."""

NEXT_REPLY_SECONDS = 1.5

MAX_REPLIES = 200_000
"""Replies that are read for one request; a publisher keeps 10,000 batches unless it was told otherwise."""

MAX_MESSAGE_BYTES = 4 * MAX_PAYLOAD_BYTES
"""Beyond it ZeroMQ drops the connection; what is merely too large to decode is skipped without that."""

RECEIVE_HWM = 20_000


class Replay:
    """One request and what came of it. Event loop only.

    Args:
        context: ZeroMQ's.
        address: Of the publisher's ROUTER.
        start: First number that is asked for.
        complaints: Counts replies that are none.
    """

    def __init__(self, context: zmq.asyncio.Context, address: str, start: int, complaints: Complaints) -> None:
        self._context = context
        self._address = address
        self._start = start
        self._complaints = complaints
        self.num_replies = 0
        self.has_ended = False
        """Whether the end marker came."""

    async def batches(self) -> AsyncGenerator[Numbered, None]:
        """Yield the replies in the order in which they come, until the end marker or for as long as they come."""
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            dealer.setsockopt(zmq.IPV6, int("[" in self._address))
            dealer.connect(self._address)
            await dealer.send_multipart(request_frames(self._start), zmq.DONTWAIT)
            plain: zmq.Socket[bytes] = zmq.Socket.shadow(dealer)
            timeout_seconds = FIRST_REPLY_SECONDS
            num_messages = 0
            while num_messages < MAX_REPLIES and await dealer.poll(int(timeout_seconds * 1000)):
                for frames in drain(plain):
                    num_messages += 1
                    reply = read_reply(frames)
                    if reply is None:
                        self._complaints.skipped(["frames"])
                    elif reply[0] == END_SEQ:
                        self.has_ended = True
                        return
                    else:
                        self.num_replies += 1
                        timeout_seconds = NEXT_REPLY_SECONDS
                        yield reply
                await asyncio.sleep(0)
        except zmq.ZMQError as error:
            self._complaints.warn("a replay cannot be asked for", address=self._address, error=str(error))
        finally:
            dealer.close(0)


def drain(plain: zmq.Socket[bytes], limit: int = 256) -> Iterator[list[bytes]]:
    """Yield up to `limit` messages that are there now: one call of asyncio for each would cost more than all else."""
    for _ in range(limit):
        try:
            yield plain.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
