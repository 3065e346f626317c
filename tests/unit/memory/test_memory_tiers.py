"""The tiers behind the device, case by case: what is told, what is held until when, and what a failure costs."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from builders import Recorder
from openai_server import wait_until
from tier_faults import FaultyFiles
from tier_stage import BLOCK_BYTES, BLOCK_SIZE, TierStage, content_of, hashes_of

from kvwatch.errors import ConfigError
from kvwatch.telemetry.events import (
    BlocksReleased,
    Offloaded,
    Restored,
    SwappedIn,
    SwappedOut,
    TransferFailed,
    TransferStarted,
)
from kvwatch_engine.contracts.cache import BlockLayout
from kvwatch_engine.contracts.tiers import TransferKind, TransferOutcome
from kvwatch_engine.memory.block_pool import Owner, StoredRun
from kvwatch_engine.memory.prefix import Prefix
from kvwatch_engine.memory.tiers.levels import FAILURES_BEFORE_PAUSE
from kvwatch_engine.memory.tiers.staging import StagingRing
from kvwatch_engine.memory.tiers.stores import plain_memory

A, B = Owner("a", 0), Owner("b", 0)
TOKENS = list(range(6 * BLOCK_SIZE))


def compute(stage: TierStage, owner: Owner, tokens: list[int]) -> None:
    """Give a sequence blocks, write what it holds, and let its full blocks be found."""
    assert stage.manager.open(owner, Prefix(), len(tokens))
    stage.manager.record_written(owner, 0, len(tokens))
    table, hashes = stage.manager.table(owner), hashes_of(tokens)
    for index, block in enumerate(table):
        stage.memory[block] = content_of(tokens[: (index + 1) * BLOCK_SIZE])
    stage.manager.pool.store(table[: len(hashes)], hashes, None, StoredRun(owner, 0))


def is_right(stage: TierStage, owner: Owner, tokens: list[int]) -> bool:
    expected = [content_of(tokens[: (i + 1) * BLOCK_SIZE]) for i in range(len(stage.manager.table(owner)))]
    return bool(np.array_equal(stage.memory[stage.manager.table(owner)], np.stack(expected)))


def fill(stage: TierStage, tokens: list[int] = TOKENS, name: str = "filler") -> None:
    """Compute a prompt, let it go, and evict all of it block by block, with time for the tiers in between."""
    compute(stage, Owner(name, 0), tokens)
    stage.manager.release(Owner(name, 0), "finished")
    owners = [Owner(f"{name}-{number}", 0) for number in range(stage.manager.pool.capacity)]
    for owner in owners:
        assert stage.manager.open(owner, Prefix(), 1)
        settle(stage)
    for owner in owners:
        stage.manager.release(owner, "finished")


def settle(stage: TierStage) -> list[TransferOutcome]:
    stage.carry_out()
    outcomes = stage.tiers.poll()
    stage.check_integrity()
    return outcomes


def outcomes_of(stage: TierStage) -> list[TransferOutcome]:
    """Wait for the transfers of a worker that moves by itself."""
    outcomes: list[TransferOutcome] = []

    def has_ended() -> bool:
        outcomes.extend(stage.tiers.poll())
        return bool(outcomes)

    wait_until(has_ended, 20)
    return outcomes


def failures(recorder: Recorder) -> list[tuple[str, str, int]]:
    return [(e.kind, e.reason, e.num_blocks) for e in recorder.drain() if isinstance(e, TransferFailed)]


# ---------------------------------------------------------------- swap


def test_blocks_stay_with_a_victim_until_they_have_been_read() -> None:
    stage = TierStage()
    recorder = Recorder(stage.log)
    compute(stage, A, TOKENS)

    stage.tiers.begin_out("a")
    assert stage.tiers.poll() == []
    assert (stage.manager.pool.num_used, stage.tiers.num_in_flight) == (6, 1)
    assert settle(stage) == [TransferOutcome("a", TransferKind.SWAP_OUT, 6)]

    assert (stage.manager.pool.num_used, stage.tiers.num_in_flight) == (0, 0)
    stage.memory[:] = 0
    assert stage.tiers.begin_in("a")
    assert settle(stage) == [TransferOutcome("a", TransferKind.SWAP_IN, 6)]
    assert is_right(stage, A, TOKENS)
    out, back = (next(e for e in recorder.drain() if isinstance(e, cls)) for cls in (SwappedOut, SwappedIn))
    assert out.num_bytes == back.num_bytes == 6 * BLOCK_BYTES
    assert out.destinations == back.sources
    assert [e.kind for e in recorder.events if isinstance(e, TransferStarted)] == ["swap_out", "swap_in"]


def test_a_folder_that_is_gone_when_blocks_are_laid_out_anew_takes_no_other_tier_with_it(tmp_path: Path) -> None:
    """The old layout could not be had again either: swaps went to a worker that had stopped, and never ended."""
    folder = tmp_path / "tier"
    stage = TierStage(host_blocks=6, disk_blocks=6, folder=folder, is_threaded=True)
    shutil.rmtree(folder)
    folder.write_text("somebody's file")

    for _ in range(2):
        with pytest.raises(ConfigError, match="a folder that this user may write to"):
            stage.tiers.lay_out(BlockLayout(2 * BLOCK_SIZE, "auto", "float32", 2 * BLOCK_BYTES))

    assert stage.tiers.block_size == BLOCK_SIZE
    assert [(len(state.ref_counts), sum(state.ref_counts)) for state in stage.tiers.states()] == [(7, 0), (7, 0)]
    compute(stage, A, TOKENS)
    stage.tiers.begin_out("a")
    assert outcomes_of(stage) == [TransferOutcome("a", TransferKind.SWAP_OUT, 6)]
    assert stage.tiers.begin_in("a")
    assert outcomes_of(stage) == [TransferOutcome("a", TransferKind.SWAP_IN, 6)]
    assert is_right(stage, A, TOKENS)
    stage.tiers.close()
    assert folder.read_text() == "somebody's file"


def test_there_is_no_room_for_more_than_the_host_holds() -> None:
    stage = TierStage(host_blocks=5)
    compute(stage, A, TOKENS)
    assert not stage.tiers.can_take("a")
    assert not TierStage(host_blocks=0, disk_blocks=0).tiers.can_take("a")


def test_swapping_in_is_all_or_nothing() -> None:
    stage = TierStage(num_blocks=9)
    compute(stage, A, TOKENS)
    stage.tiers.begin_out("a")
    settle(stage)
    compute(stage, B, list(range(50, 50 + 3 * BLOCK_SIZE)))
    before = stage.snapshot()

    assert stage.tiers.num_blocks_to_restore("a") == 6
    assert not stage.tiers.begin_in("a")

    assert stage.snapshot() == before


@pytest.mark.parametrize("which", ["device_fault", "host_fault"])
@pytest.mark.parametrize("way", ["out", "in"])
def test_a_failed_swap_leaves_nothing_behind_and_is_told(which: str, way: str) -> None:
    stage = TierStage()
    recorder = Recorder(stage.log)
    compute(stage, A, TOKENS)
    fault = getattr(stage, which)
    if way == "out":
        fault.arm(1)
    stage.tiers.begin_out("a")
    outcomes = settle(stage)
    if way == "in":
        fault.arm(1)
        assert stage.tiers.begin_in("a")
        outcomes = settle(stage)

    assert outcomes == [TransferOutcome("a", TransferKind(f"swap_{way}"), 0, "copy")]
    swaps = [failure for failure in failures(recorder) if failure[0] != "offload"]
    assert swaps == [(f"swap_{way}", "copy", 6)]
    assert stage.manager.pool.num_used == 0
    assert sum(stage.tiers.states()[0].ref_counts) == 0
    stage.tiers.drop("a")


def test_a_late_transfer_is_given_up_but_its_blocks_are_held_until_it_ends() -> None:
    stage = TierStage(transfer_seconds=5.0)
    recorder = Recorder(stage.log)
    compute(stage, A, TOKENS)
    stage.tiers.begin_out("a")
    stage.clock.advance(6)

    assert stage.tiers.poll() == [TransferOutcome("a", TransferKind.SWAP_OUT, 0, "deadline")]
    assert failures(recorder) == [("swap_out", "deadline", 6)]
    assert list(stage.manager.owners()) == []
    assert stage.manager.pool.num_used == 6, "the worker may be reading them"
    assert settle(stage) == []
    assert stage.manager.pool.num_used == 0


def test_a_dropped_request_gives_its_blocks_back_when_its_transfer_has_ended() -> None:
    stage = TierStage()
    recorder = Recorder(stage.log)
    compute(stage, A, TOKENS)
    stage.tiers.begin_out("a")
    stage.tiers.drop("a")
    assert stage.manager.pool.num_used == 6
    assert settle(stage) == []
    assert stage.manager.pool.num_used == 0
    assert failures(recorder) == [("swap_out", "dropped", 6)]
    released = [e for e in recorder.events if isinstance(e, BlocksReleased)]
    assert {(e.tier, e.reason) for e in released} == {("device", "aborted"), ("host", "aborted")}

    compute(stage, B, TOKENS[:3])
    stage.tiers.begin_out("b")
    settle(stage)
    stage.tiers.drop("b")
    assert sum(stage.tiers.states()[0].ref_counts) == 0
    stage.tiers.drop("b")


@pytest.mark.parametrize("bytes_per_second", [None, 50_000.0])
def test_the_estimate_follows_the_link(bytes_per_second: float | None) -> None:
    stage = TierStage(is_threaded=True, bytes_per_second=bytes_per_second)
    assert stage.tiers.estimate_seconds(6) is None
    compute(stage, A, TOKENS)
    stage.tiers.begin_out("a")
    while stage.tiers.num_in_flight:
        assert stage.tiers.wait(10)
        stage.tiers.poll()

    estimate = stage.tiers.estimate_seconds(6)

    assert estimate is not None
    if bytes_per_second is not None:
        assert estimate >= 2 * 6 * BLOCK_BYTES / bytes_per_second
    stage.tiers.close()
    stage.tiers.close()


# ---------------------------------------------------------------- prefixes


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    stage = TierStage()
    recorder = Recorder(stage.log)
    fill(stage)
    stage.memory[:] = 0
    hits = stage.tiers.find(hashes_of(TOKENS))
    assert [(hit.tier, len(hit.hashes)) for hit in hits] == [("host", 6)]
    assert stage.manager.open(A, Prefix(), len(TOKENS))

    stage.tiers.begin_restore("a", 0, 0, hits)

    assert settle(stage) == [TransferOutcome("a", TransferKind.RESTORE, 6)]
    assert is_right(stage, A, TOKENS)
    assert sum(len(e.destinations) for e in recorder.drain() if isinstance(e, Offloaded)) == 6
    assert [e.from_tier for e in recorder.events if isinstance(e, Restored)] == ["host"]
    assert stage.tiers.find(hashes_of(TOKENS)), "the host keeps it"


def test_bytes_are_saved_before_the_place_is_written_to() -> None:
    stage = TierStage(host_blocks=20)
    compute(stage, A, TOKENS)
    stage.manager.release(A, "finished")
    compute(stage, B, list(range(100, 100 + 8 * BLOCK_SIZE)))  # at once, in every place
    settle(stage)
    stage.manager.release(B, "finished")
    hits = stage.tiers.find(hashes_of(TOKENS))
    assert stage.manager.open(A, Prefix(), len(TOKENS))
    stage.tiers.begin_restore("a", 0, 0, hits)
    (outcome,) = settle(stage)
    assert outcome.num_blocks == 6
    assert is_right(stage, A, TOKENS)


def test_a_restore_over_host_and_disk_ends_before_a_damaged_file(tmp_path: Path) -> None:
    stage = TierStage(host_blocks=3, disk_blocks=10, folder=tmp_path)
    recorder = Recorder(stage.log)
    fill(stage)
    hashes = hashes_of(TOKENS)
    hits = stage.tiers.find(hashes)
    assert [(hit.tier, len(hit.hashes)) for hit in hits] == [("host", 3), ("disk", 3)]
    (path,) = tmp_path.glob(f"blocks/*/{hashes[4].hex()}.kvb")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert stage.manager.open(A, Prefix(), len(TOKENS))
    stage.tiers.begin_restore("a", 0, 0, hits)

    assert settle(stage) == [TransferOutcome("a", TransferKind.RESTORE, 4, "corrupt")]
    assert failures(recorder) == [("restore", "corrupt", 2)]
    assert not path.exists()
    assert [len(hit.hashes) for hit in stage.tiers.find(hashes)] == [3, 1]


def test_what_a_hit_found_stays_though_making_room_pushes_other_blocks_into_a_full_host() -> None:
    stage = TierStage(num_blocks=9, host_blocks=6)
    fill(stage)  # the host is full of it
    compute(stage, B, list(range(100, 100 + 8 * BLOCK_SIZE)))
    stage.manager.release(B, "finished")
    hits = stage.tiers.find(hashes_of(TOKENS))
    stage.tiers.claim("a", 0, hits)
    assert stage.manager.open(A, Prefix(), len(TOKENS)), "which evicts what is cached on the device"
    stage.tiers.begin_restore("a", 0, 0, hits)

    assert settle(stage) == [TransferOutcome("a", TransferKind.RESTORE, 6)]
    assert is_right(stage, A, TOKENS)
    stage.check_integrity()


def test_a_claim_that_came_to_nothing_lets_go_of_its_blocks() -> None:
    stage = TierStage()
    fill(stage)
    hits = stage.tiers.find(hashes_of(TOKENS))
    stage.tiers.claim("a", 0, hits)
    host = stage.tiers.states()[0]
    assert sum(host.ref_counts) == 6

    stage.tiers.end_claim("a", 0)

    assert sum(stage.tiers.states()[0].ref_counts) == 0
    assert stage.tiers.find(hashes_of(TOKENS)) == hits


def test_a_late_restore_writes_only_to_blocks_that_nobody_uses() -> None:
    """What arrives late and what is computed meanwhile need not be equal to the last bit."""
    stage = TierStage(num_blocks=20, transfer_seconds=1.0)
    fill(stage)
    hits = stage.tiers.find(hashes_of(TOKENS))
    stage.tiers.claim("a", 0, hits)
    assert stage.manager.open(A, Prefix(), len(TOKENS))
    old = list(stage.manager.table(A))
    stage.tiers.begin_restore("a", 0, 0, hits)
    stage.clock.advance(2)

    assert stage.tiers.poll() == [TransferOutcome("a", TransferKind.RESTORE, 0, "deadline", is_given_up=True)]
    assert list(stage.manager.owners()) == []
    assert stage.manager.pool.num_used == 6, "the worker may still write there"
    compute(stage, A, TOKENS)
    assert not set(stage.manager.table(A)) & set(old)
    stage.memory[stage.manager.table(A)] ^= 1  # so that another writer would be seen
    before = stage.memory[stage.manager.table(A)].copy()
    assert settle(stage) == []
    assert (stage.memory[stage.manager.table(A)] == before).all()
    assert stage.manager.pool.num_used == 6, "what was held is free, what was opened meanwhile is not"
    stage.check_integrity()


def test_a_restore_that_was_never_told_is_dropped_with_its_table() -> None:
    stage = TierStage()
    fill(stage)
    hits = stage.tiers.find(hashes_of(TOKENS))
    stage.tiers.clear()
    assert stage.manager.open(A, Prefix(), len(TOKENS))
    stage.tiers.begin_restore("a", 0, 0, hits)
    stage.tiers.drop("a")
    assert settle(stage) == []
    assert stage.manager.pool.num_used == 0


@pytest.mark.parametrize("write_errno", [28, 30])
def test_a_disk_that_refuses_is_left_alone_for_a_while_and_the_host_goes_on(tmp_path: Path, write_errno: int) -> None:
    files = FaultyFiles(write_errno)
    stage = TierStage(host_blocks=2, disk_blocks=10, folder=tmp_path, files=files)
    recorder = Recorder(stage.log)
    files.writes.arm(1, is_lasting=True)

    fill(stage)

    assert files.writes.num_failures == FAILURES_BEFORE_PAUSE
    reason = "disk_full" if write_errno == 28 else "disk_write"
    assert failures(recorder) == [("offload", reason, 1)] * FAILURES_BEFORE_PAUSE
    assert [hit.tier for hit in stage.tiers.find(hashes_of(TOKENS))] == ["host"]
    assert sum(stage.tiers.states()[1].ref_counts) == 0


def test_the_disk_holds_no_more_than_it_may(tmp_path: Path) -> None:
    stage = TierStage(host_blocks=0, disk_blocks=4, folder=tmp_path)
    for number in range(3):
        fill(stage, [number, *TOKENS[1:]], f"filler{number}")
    files = list(tmp_path.glob("blocks/*/*.kvb"))
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) <= 4 * (512 + BLOCK_BYTES)


def test_a_reset_forgets_prefixes_everywhere_also_after_a_restart(tmp_path: Path) -> None:
    stage = TierStage(host_blocks=2, disk_blocks=10, folder=tmp_path)
    fill(stage)
    stage.manager.pool.clear_cache()
    stage.tiers.clear()
    settle(stage)
    assert stage.tiers.find(hashes_of(TOKENS)) == []
    stage.tiers.close()

    again = TierStage(host_blocks=2, disk_blocks=10, folder=tmp_path)
    assert again.tiers.find(hashes_of(TOKENS)) == []
    again.tiers.close()


def test_what_is_cached_at_the_end_is_found_by_the_next_engine(tmp_path: Path) -> None:
    stage = TierStage(host_blocks=2, disk_blocks=5, folder=tmp_path)
    compute(stage, A, TOKENS)
    stage.manager.release(A, "finished")
    stage.tiers.close()

    again = TierStage(host_blocks=2, disk_blocks=5, folder=tmp_path)
    assert [len(hit.hashes) for hit in again.tiers.find(hashes_of(TOKENS))] == [5]
    again.tiers.close()


def test_closing_does_not_wait_for_a_slow_link() -> None:
    stage = TierStage(is_threaded=True, bytes_per_second=1.0)
    compute(stage, A, TOKENS)
    stage.tiers.begin_out("a")
    began = time.monotonic()
    stage.tiers.close()
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("sizes", [{"host_bytes": 10}, {"disk_bytes": 10}])
def test_a_tier_smaller_than_a_block_is_refused_with_its_setting(sizes: dict[str, int], tmp_path: Path) -> None:
    setting = "--host-memory" if "host_bytes" in sizes else "--disk-bytes"
    stage = TierStage()
    with pytest.raises(ConfigError, match=setting):
        stage.again(disk_folder=tmp_path if "disk_bytes" in sizes else None, **sizes)


# ---------------------------------------------------------------- staging


def test_a_ring_of_staging_places_is_never_given_twice() -> None:
    ring = StagingRing(plain_memory(5, 8))
    first, second, third = ring.take(2), ring.take(9), ring.take(1)
    assert (first, second, list(third)) == (range(2), range(2, 5), [])
    ring.give_back()
    assert ring.take(5) == range(2)
    ring.give_back()
    assert ring.take(2) == range(2, 4)
    ring.take_back(range(2, 4))
    assert ring.take(1) == range(2, 3)
