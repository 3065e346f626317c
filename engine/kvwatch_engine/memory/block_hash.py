"""Names for the content of a block: a sha256 chain over everything that its K/V depends on.

    root          = sha256( tagged keys of the whole sequence )
    hash[block i] = sha256( hash[i - 1] or root | tokens of block i )

A cryptographic hash, since a collision would show one user another user's answer. Keys are typed and length-prefixed,
so that no two kinds of key, and no two splits of the same bytes, can encode to the same message.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import sha256

from kvwatch_engine.contracts.block import BlockHash


class KeyTag(IntEnum):
    """Kinds of key besides tokens. Numbers never change their meaning."""

    BLOCK_SIZE = 1
    WEIGHTS = 2
    SALT = 3
    LORA = 4


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something besides tokens that K/V depends on, or that must not be shared."""

    tag: KeyTag
    content: bytes

    def encode(self) -> bytes:
        """Return tag, length and content as bytes."""
        return struct.pack("<BQ", self.tag, len(self.content)) + self.content


def root_hash(keys: Iterable[ExtraKey]) -> BlockHash:
    """Return the parent of a sequence's first block."""
    return BlockHash(sha256(b"kvwatch.block.v1" + b"".join(key.encode() for key in keys)).digest())


def salt_digest(cache_salt: str) -> str:
    """Return what telemetry may call a cache salt: 32 hexadecimal digits; empty for none.

    Not the salt itself, which whoever knows it may use.
    """
    return sha256(b"kvwatch.salt.v1" + salt_bytes(cache_salt)).hexdigest()[:32] if cache_salt else ""


def salt_bytes(cache_salt: str) -> bytes:
    """Return a cache salt as bytes, whatever text it is."""
    return cache_salt.encode("utf-8", "surrogatepass")


@cache
def _token_packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of the full block that follows `parent` and holds `token_ids`."""
    return BlockHash(sha256(parent + _token_packer(len(token_ids)).pack(*token_ids)).digest())


TokenSlice = Callable[[int, int], Sequence[int]]
"""Gives the token ids of a sequence from one position to another."""


class HashChain:
    """Hashes of a token sequence's full blocks, computed once and extended as the sequence grows."""

    __slots__ = ("_block_size", "_hashes", "_root")

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._hashes: list[BlockHash] = []

    @property
    def root(self) -> BlockHash:
        """Parent of the first block."""
        return self._root

    def upto(self, num_blocks: int, tokens: TokenSlice) -> Sequence[BlockHash]:
        """Return the hashes of at least the first `num_blocks` blocks.

        Args:
            num_blocks: full blocks wanted.
            tokens: gives the token ids from one position to another; asked only for blocks not hashed yet.
        """
        size = self._block_size
        hashes = self._hashes
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else self._root
            hashes.append(block_hash(parent, tokens(index * size, (index + 1) * size)))
        return hashes

    def fork(self, num_blocks: int) -> "HashChain":
        """Return a chain that shares the first `num_blocks` hashes."""
        chain = HashChain(self._root, self._block_size)
        chain._hashes = self._hashes[:num_blocks]
        return chain
