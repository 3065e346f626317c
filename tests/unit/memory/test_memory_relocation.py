"""How blocks are fitted into a smaller pool, and what the tensors hold afterwards."""

from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_manager, make_pool

from kvwatch.telemetry.events import BlocksEvicted, BlocksRelocated
from kvwatch_engine.contracts.block import BlockHash, BlockId
from kvwatch_engine.contracts.cache import KVCacheSpec
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.block_pool import Owner, StoredRun
from kvwatch_engine.memory.kv_cache import KVCache
from kvwatch_engine.memory.prefix import Prefix
from kvwatch_engine.memory.relocation import plan_relocation
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.runner import ModelRunner

A, B = Owner("a", 0), Owner("b", 0)


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(each) for each in ids]


def test_used_blocks_that_do_not_fit_cannot_be_planned() -> None:
    assert plan_relocation([0, 1, 1, 1], [], num_blocks=3) is None
    assert plan_relocation([0, 1, 1, 1], [], num_blocks=4) is not None


def test_what_lies_beyond_the_limit_goes_to_empty_places_below_it() -> None:
    plan = plan_relocation([0, 1, 0, 0, 2, 1, 0], blocks(6), num_blocks=5)

    assert plan is not None
    assert plan.num_evictions == 0
    assert plan.moves == {5: 2, 6: 3}
    assert plan.kept == (1, 4, 5, 6)


def test_cached_blocks_that_do_not_fit_are_evicted_least_recently_used_first() -> None:
    plan = plan_relocation([0, 1, 0, 0, 0, 0], blocks(2, 5, 3), num_blocks=4)

    assert plan is not None
    assert plan.num_evictions == 1  # block 2, the first in order; its place is then free
    assert plan.moves == {5: 2}
    assert plan.kept == (1, 3, 5)


def test_a_larger_pool_moves_nothing() -> None:
    plan = plan_relocation([0, 1, 0], blocks(2), num_blocks=9)

    assert plan is not None
    assert (plan.moves, plan.num_evictions, plan.kept) == ({}, 0, (1, 2))


def cached_and_used(manager: BlockManager) -> tuple[list[BlockId], list[BlockHash]]:
    """Let `a` come and go, leaving four cached blocks, and `b` hold the two behind them."""
    pool = manager.pool
    assert manager.open(A, Prefix(), 16)
    hashes = [BlockHash(bytes([i]) * 32) for i in range(4)]
    pool.store(list(manager.table(A)), hashes, None, StoredRun(A, 0))
    assert manager.open(B, Prefix(), 8)
    manager.release(A, "finished")
    return list(manager.table(B)), hashes


def test_tables_hashes_and_the_order_of_eviction_follow_the_blocks() -> None:
    manager = make_manager(num_blocks=7)
    pool = manager.pool
    table, hashes = cached_and_used(manager)
    assert table == [5, 6]
    plan = pool.plan_resize(5)
    assert plan is not None

    manager.resize(plan)

    manager.check_integrity()
    assert pool.num_blocks == 5
    assert (pool.num_used, pool.num_cached, pool.num_empty) == (2, 2, 0)
    assert manager.table(B) == [3, 4]  # where the evicted tail of `a` lay
    assert [pool.find(content) for content in hashes] == [1, 2, None, None]
    assert pool.allocate(1, A, "decode") == [2], "released first, so evicted first"


def test_blocks_that_come_new_are_taken_after_those_that_were_there() -> None:
    pool = make_pool(4)
    plan = pool.plan_resize(6)
    assert plan is not None

    pool.resize(plan)

    pool.check_integrity()
    assert pool.allocate(5, A, "prefill") == [1, 2, 3, 4, 5]


def test_evictions_and_moves_are_told_before_anything_else() -> None:
    manager = make_manager(num_blocks=7)
    cursor = manager._log.subscribe("test")
    cached_and_used(manager)
    cursor.read()
    plan = manager.pool.plan_resize(5)
    assert plan is not None

    manager.resize(plan)

    evicted, relocated = cursor.read()
    assert isinstance(evicted, BlocksEvicted)
    assert (evicted.block_ids, evicted.reason, evicted.request) == ([4, 3], "resize", "")
    assert isinstance(relocated, BlocksRelocated)
    assert (relocated.sources, relocated.destinations) == ([5, 6], [3, 4])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_rebuilt_cache_holds_the_kept_blocks_bit_for_bit(dtype: str) -> None:
    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    cache = KVCache(spec, 12)
    cache.blocks.copy_(torch.from_numpy(np.random.default_rng(5).integers(0, 256, cache.blocks.shape, np.uint8)))
    before = cache.blocks.clone()

    smaller = cache.rebuilt(6, np.array([1, 3, 11, 9]), np.array([1, 3, 2, 5]))

    assert smaller.blocks.shape == (6, spec.block_bytes)
    for source, destination in ((1, 1), (3, 3), (11, 2), (9, 5)):
        assert torch.equal(smaller.blocks[destination], before[source])
    assert not smaller.blocks[[0, 4]].any()
    assert torch.equal(cache.blocks, before), "the old one is as it was"


def test_a_runner_whose_new_cache_cannot_be_had_goes_on_with_the_old_one(tmp_path: Path) -> None:
    from tiny_models import make_tiny_model

    model = load_model(str(make_tiny_model("llama", tmp_path)), dtype="float32")
    runner = ModelRunner(model, KVCache(model.cache_spec(8), 8))
    before = runner.kv_cache
    none = np.zeros(0, dtype=np.int64)

    with pytest.raises((MemoryError, RuntimeError, ValueError)):
        runner.rebuild(1 << 48, none, none)

    assert runner.kv_cache is before
    runner.rebuild(4, none, none)
    assert runner.kv_cache.num_blocks == 4
