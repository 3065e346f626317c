"""A short life of an engine with a host and a disk tier, in which every event of a transfer happens at least once.

Beside `kvwatch.derive.scenario`, whose engine has neither. Pools: 8 blocks on the device, 4 in the host, 2 on the disk.

    step 1   `a` is prefilled and forks; it is swapped out in favour of nobody
    step 2   it has arrived in the host; it comes back, its sequences share as before
    step 3   `a` ends; two of its blocks are evicted: one goes to the host, the other finds no room
    step 4   `b` hits the block in the host; another one on the disk cannot be read
    step 5   `b` is swapped out, which fails: it is recomputed, and ends
"""

from collections.abc import Iterator

from kvwatch.derive.scenario import MS, START_NS, ScenarioClock
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, TierState

NUM_BLOCKS = {"device": 9, "host": 5, "disk": 3}
BLOCK_SIZE = 4
BLOCK_BYTES = 4096


def opening_tier_snapshot() -> EngineSnapshot:
    """Return the state of the engine before its first event: one prefix is on the disk."""
    tiers = [TierState(tier, n, [0] * n, [None] * n, [0] * n) for tier, n in NUM_BLOCKS.items()]
    disk = TierState("disk", 3, [0] * 3, [None, _hash(9), None], [0, BLOCK_SIZE, 0], {"stale": 2})
    return EngineSnapshot(
        seq=0,
        step=0,
        time_ns=START_NS,
        block_size_tokens=BLOCK_SIZE,
        block_bytes=BLOCK_BYTES,
        watermark_blocks=0,
        max_queued_requests=16,
        max_queued_tokens=1024,
        tiers=[*tiers[:2], disk],
        sequences=[],
        requests=[],
    )


def play_tiers(log: EventLog, clock: ScenarioClock) -> None:
    """Append the scenario to a log made with this clock."""
    for step, events in enumerate((_step_1, _step_2, _step_3, _step_4, _step_5), start=1):
        log.begin(step)
        for event in events():
            clock.now_ns += MS
            log.begin(step)
            log.append(event)


def _hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _step_1() -> Iterator[Event]:
    yield ev.RequestQueued(request="a", prompt_tokens=10, num_sequences=2, queued_ns=START_NS)
    yield ev.BlocksAllocated("a", 0, [1, 2, 3], "prefill")
    yield _admitted("a", 10)
    yield ev.StepScheduled(["a"], [10], 10, 1, [1, 2, 3], [4, 4, 2])
    yield ev.BlocksStored([_hash(1), _hash(2)], [1, 2], None, request="a")
    yield ev.SequenceForked("a", 0, 1, 3)
    yield ev.FirstToken("a", 20 * MS)
    yield ev.BlocksAllocated("a", 0, [1, 2, 3], "swap", "host")
    yield ev.TransferStarted(0, "swap_out", "a", 3, "device", "host")
    yield ev.RequestPreempted("a", "swap", "blocks", 3, 10, "")
    yield _completed((3, 0, 5, 6), (0, 1))


def _step_2() -> Iterator[Event]:
    yield ev.SwappedOut(0, "a", [1, 2, 3], [1, 2, 3], [4, 4, 2], 3 * BLOCK_BYTES, 2 * MS, 1 * MS)
    yield ev.BlocksReleased("a", 0, [3, 2, 1], "preempted")
    yield ev.BlocksReleased("a", 1, [3, 2, 1], "preempted")
    yield ev.BlocksAllocated("a", 0, [4, 5, 6], "restore")
    yield ev.BlocksShared("a", 1, [4, 5, 6])
    yield ev.TransferStarted(1, "swap_in", "a", 3, "host", "device")
    yield ev.SwappedIn(1, "a", [1, 2, 3], [4, 5, 6], [4, 4, 2], 3 * BLOCK_BYTES, 3 * MS, 0)
    yield ev.BlocksReleased("a", 0, [3, 2, 1], "restored", "host")
    yield ev.RequestResumed("a", "swap", 10 * MS, 0, 0)
    yield _completed((3, 2, 3, 6), (1, 0))


def _step_3() -> Iterator[Event]:
    yield ev.BlocksReleased("a", 0, [6, 5, 4], "finished")
    yield ev.BlocksReleased("a", 1, [6, 5, 4], "finished")
    yield _finished("a", num_preemptions=1)
    yield ev.RequestQueued(request="b", prompt_tokens=13, num_sequences=1, queued_ns=START_NS)
    yield ev.BlocksEvicted([_hash(2), _hash(1)], [2, 1], [9 * MS] * 2, [5 * MS] * 2, [0, 0], "pressure", "b")
    yield ev.BlocksAllocated("", 0, [3], "offload", "host")
    yield ev.TransferFailed(-1, "offload", "", "no_room", 1, "device", "host")
    yield ev.TransferStarted(2, "offload", "", 1, "device", "host")
    yield ev.Offloaded(2, [3], [BLOCK_SIZE], BLOCK_BYTES, MS, 0, "device", "host")
    yield ev.BlocksStored([_hash(1)], [3], None, "host")
    yield ev.BlocksReleased("", 0, [3], "offloaded", "host")
    yield _completed((0, 0, 8, 0), (0, 1))


def _step_4() -> Iterator[Event]:
    yield ev.BlocksAllocated("b", 0, [1, 2, 3, 4], "prefill")
    yield ev.BlocksReused("b", 0, [3], [MS], "host")
    yield ev.TransferStarted(3, "restore", "b", 1, "host", "device")
    yield ev.BlocksReused("b", 0, [1], [MS], "disk")
    yield ev.TransferStarted(4, "restore", "b", 1, "disk", "device")
    yield ev.Restored(3, "b", [3], [1], [BLOCK_SIZE], BLOCK_BYTES, MS, 0, "host")
    yield ev.BlocksReleased("b", 0, [3], "restored", "host")
    yield ev.TransferFailed(4, "restore", "b", "corrupt", 1, "disk", "device")
    yield ev.BlocksReleased("b", 0, [1], "restored", "disk")
    yield ev.BlocksEvicted([_hash(9)], [1], [MS], [MS], [1], "unreadable", "", "disk")
    yield _admitted("b", 13)
    yield ev.StepScheduled(["b"], [9], 9, 1, [2, 3, 4], [4, 4, 1])
    yield ev.FirstToken("b", 20 * MS)
    yield _completed((4, 0, 4, 4), (1, 0))


def _step_5() -> Iterator[Event]:
    yield ev.BlocksEvicted([_hash(1)], [3], [9 * MS], [2 * MS], [1], "pressure", "b", "host")
    yield ev.BlocksAllocated("b", 0, [4, 1, 2, 3], "swap", "host")
    yield ev.TransferStarted(5, "swap_out", "b", 4, "device", "host")
    yield ev.RequestPreempted("b", "swap", "blocks", 4, 13, "")
    yield ev.TransferFailed(5, "swap_out", "b", "copy", 4, "device", "host", "RuntimeError")
    yield ev.BlocksReleased("b", 0, [3, 2, 1, 4], "aborted", "host")
    yield ev.BlocksReleased("b", 0, [4, 3, 2, 1], "preempted")
    yield ev.SwapAbandoned("b", "copy")
    yield _finished("b", num_preemptions=1)
    yield _completed((0, 0, 8, 0), (0, 0))


def _admitted(request: str, prompt_tokens: int) -> ev.RequestAdmitted:
    return ev.RequestAdmitted(request, prompt_tokens, prompt_tokens, 0, 0, MS)


def _finished(request: str, num_preemptions: int) -> ev.RequestFinished:
    return ev.RequestFinished(request, "abort", 10, 1, 0, num_preemptions, 3, MS, MS, 0, 5 * MS)


def _completed(blocks: tuple[int, int, int, int], requests: tuple[int, int]) -> ev.StepCompleted:
    """Blocks are (used, cached, empty, table entries) of the device, requests (running, waiting)."""
    waiting = {"transfer": requests[1]} if requests[1] else {}
    return ev.StepCompleted(MS, 17 * MS, MS, MS, 1, 0, [], [], *blocks, *requests, waiting)
