"""A reader of KV events as a router has one, written against the wire alone: bytes in, a set of hashes out.

Shares no code with the publisher. It is strict: what it does not expect is an error and not ignored.
"""

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

TOPIC = b"kv"
"""The topic that tests publish under."""

Place = tuple[str, int]
"""Medium and group."""


@dataclass
class KnownBlock:
    """What a reader is told of a hash."""

    parent: int | bytes | None
    token_ids: list[int]
    extra_keys: list[Any] | None
    lora_name: str | None


@dataclass
class KVEventReader:
    """The set of resident hashes as messages tell it. Call `take` with live or replayed messages, in any order."""

    next_seq: int = 0
    blocks: dict[Place, dict[int | bytes, KnownBlock]] = field(default_factory=dict)
    waiting: dict[int, bytes] = field(default_factory=dict)
    num_clears: int = 0
    num_batches: int = 0
    rank: int | None = None
    is_strict: bool = True
    """Whether a store of what is there, or a removal of what is not, is an error."""

    @property
    def hashes(self) -> set[int | bytes]:
        """Every resident hash, wherever."""
        return {each for place in self.blocks.values() for each in place}

    @property
    def has_gap(self) -> bool:
        """Whether messages are waiting for earlier ones."""
        return bool(self.waiting)

    def take(self, seq: int, payload: bytes) -> None:
        """Apply a message as soon as all earlier ones were applied; forget it if it was applied before."""
        if seq >= self.next_seq:
            self.waiting[seq] = payload
        while self.next_seq in self.waiting:
            self._apply(self.waiting.pop(self.next_seq))
            self.next_seq += 1

    def skip_to(self, seq: int) -> None:
        """Accept that the replay begins here: the first message that it has says what all before it amount to."""
        self.next_seq = max(self.next_seq, seq)

    def _apply(self, payload: bytes) -> None:
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert type(ts) is float
        self.num_batches += 1
        self.rank = rank
        for event in events:
            getattr(self, "_" + event["type"])(event)

    def _BlockStored(self, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        place = self.blocks.setdefault((event["medium"], event["group_idx"]), {})
        tokens = event["token_ids"]
        assert len(tokens) in {0, size * len(event["block_hashes"])}
        extra = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for index, each in enumerate(event["block_hashes"]):
            assert not self.is_strict or each not in place, "told twice"
            block = KnownBlock(parent, tokens[index * size : (index + 1) * size], extra[index], event["lora_name"])
            place[each] = block
            parent = each

    def _BlockRemoved(self, event: dict[str, Any]) -> None:
        place = self.blocks.setdefault((event["medium"], event["group_idx"]), {})
        for each in event["block_hashes"]:
            assert not self.is_strict or each in place, "removed though it was not there"
            place.pop(each, None)

    def _AllBlocksCleared(self, event: dict[str, Any]) -> None:
        assert event == {"type": "AllBlocksCleared"}
        self.num_clears += 1
        self.blocks.clear()


def read_live(socket: zmq.Socket[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the live messages that are there now."""
    while True:
        try:
            topic, seq, payload = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        assert topic == TOPIC
        yield struct.unpack(">Q", seq)[0], payload


def fetch_replay(
    context: zmq.Context[zmq.Socket[bytes]], address: str, start: int, timeout_seconds: float = 20.0
) -> list[tuple[int, bytes]]:
    """Ask for everything from `start` on; return it when the end marker has come."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(timeout_seconds * 1000))
        dealer.connect(address)
        dealer.send_multipart([b"", struct.pack(">Q", start)])
        replayed: list[tuple[int, bytes]] = []
        while True:
            empty, topic, seq, payload = dealer.recv_multipart()
            assert empty == b""
            if seq == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return replayed
            assert topic == TOPIC
            replayed.append((struct.unpack(">Q", seq)[0], payload))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.005)
