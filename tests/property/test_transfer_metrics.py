"""Metrics of transfers equal what the worker really moved, whatever fails on the way."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import structlog
from fault_injection import TIER_POINTS, FaultPlan, FaultRun

from kvwatch.ledger.mirror import Mirror
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.clock import SystemClock
from kvwatch_engine.memory.tiers.tiers import MemoryTiers
from kvwatch_engine.memory.tiers.worker import Job

NEVER = 1_000_000
ALL_OR_NOTHING = ("out", "in")
"""A request of which a block is missing is computed again: what did arrive is of no use, and does not count."""


class WorkerWatch:
    """Notes every job: what it was begun for, and what became of it. Knows no event."""

    def __init__(self, run: FaultRun) -> None:
        self.jobs: list[tuple[str, Job]] = []
        self._to_device = ""
        self._num_unread = 0
        tiers = run.core.tiers
        assert isinstance(tiers, MemoryTiers)
        self.block_bytes = tiers._block_bytes
        for name, direction in {"begin_in": "in", "begin_restore": "restore"}.items():
            setattr(tiers, name, self._during(direction, getattr(tiers, name)))
        submit = tiers._worker.submit

        def noted(job: Job) -> None:
            way = "out" if job.source is run.device else self._to_device if job.target is run.device else "offload"
            self.jobs.append((way, job))
            submit(job)

        tiers._worker.submit = noted  # type: ignore[method-assign]
        tiers._offload._device = _CountedReads(run.device, self)  # type: ignore[assignment]

    def note_unread(self) -> None:
        """Blocks that were evicted could not be read: nothing was begun for them."""
        self._num_unread += 1

    def _during(self, direction: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*args: Any) -> Any:
            self._to_device = direction
            return method(*args)

        return called

    def moved(self) -> Counter[str]:
        """Return the blocks that arrived, by direction."""
        found: Counter[str] = Counter()
        for direction, job in self.jobs:
            is_whole = job.num_done == len(job.source_keys)
            found[direction] += job.num_done if is_whole or direction not in ALL_OR_NOTHING else 0
        return found

    def seconds(self) -> dict[str, list[float]]:
        """Return how long the jobs took that brought anything, by direction."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for direction, job in self.jobs:
            is_whole = job.num_done == len(job.source_keys)
            if job.num_done and (is_whole or direction not in ALL_OR_NOTHING):
                found[direction].append(job.duration_ns / 1e9)
        return found

    def failures(self) -> Counter[str]:
        """Return the jobs that did not bring everything, or for which nothing could be read, by reason."""
        found = Counter(job.reason for _, job in self.jobs if job.num_done < len(job.source_keys))
        return found + Counter(copy=self._num_unread)


class _CountedReads:
    """The device as the engine thread reads it when it evicts."""

    def __init__(self, device: Any, watch: WorkerWatch) -> None:
        self._device = device
        self._watch = watch

    def read(self, keys: Any, out: Any) -> None:
        try:
            self._device.read(keys, out)
        except RuntimeError:
            self._watch.note_unread()
            raise


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.mark.parametrize("is_lasting", [False, True])
@pytest.mark.parametrize(
    ("point", "number"),
    [("step", NEVER), ("host transfer", 2), ("host transfer", 9), ("host memory", 3), ("disk write", 4),
     ("disk read", 1), ("disk read", 6)],
)  # fmt: skip
def test_metrics_of_transfers_equal_what_the_worker_moved(
    point: str, number: int, is_lasting: bool, tmp_path: Path
) -> None:
    watches: list[WorkerWatch] = []
    mirror = Mirror(SystemClock(), 0)

    def inject(run: FaultRun) -> None:
        TIER_POINTS[point](run)
        watches.append(WorkerWatch(run))
        mirror.load(run.core.snapshot())

    run = FaultRun(inject, FaultPlan(number, is_lasting), tmp_path)
    outcome = run.run()
    mirror.apply(outcome.events)
    mirror.publish(run.log.now_ns)

    (watch,) = watches
    counters = {(sample.metric, sample.labels): sample.value for sample in mirror.view.counters}
    moved = watch.moved()
    assert moved["offload"] > 0 or is_lasting
    for direction in ("out", "in", "offload", "restore"):
        assert counters.get((m.SWAP_BLOCKS, (direction,)), 0) == moved[direction]
        assert counters.get((m.SWAP_BYTES, (direction,)), 0) == moved[direction] * watch.block_bytes
    histograms = {sample.labels[0]: sample for sample in mirror.view.histograms if sample.metric is m.SWAP_SECONDS}
    for direction, seconds in watch.seconds().items():
        assert histograms[direction].count == len(seconds)
        assert histograms[direction].sum == pytest.approx(sum(seconds))
    told = {labels[0]: count for (metric, labels), count in counters.items() if metric is m.TRANSFER_FAILURES and count}
    begun = {reason: count for reason, count in told.items() if reason not in ("no_room", "missing")}
    assert begun == watch.failures(), "what could not even begin has reasons of its own"
    assert (point == "step") or begun, "nothing failed"
