"""A short life of a foreign engine as a sidecar sees it, in which every event of a source happens at least once.

Beside `kvwatch.derive.scenario`: what is here can happen in no engine of ours.
"""

from kvwatch.derive.scenario import MS, START_NS, ScenarioClock
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.snapshot import EngineSnapshot, IndexState


def opening_foreign_snapshot() -> EngineSnapshot:
    """Return what is known before the first event: two hashes, of a history that is not known from its beginning."""
    return EngineSnapshot(
        seq=0,
        step=0,
        time_ns=START_NS,
        block_size_tokens=16,
        block_bytes=0,
        watermark_blocks=0,
        max_queued_requests=0,
        max_queued_tokens=0,
        tiers=[],
        sequences=[],
        requests=[],
        indexed=[IndexState("device", "0", [_hash(1), _hash(2)], [1, 2])],
        is_foreign=True,
        is_complete=False,
    )


def play_foreign(log: EventLog, clock: ScenarioClock) -> None:
    """Append the scenario to a log made with this clock. At its end 3 hashes are resident, one of them on the host."""
    for step, event in enumerate(
        (
            ev.BlocksEvicted([_hash(1)], [], [3 * MS], [], [], "removed", ""),
            ev.CacheCleared([]),
            ev.SourceCompleteness(is_complete=True),
            ev.BlocksStored([_hash(3)], [], None),
            ev.SourceGap(num_batches=2),
            ev.SourceReset(reason="restart", is_complete=True),
            ev.BlocksStored([_hash(4), _hash(5)], [], None),
            ev.BlocksStored([_hash(4)], [], None, tier="host"),
        )
    ):
        clock.now_ns += MS
        log.begin(step)
        log.append(event)


def _hash(number: int) -> bytes:
    return number.to_bytes(8, "big")
