"""Block hashes: what is in them, and that no kind of key can be taken for another."""

from hashlib import sha256
from itertools import combinations, product

import pytest

from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.memory.block_hash import (
    ExtraKey,
    HashChain,
    KeyTag,
    MultimodalItem,
    block_hash,
    block_hashes,
    root_hash,
    salt_digest,
    sequence_keys,
)

TOKENS = list(range(40))


def hashes(*items: MultimodalItem, num_blocks: int = 4) -> list[bytes]:
    chain = HashChain(root_hash([]), 4, items)
    return list(chain.upto(num_blocks, lambda start, end: TOKENS[start:end]))


def test_the_same_word_as_salt_tenant_and_adapter_gives_three_roots() -> None:
    words = ["", "a", "b", "ab"]
    roots = {
        (salt, tenant, adapter): root_hash(
            sequence_keys(16, "w", cache_salt=salt, tenant_salt=tenant, adapter=adapter.encode())
        )
        for salt, tenant, adapter in product(words, repeat=3)
    }
    assert len(set(roots.values())) == len(words) ** 3


def test_every_kind_of_key_has_a_number_of_its_own() -> None:
    """Two names of one number would be one kind."""
    assert len(KeyTag.__members__) == len(set(KeyTag)) == 8
    roots = {root_hash([ExtraKey(tag, b"the same")]) for tag in KeyTag.__members__.values()}
    assert len(roots) == 8


def test_block_size_and_weights_are_in_the_root() -> None:
    roots = {root_hash(sequence_keys(size, weights)) for size in (8, 16) for weights in ("a", "b")}
    assert len(roots) == 4


def test_no_content_of_a_key_can_look_like_another_key() -> None:
    inner = ExtraKey(KeyTag.TENANT, b"x").encode()
    assert root_hash([ExtraKey(KeyTag.SALT, inner)]) != root_hash(
        [ExtraKey(KeyTag.SALT, b""), ExtraKey(KeyTag.TENANT, b"x")]
    )
    assert root_hash([ExtraKey(KeyTag.SALT, b"ab")]) != root_hash(
        [ExtraKey(KeyTag.SALT, b"a"), ExtraKey(KeyTag.SALT, b"b")]
    )


def test_a_block_without_images_has_the_hash_that_files_on_disk_have() -> None:
    """Folders of the disk tier outlive versions: the plain chain never changes."""
    root = root_hash([])
    message = root + b"".join(token.to_bytes(8, "little") for token in TOKENS[:4])
    assert hashes()[0] == sha256(message).digest() == block_hash(root, TOKENS[:4])


def test_an_image_changes_its_blocks_and_all_that_follow_and_none_before() -> None:
    plain, with_image = hashes(), hashes(MultimodalItem(6, 3, b"cat"))
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, False, False, False]


def test_content_place_and_length_of_an_image_all_count() -> None:
    chains = [
        hashes(),
        hashes(MultimodalItem(5, 3, b"cat")),
        hashes(MultimodalItem(5, 3, b"dog")),
        hashes(MultimodalItem(6, 3, b"cat")),
        hashes(MultimodalItem(5, 2, b"cat")),
        hashes(MultimodalItem(4, 3, b"cat")),
        hashes(MultimodalItem(5, 3, b"cat"), MultimodalItem(8, 1, b"dog")),
    ]
    assert all(a[-1] != b[-1] for a, b in combinations(chains, 2))


def test_a_fork_knows_the_images() -> None:
    items = [MultimodalItem(9, 2, b"cat")]
    chain = HashChain(root_hash([]), 4, items)
    chain.upto(1, lambda start, end: TOKENS[start:end])
    forked = chain.fork(1).upto(4, lambda start, end: TOKENS[start:end])
    assert forked == hashes(*items)


def test_what_telemetry_calls_a_salt_tells_salts_and_tenants_apart_and_not_what_they_are() -> None:
    pairs = list(product(["", "a", "b"], repeat=2))
    digests = [salt_digest(salt, tenant) for salt, tenant in pairs]
    assert len(set(digests)) == len(pairs)
    assert digests[0] == ""
    assert all(len(digest) == 32 for digest in digests[1:])


@pytest.mark.parametrize("num_blocks", [1, 63, 64, 65, 130])
def test_many_blocks_hashed_at_once_are_called_as_one_by_one(num_blocks: int) -> None:
    token_ids = [number * 7919 % 50_000 for number in range(3 * num_blocks)]
    parent = root_hash([])
    expected: list[BlockHash] = []
    for start in range(0, len(token_ids), 3):
        expected.append(block_hash(expected[-1] if expected else parent, token_ids[start : start + 3]))

    assert block_hashes(parent, token_ids, 3) == expected
    chain = HashChain(parent, 3)
    assert list(chain.upto(1, lambda start, end: token_ids[start:end])) == expected[:1]
    assert list(chain.upto(num_blocks, lambda start, end: token_ids[start:end])) == expected
