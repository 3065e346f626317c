"""The ledger follows a pool that gets another size, and does not believe what cannot be."""

from typing import Literal

import pytest

from kvwatch.ledger.ledger import Ledger
from kvwatch.telemetry.events import BlocksAllocated, BlocksRelocated, BlocksStored, PoolRebuilt, StepCompleted
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, TierState

NUM_BLOCKS = 8


def loaded(*events: Event) -> Ledger:
    ledger = Ledger()
    tier = TierState("device", NUM_BLOCKS, [0] * NUM_BLOCKS, [None] * NUM_BLOCKS, [0] * NUM_BLOCKS)
    ledger.load(
        EngineSnapshot(
            seq=0, step=0, time_ns=0, block_size_tokens=4, block_bytes=100, watermark_blocks=1, max_queued_requests=1,
            max_queued_tokens=1, tiers=[tier], sequences=[], requests=[], memory_bytes={"kv": 800, "weights": 5},
            config={"num_blocks": 8, "watermark_blocks": 1, "block_size": 4},
        )
    )  # fmt: skip
    for event in events:
        ledger.apply(event)
    return ledger


def held(*blocks: int) -> BlocksAllocated:
    return BlocksAllocated("r", 0, list(blocks), "prefill")


def rebuilt(new: int, outcome: Literal["resized", "refused", "failed"] = "resized", watermark: int = 1) -> PoolRebuilt:
    return PoolRebuilt(NUM_BLOCKS, new, outcome, 1, watermark)


def faults(ledger: Ledger) -> list[str]:
    """Return what is wrong, with checksums that agree with the ledger."""
    pool = ledger.pool("device")
    counts = (pool.num_used, pool.num_cached, pool.num_empty, pool.num_entries)
    return ledger.check(StepCompleted(0, 0, 0, 0, 0, 0, [], [], *counts, 0, 0, {}))


def test_moved_blocks_keep_tables_hashes_and_filled_slots() -> None:
    ledger = loaded(held(1, 7, 6), BlocksStored([b"h"], [7], None))
    ledger.pool("device").write([7, 6], [4, 2])

    ledger.apply(BlocksRelocated([7, 6], [2, 3]))
    ledger.apply(rebuilt(5, watermark=0))

    pool = ledger.pool("device")
    assert pool.tables == {("r", 0): [1, 2, 3]}
    assert pool.hashes == [None, None, b"h", None, None]
    assert pool.filled_slots.tolist() == [0, 0, 4, 2, 0]
    assert pool.num_filled_slots == 6
    assert (pool.capacity, pool.num_used, pool.num_empty) == (4, 3, 1)
    assert faults(ledger) == []


def test_settings_and_memory_follow() -> None:
    ledger = loaded(rebuilt(20, watermark=3))

    assert ledger.config == {"num_blocks": 20, "watermark_blocks": 3, "block_size": 4}
    assert ledger.limits.watermark_blocks == 3
    assert ledger.memory_bytes == {"kv": 2000, "weights": 5}
    assert ledger.pool("device").num_empty == 19


@pytest.mark.parametrize("outcome", ["refused", "failed"])
def test_what_was_refused_or_failed_changes_nothing(outcome: Literal["refused", "failed"]) -> None:
    ledger = loaded(held(1))
    before = ledger.to_snapshot()

    ledger.apply(rebuilt(3, outcome))

    after = ledger.to_snapshot()
    assert (after.tiers, after.sequences, after.config) == (before.tiers, before.sequences, before.config)


def test_a_move_onto_a_block_that_holds_something_is_a_fault() -> None:
    ledger = loaded(held(1, 7), BlocksRelocated([7], [1]))

    assert faults(ledger)[0] == "block 7 moved to block 1, which was not empty"


def test_a_pool_that_shrinks_over_held_blocks_is_a_fault() -> None:
    ledger = loaded(held(1, 7), rebuilt(5))

    assert faults(ledger)[0] == "the pool shrank to 5 blocks though others held something"
