"""A proxy between a publisher of KV events and its subscriber that loses batches, and knows which."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq


class LossyProxy:
    """Passes on what a publisher says, but for the batches that it drops. Its own thread; read when it has stopped."""

    def __init__(self, upstream: str, loss: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._loss = loss
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        self._in.connect(upstream)
        self._out = self._context.socket(zmq.PUB)
        self.port = self._out.bind_to_random_port("tcp://127.0.0.1")
        self._is_stopping = threading.Event()
        self.is_lossy = threading.Event()
        """Nothing is lost before it is set: whoever joins sees the beginning."""
        self.passed: list[tuple[int, bytes]] = []
        """Number and payload of what was passed on."""
        self.lost: list[tuple[int, bytes]] = []
        self._thread = threading.Thread(target=self._run)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def num_gaps(self) -> int:
        """Holes that a subscriber can see: losses in a row, with something passed on after them."""
        lost = {number for number, _ in self.lost}
        return sum(number - 1 in lost for number, _ in self.passed)

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            if not self._in.poll(50):
                continue
            frames = self._in.recv_multipart()
            batch = (int.from_bytes(frames[1], "big"), frames[2])
            if self.is_lossy.is_set() and self._random.random() < self._loss:
                self.lost.append(batch)
            else:
                self.passed.append(batch)
                self._out.send_multipart(frames)

    @contextmanager
    def running(self) -> Iterator["LossyProxy"]:
        """Pass on for as long as the block lasts."""
        self._thread.start()
        try:
            yield self
        finally:
            self._is_stopping.set()
            self._thread.join()
            self._context.destroy(0)
