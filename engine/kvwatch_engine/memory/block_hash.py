"""Names for the content of a block: a sha256 chain over everything that its K/V depends on.

    root          = sha256( tagged keys of the whole sequence )
    hash[block i] = sha256( hash[i - 1] or root | tokens of block i | tagged keys of what lies in block i )

A cryptographic hash, since a collision would show one user another user's answer. Keys are typed and length-prefixed,
so that no two kinds of key, and no two splits of the same bytes, can encode to the same message.
"""

import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import cache
from hashlib import sha256
from typing import Final

from kvwatch_engine.contracts.block import BlockHash


@unique
class KeyTag(IntEnum):
    """Kinds of key besides tokens. Numbers never change their meaning."""

    BLOCK_SIZE = 1
    WEIGHTS = 2
    SALT = 3
    """The request's own: `cache_salt`."""
    LORA = 4
    """Load id of the adapter."""
    TENANT = 5
    """The server's, for everybody who shares an API key's tenant."""
    MULTIMODAL = 6
    """Content that stands behind placeholder tokens."""
    ALONE = 7
    """A number drawn for one request, which shares with nobody."""
    GROUPS = 8
    """How the layers are divided into KV groups, where there are several."""


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something besides tokens that K/V depends on, or that must not be shared."""

    tag: KeyTag
    content: bytes

    def encode(self) -> bytes:
        """Return tag, length and content as bytes."""
        return struct.pack("<BQ", self.tag, len(self.content)) + self.content


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, or other content, whose embeddings take the place of placeholder tokens, which say nothing of it."""

    position: int
    """First of its tokens in the sequence."""
    num_tokens: int
    content_hash: bytes
    """Names the content together with how it was prepared."""

    def key_in(self, start: int) -> ExtraKey:
        """Return its key in a block that begins at token `start`: which part of the content lies there counts too."""
        place = struct.pack("<qq", self.position - start, self.num_tokens)
        return ExtraKey(KeyTag.MULTIMODAL, place + self.content_hash)


def lonely_root() -> BlockHash:
    """Return a parent that no other sequence has."""
    return root_hash([ExtraKey(KeyTag.ALONE, secrets.token_bytes(32))])


def root_hash(keys: Iterable[ExtraKey]) -> BlockHash:
    """Return the parent of a sequence's first block."""
    return BlockHash(sha256(b"kvwatch.block.v1" + b"".join(key.encode() for key in keys)).digest())


def sequence_keys(
    block_size: int,
    weights_fingerprint: str,
    *,
    cache_salt: str = "",
    tenant_salt: str = "",
    adapter: bytes = b"",
    groups: bytes = b"",
) -> list[ExtraKey]:
    """Return the keys of a whole sequence; one that is empty is left out.

    Args:
        block_size: tokens in a block.
        weights_fingerprint: names the base model's weights.
        cache_salt: the request's own salt.
        tenant_salt: the salt that the server gives a tenant.
        adapter: load id of its LoRA adapter, encoded; each load has its own.
        groups: how the model's layers are divided into KV groups, if there are several.
    """
    keys = [
        ExtraKey(KeyTag.BLOCK_SIZE, block_size.to_bytes(8, "little")),
        ExtraKey(KeyTag.WEIGHTS, weights_fingerprint.encode()),
    ]
    if cache_salt:
        keys.append(ExtraKey(KeyTag.SALT, salt_bytes(cache_salt)))
    if adapter:
        keys.append(ExtraKey(KeyTag.LORA, adapter))
    if tenant_salt:
        keys.append(ExtraKey(KeyTag.TENANT, salt_bytes(tenant_salt)))
    if groups:
        keys.append(ExtraKey(KeyTag.GROUPS, groups))
    return keys


def salt_digest(cache_salt: str, tenant_salt: str = "") -> str:
    """Return what telemetry may call the salts of a request: 32 hexadecimal digits; empty for none.

    Not the salts themselves, which whoever knows them may use.
    """
    if not tenant_salt:
        return sha256(b"kvwatch.salt.v1" + salt_bytes(cache_salt)).hexdigest()[:32] if cache_salt else ""
    both = (ExtraKey(KeyTag.TENANT, salt_bytes(tenant_salt)), ExtraKey(KeyTag.SALT, salt_bytes(cache_salt)))
    return sha256(b"kvwatch.salt.v2" + b"".join(key.encode() for key in both)).hexdigest()[:32]


def salt_bytes(cache_salt: str) -> bytes:
    """Return a cache salt as bytes, whatever text it is."""
    return cache_salt.encode("utf-8", "surrogatepass")


_TOKEN_BYTES: Final = 8
_BLOCKS_AT_ONCE: Final = 64
"""Blocks that are encoded together: more of them are no faster, and each length keeps an encoder."""


@cache
def _token_packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")


def block_hash(parent: BlockHash, token_ids: Sequence[int], keys: Sequence[ExtraKey] = ()) -> BlockHash:
    """Return the hash of the full block that follows `parent` and holds `token_ids`.

    `keys` are those of what lies in this block. How many tokens a block has is in the root: no key can pass for tokens.
    """
    message = parent + _token_packer(len(token_ids)).pack(*token_ids)
    if keys:  # seldom, and joining nothing would cost a fifth of the hash
        message += b"".join(key.encode() for key in keys)
    return BlockHash(sha256(message).digest())


def block_hashes(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the hashes of the full blocks that follow `parent` and hold `token_ids`, none of which has keys.

    The same as `block_hash` of one after the other; the tokens of many blocks are encoded at once.
    """
    width = block_size * _TOKEN_BYTES
    hashes: list[BlockHash] = []
    for first in range(0, len(token_ids), block_size * _BLOCKS_AT_ONCE):
        some = token_ids[first : first + block_size * _BLOCKS_AT_ONCE] if len(token_ids) > block_size else token_ids
        encoded = _token_packer(len(some)).pack(*some)
        for at in range(0, len(encoded), width):
            parent = BlockHash(sha256(parent + encoded[at : at + width]).digest())
            hashes.append(parent)
    return hashes


def hash_in_group(content: BlockHash, group: int) -> BlockHash:
    """Return what a block is called in a KV group whose block of the first group is called `content`.

    The same tokens give other K/V in other layers. One byte cannot be the tokens of a block, so that no two names meet.
    """
    return content if group == 0 else BlockHash(sha256(content + bytes((group,))).digest())


TokenSlice = Callable[[int, int], Sequence[int]]
"""Gives the token ids of a sequence from one position to another."""


class HashChain:
    """Hashes of a token sequence's full blocks, computed once and extended as the sequence grows."""

    __slots__ = ("_block_size", "_hashes", "_items", "_root")

    def __init__(self, root: BlockHash, block_size: int, items: Sequence[MultimodalItem] = ()) -> None:
        """Begin the chain of one sequence; `items` are what its placeholder tokens stand for, in order."""
        self._root = root
        self._items = tuple(items)
        self._block_size = block_size
        self._hashes: list[BlockHash] = []

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

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
        hashes = self._hashes
        first = len(hashes)
        if first < num_blocks:
            size = self._block_size
            parent = hashes[-1] if hashes else self._root
            token_ids = tokens(first * size, num_blocks * size)
            if self._items:
                self._extend_with_items(parent, token_ids, first)
            else:
                hashes += block_hashes(parent, token_ids, size)
        return hashes

    def move_to(self, root: BlockHash) -> None:
        """Go on under another root: all hashes are others from now on."""
        self._root = root
        self._hashes = []

    def fork(self, num_blocks: int) -> "HashChain":
        """Return a chain that shares the first `num_blocks` hashes."""
        chain = HashChain(self._root, self._block_size, self._items)
        chain._hashes = self._hashes[:num_blocks]
        return chain

    def _extend_with_items(self, parent: BlockHash, token_ids: Sequence[int], first: int) -> None:
        """Hash block by block, each with the keys of what lies in it; `first` is the place of the first block."""
        size = self._block_size
        for at in range(0, len(token_ids), size):
            start = first * size + at
            parent = block_hash(parent, token_ids[at : at + size], self._keys_in(start, start + size))
            self._hashes.append(parent)

    def _keys_in(self, start: int, end: int) -> list[ExtraKey]:
        return [
            item.key_in(start)
            for item in self._items
            if item.position < end and start < item.position + item.num_tokens
        ]
