"""The format of a file that holds one block.

      0   8  magic
      8  32  block hash, which is also the file's name
     40   8  bytes of the content, little-endian
     48  32  sha256 over everything else in the file
     80 432  identity of the store as JSON, padded with zeros
    512   n  the block

The checksum covers the header too, so that a flipped bit anywhere is found. Numbers and places never change: another
format has another magic.
"""

import json
import struct
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Final

from kvwatch_engine.contracts.block import BlockHash

MAGIC: Final = b"KVWBLK\x00\x01"
HEADER_BYTES: Final = 512

_FIELDS: Final = struct.Struct("<8s32sQ32s432s")
_CHECKSUM: Final = slice(48, 80)
_IDENTITY_BYTES: Final = 432


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """All that the bytes of a block depend on besides what its hash names. Other identities are other caches."""

    weights_fingerprint: str
    kv_dtype: str
    block_size: int
    """Tokens."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    layout: int = 1
    """Version of the layout of a block's bytes; changes with engine/README.md, section "KV cache layout"."""

    def encode(self) -> bytes:
        """Return it as it stands in the header: readable if it fits, else its digest."""
        text = json.dumps(asdict(self), sort_keys=True).encode()
        if len(text) > _IDENTITY_BYTES:
            text = json.dumps({"sha256": sha256(text).hexdigest()}).encode()
        return text.ljust(_IDENTITY_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes of a file say, before its content was looked at."""

    content: BlockHash
    num_bytes: int
    checksum: bytes
    identity: bytes


def read_header(head: bytes) -> Header | None:
    """Return the header in the first `HEADER_BYTES` of a file; none if it is no file of this format."""
    if len(head) < HEADER_BYTES:
        return None
    magic, content, num_bytes, checksum, identity = _FIELDS.unpack(head[:HEADER_BYTES])
    return Header(BlockHash(content), num_bytes, checksum, identity) if magic == MAGIC else None


def is_unfinished(head: bytes) -> bool:
    """Whether the first bytes of a file may be what a power failure left of one of ours: none, few, or zeros."""
    return not any(head) or (len(head) < HEADER_BYTES and head[: len(MAGIC)] == MAGIC[: len(head)])


def make_header(content: BlockHash, identity: bytes, data: bytes | memoryview) -> bytes:
    """Return the header of a file that holds `data`."""
    num_bytes = memoryview(data).nbytes
    head = _FIELDS.pack(MAGIC, content, num_bytes, bytes(32), identity)
    return _FIELDS.pack(MAGIC, content, num_bytes, _checksum(head, data), identity)


def is_intact(head: bytes, data: bytes | memoryview) -> bool:
    """Whether header and content are what was written together."""
    return _checksum(head, data) == head[_CHECKSUM]


def _checksum(head: bytes, data: bytes | memoryview) -> bytes:
    digest = sha256(head[: _CHECKSUM.start] + bytes(32) + head[_CHECKSUM.stop : HEADER_BYTES])
    digest.update(data)
    return digest.digest()
