"""A publisher of KV events that does whatever a test wants, right or wrong. Written against the wire alone."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec
import zmq

TOPIC = b"kv"
END = b"\xff" * 8

Frames = list[bytes]


def batch(*events: Any, ts: float, rank: int = 0) -> bytes:
    """Return a payload."""
    return msgspec.msgpack.encode([ts, list(events), rank])


def stored(*hashes: int | bytes, parent: int | bytes | None = None, medium: str = "GPU", group: int = 0) -> Any:
    """Return a store without tokens."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": [],
        "block_size": 16, "lora_id": None, "medium": medium, "lora_name": None, "group_idx": group,
    }  # fmt: skip


def removed(*hashes: int | bytes, medium: str = "GPU", group: int = 0) -> Any:
    """Return a removal."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": group}


CLEARED: Any = {"type": "AllBlocksCleared"}


class RoguePublisher:
    """PUB and ROUTER on loopback. A context manager.

    Args:
        live: Address to bind, or to connect to with `connects`; by default a free port.
        replay: Address of the ROUTER; None for none. By default a free port.
        answers: Makes the replies to a request out of everything published and the number that is asked for.
        has_topic: Whether replies carry the topic, as newer engines send them.
    """

    def __init__(
        self,
        live: str = "tcp://127.0.0.1:*",
        replay: str | None = "tcp://127.0.0.1:*",
        *,
        connects: bool = False,
        answers: Callable[[dict[int, bytes], int], Sequence[tuple[int, bytes]]] | None = None,
        has_end: bool = True,
        has_topic: bool = True,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.IPV6, int("[" in live))
        if connects:
            self._pub.connect(live)
            self.live = live
        else:
            _bind(self._pub, live)
            self.live = self._pub.get_string(zmq.LAST_ENDPOINT)
        self._answers = answers or _everything_from
        self._has_end = has_end
        self._has_topic = has_topic
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.kept: dict[int, bytes] = {}
        self.requests: list[int] = []
        """First number of each replay that was asked for."""
        self.replay: str | None = None
        if replay is not None:
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.SNDHWM, 0)
            router.setsockopt(zmq.IPV6, int("[" in replay))
            _bind(router, replay)
            self.replay = router.get_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._serve, args=(router,), daemon=True)
            self._thread.start()

    def __enter__(self) -> "RoguePublisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(self, seq: int, payload: bytes, *, is_sent: bool = True) -> None:
        """Keep a batch for replays and send it, unless it is to be lost on the way."""
        self.kept[seq] = payload
        if is_sent:
            self.send([TOPIC, struct.pack(">Q", seq), payload])

    def send(self, frames: Frames) -> None:
        """Send any frames."""
        self._pub.send_multipart(frames)

    def close(self) -> None:
        """End it, as a killed process would. Safe twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
            self._thread = None
        self._pub.close(0)
        self._context.term()

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while not self._stop.is_set():
            if not router.poll(20):
                continue
            identity, *frames = router.recv_multipart()
            if len(frames) != 2:
                continue
            start = int.from_bytes(frames[1], "big")
            self.requests.append(start)
            topic = [TOPIC] if self._has_topic else []
            for seq, payload in self._answers(dict(self.kept), start):
                router.send_multipart([identity, b"", *topic, struct.pack(">Q", seq), payload])
            if self._has_end:
                router.send_multipart([identity, b"", *([b""] if self._has_topic else []), END, b""])
        router.close(0)


class Line:
    """A TCP line to a publisher that can be cut; whoever calls again is put through again. A context manager."""

    def __init__(self, to: str) -> None:
        host, port = to.removeprefix("tcp://").rsplit(":", 1)
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> "Line":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def cut(self) -> None:
        """End all connections."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _start(self, what: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=what, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self._ends += [near, far]
                self._start(self._carry, near, far)
                self._start(self._carry, far, near)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


def _everything_from(kept: dict[int, bytes], start: int) -> list[tuple[int, bytes]]:
    return sorted((seq, payload) for seq, payload in kept.items() if seq >= start)


def _bind(made: zmq.Socket[bytes], address: str, seconds: float = 10.0) -> None:
    """Bind; the port of a publisher that was just closed takes a moment to be free."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            made.bind(address)
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
