"""The SUB socket of one publisher, and whether anybody is at its other end."""

from collections.abc import AsyncIterator

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvwatch.errors import KVWatchError
from kvwatch.sources.endpoints import Target
from kvwatch.sources.replay import MAX_MESSAGE_BYTES

LIVE_HWM = 10_000
"""Messages that may wait on our side. Beyond it they wait in the engine, and are dropped there at last."""

RECONNECT_MS = 100
MAX_RECONNECT_MS = 2_000
HEARTBEAT_MS = 5_000
"""A peer that does not answer for three of these is gone, also when no packet says so."""

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class SourceError(KVWatchError):
    """An engine cannot be watched as configured."""


def open_live(context: zmq.asyncio.Context, target: Target) -> zmq.asyncio.Socket:
    """Return a socket for a publisher's live batches, not connected yet."""
    live = context.socket(zmq.SUB)
    try:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, LIVE_HWM),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.IPV6, int("[" in target.live)),
        ):
            live.setsockopt(option, value)
        live.setsockopt(zmq.SUBSCRIBE, target.topic.encode())
    except zmq.ZMQError:
        live.close(0)
        raise
    return live


def attach(live: zmq.asyncio.Socket, target: Target) -> None:
    """Bind or connect. After this messages and changes of the connection come.

    Raises:
        SourceError: the address cannot be used.
    """
    try:
        if target.is_bound:
            live.bind(target.live)
        else:
            live.connect(target.live)
    except zmq.ZMQError as error:
        raise SourceError(
            f"cannot {'bind' if target.is_bound else 'connect to'} {target.live} for KV events ({error.strerror}); "
            "give another address, or stop what uses this one"
        ) from error


async def changes(live: zmq.asyncio.Socket) -> AsyncIterator[bool]:
    """Yield True whenever a publisher is connected, False whenever one is lost. Call before `attach`."""
    monitor = live.get_monitor_socket(_EVENTS)
    try:
        while True:
            event = await recv_monitor_message(monitor)
            yield event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        live.disable_monitor()
