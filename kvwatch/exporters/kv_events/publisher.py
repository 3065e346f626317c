"""The sockets: PUB tells what happens, ROUTER answers what happened before.

A live reader that is too slow loses messages (ZeroMQ drops them beyond the high-water mark) and finds the hole by the
sequence numbers. A reader of a replay is waited for instead: nothing is dropped silently, and the marker at the end
says that all of it was sent.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import structlog
import zmq
import zmq.asyncio

from kvwatch.errors import ExporterError
from kvwatch.exporters.kv_events.endpoints import LIVE_SETTING, REPLAY_SETTING, Endpoint, Endpoints
from kvwatch.exporters.kv_events.history import History
from kvwatch.wire.frames import END_FRAMES, live_frames, read_request, reply_frames
from kvwatch.wire.kv_events import Batch, WireEvent, encode_batch

LIVE_HWM = 100_000
"""Messages kept for one slow live reader, as in vLLM."""

REPLAY_HWM = 1_000
"""Replies kept for one reader of a replay; then it is waited for."""

MAX_REPLAYS = 4
"""Replays at a time; further requests wait in the socket."""

STALL_SECONDS = 10.0
"""A replay whose reader takes nothing for so long is given up, without an end marker."""

LOG_SECONDS = 60.0
"""At most one replay that came to nothing is logged in this time; all are counted."""

BACK_OFF_SECONDS = 0.01
REPLIES_BETWEEN_YIELDS = 32
MAX_REQUEST_BYTES = 1_024
LINGER_MS = 500
"""Time in ms that messages still under way get when the publisher closes."""

logger = structlog.get_logger(__name__)


class Publisher:
    """Numbers, keeps and sends batches. `open` on any thread; everything else on one event loop's thread.

    Args:
        endpoints: Where.
        topic: First frame of every live message.
        history: Keeps what was sent.
        dp_rank: Rank that the batches name.
        context: ZeroMQ context, for readers in this process (inproc); default: one of its own.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        topic: str,
        history: History,
        dp_rank: int = 0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._topic = topic.encode()
        self._history = history
        self._dp_rank = dp_rank
        self._given_context = context
        self._context = context
        self._live: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._logged: float | None = None
        self.num_batches = 0
        """Batches published."""
        self.num_replays = 0
        """Replays sent to their end."""
        self.num_replays_given_up = 0
        """Replays whose reader went away or stopped reading."""

    @property
    def live_address(self) -> str:
        """Where live events can be had; with the port that the system chose, if it did."""
        return _address(self._live, self._endpoints.live)

    @property
    def replay_address(self) -> str | None:
        """The same for replays, or None."""
        return _address(self._replay, self._endpoints.replay) if self._endpoints.replay else None

    def open(self) -> None:
        """Bind or connect.

        Raises:
            ExporterError: an endpoint is taken or cannot be used.
        """
        self._context = self._given_context or zmq.Context()
        try:
            self._live = self._make(zmq.PUB, self._endpoints.live, LIVE_SETTING)
            if self._endpoints.replay is not None:
                self._replay = self._make(zmq.ROUTER, self._endpoints.replay, REPLAY_SETTING)
        except ExporterError:
            self.close()
            raise

    def publish(self, unix_seconds: float, events: Sequence[WireEvent]) -> None:
        """Send one batch. Never blocks.

        Raises:
            WireError: it cannot be encoded; no sequence number is used up.
        """
        assert self._live is not None, "publish before open"
        payload = encode_batch(Batch(unix_seconds, list(events), self._dp_rank))
        seq = self._history.append(payload)
        self._live.send_multipart(live_frames(self._topic, seq, payload), zmq.DONTWAIT)
        self.num_batches += 1

    async def serve_replays(self, stop: asyncio.Event) -> None:
        """Answer requests until `stop` is set."""
        if self._replay is None:
            await stop.wait()
            return
        router = zmq.asyncio.Socket.from_socket(self._replay)
        stopping = asyncio.create_task(stop.wait())
        replays: set[asyncio.Task[None]] = set()
        while not stop.is_set():
            receiving = asyncio.ensure_future(router.recv_multipart())
            await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                receiving.cancel()
                break
            identity, *frames = receiving.result()
            start = read_request(frames)
            if start is not None:  # anything else is ignored, as vLLM does
                replays.add(asyncio.create_task(self._replay_to(router, identity, start)))
            while len(replays) >= MAX_REPLAYS and not stop.is_set():
                await asyncio.wait({*replays, stopping}, return_when=asyncio.FIRST_COMPLETED)
                replays = {task for task in replays if not task.done()}
        for task in (*replays, stopping):
            task.cancel()
        await asyncio.gather(*replays, stopping, return_exceptions=True)

    def close(self) -> None:
        """Send what is under way for at most `LINGER_MS`, then close. Safe twice, and without `open`."""
        for each in (self._live, self._replay):
            if each is not None:
                each.close(LINGER_MS)
        self._live = self._replay = None
        if self._given_context is None and self._context is not None:
            self._context.term()
            self._context = None

    # ------------------------------------------------------------ parts

    def _make(self, kind: int, endpoint: Endpoint, setting: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        made = self._context.socket(kind)
        made.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if kind == zmq.PUB:
            made.setsockopt(zmq.SNDHWM, LIVE_HWM)
        else:
            made.setsockopt(zmq.SNDHWM, REPLAY_HWM)
            made.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            # Without it a reply to a reader that is slow is dropped without a word.
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if endpoint.is_bound:
                made.bind(endpoint.address)
            else:
                made.connect(endpoint.address)
        except zmq.ZMQError as error:
            made.close(0)
            raise ExporterError(
                f"{setting}: cannot {'bind' if endpoint.is_bound else 'connect to'} {endpoint.address} "
                f"({error.strerror}); stop what uses it or choose another endpoint with {setting}"
            ) from error
        return made

    async def _replay_to(self, router: zmq.asyncio.Socket, identity: bytes, start: int) -> None:
        try:
            for index, sent in enumerate(self._history.since(start)):
                await _send(router, [identity, *reply_frames(self._topic, sent.seq, sent.payload)])
                if index % REPLIES_BETWEEN_YIELDS == 0:
                    await asyncio.sleep(0)
            await _send(router, [identity, *END_FRAMES])
        except (zmq.ZMQError, TimeoutError) as error:
            self._note_given_up("a reader of KV events did not take its replay to the end", error)
        except Exception as error:  # a defect of ours must not end the service for other readers
            self._note_given_up("a replay of KV events failed", error)
        else:
            self.num_replays += 1

    def _note_given_up(self, message: str, error: Exception) -> None:
        self.num_replays_given_up += 1
        now = time.monotonic()
        if self._logged is None or now - self._logged >= LOG_SECONDS:  # readers that come and go cost no disk
            self._logged = now
            logger.warning(message, error=repr(error), num_given_up=self.num_replays_given_up)


async def _send(router: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Send one reply, waiting for a reader that is slow.

    Raises:
        TimeoutError: it takes nothing.
        zmq.ZMQError: it is gone.
    """
    give_up = time.monotonic() + STALL_SECONDS
    while True:
        with contextlib.suppress(zmq.Again):
            await router.send_multipart(frames, zmq.DONTWAIT)
            return
        if time.monotonic() > give_up:
            raise TimeoutError(f"nothing was taken for {STALL_SECONDS} s")
        await asyncio.sleep(BACK_OFF_SECONDS)


def _address(made: zmq.Socket[bytes] | None, endpoint: Endpoint) -> str:
    if made is None or not endpoint.is_bound:
        return endpoint.address
    return made.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
