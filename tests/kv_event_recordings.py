"""The recordings of foreign publishers, and plain readings of them that share no code with the decoder."""

import base64
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent / "recordings"

SCRIPTED = sorted(path.name for path in FOLDER.glob("kv-events-*.json"))

DETAILS = (
    "block_size", "lora_id", "lora_name", "cache_salt", "session_id", "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window", "locality", "ownership",
)  # fmt: skip
"""Fields of a store whose recorded form needs no conversion."""


@cache
def scripted(name: str) -> dict[str, Any]:
    """Return one recording of a publisher."""
    found: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return found


def payloads(name: str) -> list[bytes]:
    """Return the payloads of a recording's live messages."""
    return [base64.b64decode(message["frames"][-1]) for message in scripted(name)["live"]]


def live_of(name: str, segment: str) -> list[tuple[int, bytes]]:
    """Return number and payload of each live message of one segment."""
    messages = [m for m in scripted(name)["live"] if m["segment"] == segment]
    frames = [[base64.b64decode(frame) for frame in m["frames"]] for m in messages]
    return [(int.from_bytes(seq, "big"), payload) for _, seq, payload in frames]


@dataclass(frozen=True)
class Message:
    """One message of the recorded load."""

    seconds: float
    topic: bytes
    seq: int
    payload: bytes


@cache
def mixed_load() -> list[Message]:
    """Return what a real vLLM published under a mixed load."""
    rows = msgspec.msgpack.decode((FOLDER / "vllm-0.32-mixed.frames").read_bytes())
    return [Message(seconds, topic, int.from_bytes(seq, "big"), payload) for seconds, topic, seq, payload in rows]


def as_recorded(wire_hash: int | bytes | None) -> str | None:
    """Return a hash in the form in which recordings say it."""
    if isinstance(wire_hash, bytes):
        return "0x" + wire_hash.hex()
    return None if wire_hash is None else str(wire_hash)


def hex_bytes(value: Any) -> Any:
    """Return extra keys with bytes as recordings say them."""
    if isinstance(value, bytes):
        return "0x" + value.hex()
    return [hex_bytes(each) for each in value] if isinstance(value, list) else value
