"""ZeroMQ frames around a batch's payload.

    live      PUB     topic | sequence number | payload
    request   DEALER  empty | first sequence number wanted
    reply     ROUTER  empty | topic | sequence number | payload      one message for each batch
    end       ROUTER  empty | empty | ff ff ff ff ff ff ff ff | empty

vLLM before 0.26 and SGLang before 0.5.22 leave the topic out of replies and of the end.

Sequence numbers are 8 bytes, big-endian, unsigned; they count the batches of one publisher's life from 0. The frame
with the identity of a ROUTER's peer, which goes before these, belongs to the socket.
"""

from collections.abc import Sequence

MAX_SEQ = 0xFFFF_FFFF_FFFF_FFFE
END_SEQ = 0xFFFF_FFFF_FFFF_FFFF
"""Stands in the place of a sequence number when a replay is over."""

END_FRAMES: tuple[bytes, ...] = (b"", b"", END_SEQ.to_bytes(8, "big"), b"")


def live_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames of a live message."""
    return [topic, seq.to_bytes(8, "big"), payload]


def reply_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames with which a replayed batch is answered."""
    return [b"", topic, seq.to_bytes(8, "big"), payload]


def request_frames(start: int) -> list[bytes]:
    """Return the frames with which a DEALER asks for everything from `start` on."""
    return [b"", start.to_bytes(8, "big")]


def read_request(frames: Sequence[bytes]) -> int | None:
    """Return the first sequence number that is asked for, or None for what is no request.

    A number of fewer than 8 bytes is read as one, as vLLM does.
    """
    if len(frames) != 2 or frames[0] or not 1 <= len(frames[1]) <= 8:
        return None
    return int.from_bytes(frames[1], "big")


def read_live(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return sequence number and payload of a live message, or None for what is none."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    seq = int.from_bytes(frames[1], "big")
    return (seq, frames[2]) if seq <= MAX_SEQ else None


def read_reply(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return sequence number and payload of a reply as a DEALER sees it, or None for what is none.

    `END_SEQ` stands for the end. Replies with and without a topic are taken.
    """
    if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
