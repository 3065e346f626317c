"""Tiers over the real KV cache: every dtype comes back bit by bit, through swap, host and disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from builders import ROOT, LedgerFollower

from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.cache import KVCacheSpec
from kvwatch_engine.contracts.tiers import TransferOutcome
from kvwatch_engine.memory.block_hash import HashChain
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import BlockPool, Owner
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.prefix import Prefix
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.device import device_store
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings

NUM_BLOCKS = 9
BLOCK_SIZE = 8
TOKENS = list(range(8 * BLOCK_SIZE))


class Cached:
    """A real cache with random content, block tables and tiers."""

    def __init__(self, dtype: str, folder: Path | None, host_blocks: int = 20, weights: str = "w") -> None:
        spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=16, block_size=BLOCK_SIZE, dtype=dtype)
        self.cache = KVCache(spec, NUM_BLOCKS)
        generator = torch.Generator().manual_seed(1)
        self.cache.blocks.copy_(torch.randint(0, 256, self.cache.blocks.shape, dtype=torch.uint8, generator=generator))
        self.log = EventLog(4096)
        self.manager = BlockManager(BlockPool(NUM_BLOCKS, self.log), BLOCK_SIZE, self.log)
        settings = TierSettings(
            host_bytes=host_blocks * spec.block_bytes,
            disk_folder=folder,
            disk_bytes=100 * spec.block_bytes if folder else 0,
        )
        identity = StoreIdentity(
            weights_fingerprint=weights,
            kv_dtype=dtype,
            block_size=BLOCK_SIZE,
            num_layers=3,
            num_kv_heads=2,
            head_dim=16,
        )
        machine = Machine(device_store(lambda: self.cache))
        self.tiers = MemoryTiers(self.manager, settings, machine, identity, spec.block_bytes, self.log)
        self.ledger = LedgerFollower(self.log, self.snapshot)

    def content(self, owner: Owner) -> np.ndarray:
        return self.cache.blocks[torch.tensor(self.manager.table(owner))].numpy().copy()

    def open(self, name: str, tokens: list[int]) -> Owner:
        owner = Owner(name, 0)
        assert self.manager.open(owner, Prefix(), len(tokens))
        return owner

    def store(self, owner: Owner, tokens: list[int]) -> list[BlockHash]:
        chain = HashChain(ROOT, BLOCK_SIZE)
        self.manager.record_written(owner, 0, len(tokens))
        self.manager.store_full(owner, chain, len(tokens), lambda start, end: tokens[start:end])
        return list(chain.upto(len(tokens) // BLOCK_SIZE, lambda start, end: tokens[start:end]))

    def settle(self) -> list[TransferOutcome]:
        """Wait until nothing is on its way."""
        outcomes: list[TransferOutcome] = []
        while self.tiers.num_in_flight:
            assert self.tiers.wait(10)
            outcomes += self.tiers.poll()
        self.manager.check_integrity()
        self.tiers.check_integrity()
        return outcomes

    def take_every_block(self) -> None:
        """Evict all prefixes, one block at a time, so that the smallest host takes part."""
        owners = [self.open(f"other-{number}", [0]) for number in range(NUM_BLOCKS - 1) if not self.settle()]
        for owner in owners:
            self.manager.release(owner, "finished")
        self.settle()

    def scribble(self) -> None:
        """Whatever was on the device is gone."""
        self.cache.blocks.fill_(0xAA)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            *(self.log.head, self.log.step, self.log.now_ns, BLOCK_SIZE, 0, 0, 0, 0),
            tiers=[self.manager.pool.to_state(), *self.tiers.states()],
            sequences=[*self.manager.to_states(), *self.tiers.sequences()],
            requests=[],
            transfers=self.tiers.transfers(),
        )


DTYPES = ["float32", "bfloat16", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_swapped_request_comes_back_bit_by_bit_with_its_sharing(dtype: str) -> None:
    stage = Cached(dtype, None)
    owner = stage.open("a", TOKENS[:30])
    stage.manager.record_written(owner, 0, 30)
    stage.manager.fork(owner, Owner("a", 1), 30)
    stage.manager.prepare_write(Owner("a", 1), 30, 33, "decode")
    stage.manager.record_written(Owner("a", 1), 30, 33)
    owners = [owner, Owner("a", 1)]
    before = [stage.content(each) for each in owners]
    num_distinct = stage.manager.num_distinct_blocks(owners)
    shared = [a == b for a, b in zip(*map(stage.manager.table, owners), strict=False)]

    stage.tiers.begin_out("a")
    assert [outcome.error for outcome in stage.settle()] == [""]
    assert stage.manager.pool.num_used == 0
    stage.scribble()
    assert stage.tiers.num_blocks_to_restore("a") == num_distinct
    assert stage.tiers.begin_in("a")
    assert [outcome.num_blocks for outcome in stage.settle()] == [num_distinct]

    assert all(np.array_equal(stage.content(each), old) for each, old in zip(owners, before, strict=True))
    assert [a == b for a, b in zip(*map(stage.manager.table, owners), strict=False)] == shared
    assert stage.tiers.estimate_seconds(4) is not None
    stage.tiers.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("host_blocks", [20, 3])
def test_prefixes_come_back_bit_by_bit_from_host_and_disk(dtype: str, host_blocks: int, tmp_path: Path) -> None:
    stage = Cached(dtype, tmp_path, host_blocks)
    owner = stage.open("a", TOKENS)
    hashes = stage.store(owner, TOKENS)
    before = stage.content(owner)
    stage.manager.release(owner, "finished")
    stage.take_every_block()
    stage.scribble()

    hits = stage.tiers.find(hashes)
    assert sum(len(hit.hashes) for hit in hits) == 8
    assert {hit.tier for hit in hits} == ({"host"} if host_blocks == 20 else {"host", "disk"})
    again = stage.open("c", TOKENS)
    stage.tiers.begin_restore("c", 0, 0, hits)
    (outcome,) = stage.settle()

    assert (outcome.num_blocks, outcome.error) == (8, "")
    assert np.array_equal(stage.content(again), before)
    stage.ledger.catch_up()
    stage.tiers.close()


def test_the_disk_tier_outlives_its_process_but_not_its_weights(tmp_path: Path) -> None:
    first = Cached("float32", tmp_path, 1)
    owner = first.open("a", TOKENS)
    hashes = first.store(owner, TOKENS)
    before = first.content(owner)
    first.manager.release(owner, "finished")
    first.take_every_block()
    first.tiers.close()

    second = Cached("float32", tmp_path, 1)
    second.scribble()
    hits = second.tiers.find(hashes)
    found = sum(len(hit.hashes) for hit in hits)
    assert found >= 7
    again = second.open("c", TOKENS)
    second.tiers.begin_restore("c", 0, 0, hits)
    (outcome,) = second.settle()
    assert outcome.num_blocks == found
    assert np.array_equal(second.content(again)[:found], before[:found])
    second.tiers.close()

    third = Cached("float32", tmp_path, 1, weights="other")
    assert third.tiers.find(hashes) == []
    assert third.tiers.states()[1].ignored_files == {"stale": found}
    third.tiers.close()
