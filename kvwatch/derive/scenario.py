"""A short life of an engine, always the same, in which every event happens at least once.

The golden exposition is made from it, and tests of exporters use it as a workload that moves every series. The events
obey the law: a ledger that applies them finds nothing wrong. Pool: 8 blocks of 4 tokens beside the null block.

    step 1   two requests arrive; `a` (10 tokens, n=2) is admitted and prefilled; two full blocks are stored; `b` waits
    step 2   `a` forks into two sequences, which copy the shared last block; `b` is admitted and hits a block of `a`;
             each sequence of `a` has a draft of one token: one is accepted, the other is taken back
    step 3   `a` needs a block and there is none: `b` is preempted
    step 4   `a` ends; `b` resumes from the cache
    step 5   the pool gets smaller, which moves a block of `b`, and large again; two other sizes cannot be had;
             the model fails, `b` ends with an error; the cache is cleared; a request is refused;
             `g` is too much for the memory, is swapped out, lost on the way, and late in the end; the pool is laid
             out anew
    a minute passes
    step 6   admission is paused, the watermark changed and changed back; the engine drains; `d` runs with two
             sequences, `e` waits, `f` has come and gone, its block is pinned: the last view is of a busy engine
    the end  `d` and `e` are aborted, the engine stops (`play_end`)
"""

from collections.abc import Iterator
from typing import Literal

from kvwatch.telemetry import events as ev
from kvwatch.telemetry.clock import Clock
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, TierState

MS = 1_000_000
NUM_BLOCKS = 9
BLOCK_SIZE = 4
PAUSE_NS = 61_000 * MS
"""The pause before step 6: longer than the window of minima and maxima."""
START_NS = 5_000 * 1_000 * MS
"""Monotonic time in ns at which the scenario begins."""

_CONFIG: dict[str, float] = {
    "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS,
    "watermark_blocks": 1,
    "max_queued_requests": 16,
}


class ScenarioClock(Clock):
    """A clock that only moves when it is told to. Its Unix time is far from its monotonic one, as in life."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def monotonic_ns(self) -> int:
        """Return the scenario's time in ns."""
        return self.now_ns

    def wall_ns(self) -> int:
        """Return a Unix time in ns, in November 2023."""
        return self.now_ns + 1_700_000_000 * 1_000 * MS


def opening_snapshot() -> EngineSnapshot:
    """Return the state of the engine before its first event."""
    tier = TierState("device", NUM_BLOCKS, [0] * NUM_BLOCKS, [None] * NUM_BLOCKS, [0] * NUM_BLOCKS)
    return EngineSnapshot(
        seq=0,
        step=0,
        time_ns=START_NS,
        block_size_tokens=BLOCK_SIZE,
        block_bytes=4096,
        watermark_blocks=1,
        max_queued_requests=16,
        max_queued_tokens=1024,
        tiers=[tier],
        sequences=[],
        requests=[],
        config=_CONFIG,
        config_drift={"watermark": 0.0, "num_blocks": 0.0},
        memory_bytes={"weights": 65_536, "kv": NUM_BLOCKS * 4096},
    )


def play(log: EventLog, clock: ScenarioClock) -> None:
    """Append the scenario up to step 6 to a log made with this clock, step by step."""
    for step, events in enumerate(_STEPS, start=1):
        if step == len(_STEPS):
            clock.now_ns += PAUSE_NS
        log.begin(step)
        for event in events():
            if isinstance(event, ev.StepCompleted | ev.StepFailed):
                clock.now_ns += 20 * MS
                log.begin(step)
            log.append(event)


def play_end(log: EventLog, clock: ScenarioClock) -> None:
    """Append what follows `play`: the engine stops."""
    clock.now_ns += 5 * MS
    log.begin(len(_STEPS) + 1)
    for event in _end():
        log.append(event)


def _hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _allocated(
    request: str, block_ids: list[int], reason: Literal["prefill", "decode", "cow"], sequence: int = 0
) -> ev.BlocksAllocated:
    return ev.BlocksAllocated(request=request, sequence=sequence, block_ids=block_ids, reason=reason)


def _scheduled(requests: list[str], num_tokens: list[int], written: dict[int, int]) -> ev.StepScheduled:
    return ev.StepScheduled(
        requests=requests,
        num_tokens=num_tokens,
        total_tokens=sum(num_tokens),
        num_sequences=len(requests),
        written_block_ids=list(written),
        filled_slots=list(written.values()),
    )


def _completed(
    blocks: tuple[int, int, int, int],
    requests: tuple[int, int],
    *,
    waiting_for: dict[str, int] | None = None,
    generated: int = 1,
    recomputed: int = 0,
    inter_token: dict[int, int] | None = None,
) -> ev.StepCompleted:
    """Blocks are (used, cached, empty, table entries), requests (running, waiting)."""
    used, cached, empty, entries = blocks
    return ev.StepCompleted(
        schedule_ns=1 * MS,
        forward_ns=17 * MS,
        sample_ns=1 * MS,
        apply_ns=MS // 2,
        generated_tokens=generated,
        recomputed_tokens=recomputed,
        inter_token_ns=list(inter_token or {}),
        inter_token_counts=list((inter_token or {}).values()),
        num_used_blocks=used,
        num_cached_blocks=cached,
        num_empty_blocks=empty,
        num_table_entries=entries,
        num_running=requests[0],
        num_waiting=requests[1],
        waiting_for=waiting_for or {},
        build_ns=MS // 4,
        linear_ns=9 * MS,
        attention_ns=3 * MS,
        rotary_ns=MS // 4,
        norm_ns=MS // 4,
        activation_ns=MS // 2,
        logits_ns=3 * MS,
    )


def _admitted(
    request: str, prompt_tokens: int, hit_tokens: int, queue_ms: int, *, regretted_tokens: int = 0
) -> ev.RequestAdmitted:
    return ev.RequestAdmitted(
        request=request,
        prompt_tokens=prompt_tokens,
        queried_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        granularity_lost_tokens=prompt_tokens % BLOCK_SIZE,
        queue_ns=queue_ms * MS,
        regretted_tokens=regretted_tokens,
    )


def _rebuilt(
    old_num_blocks: int,
    new_num_blocks: int,
    outcome: Literal["resized", "refused", "failed", "rebuilt"],
    duration_ns: int | None,
    *,
    reason: str = "",
    error: str = "",
) -> ev.PoolRebuilt:
    return ev.PoolRebuilt(
        old_num_blocks=old_num_blocks,
        new_num_blocks=new_num_blocks,
        outcome=outcome,
        duration_ns=duration_ns,
        watermark_blocks=1,
        reason=reason,
        error=error,
    )


def _step_1() -> Iterator[Event]:
    yield ev.RequestQueued(
        request="a",
        prompt_tokens=10,
        num_sequences=2,
        queued_ns=START_NS,
        operation="chat",
        is_stream=True,
        trace_parent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        tenant="blue",
        max_tokens=4,
        temperature=0.7,
        seed=7,
    )
    yield ev.RequestQueued(request="b", prompt_tokens=9, num_sequences=1, queued_ns=START_NS)
    yield _allocated("a", [1, 2, 3], "prefill")
    yield _admitted("a", 10, 0, 1)
    yield ev.AllocationFailed(request="b", needed=9, available=4, reason="admission")
    yield _scheduled(["a"], [10], {1: 4, 2: 4, 3: 2})
    yield ev.BlocksStored(hashes=[_hash(1), _hash(2)], block_ids=[1, 2], parent=None, request="a")
    yield ev.FirstToken(request="a", ttft_ns=20 * MS)
    yield _completed((3, 0, 5, 3), (1, 1), waiting_for={"blocks": 1}, generated=2)


def _step_2() -> Iterator[Event]:
    yield ev.SequenceForked(request="a", parent=0, child=1, num_blocks=3)
    yield _allocated("a", [4], "cow", 1)
    yield ev.BlocksCopied(request="a", sequence=1, sources=[3], destinations=[4])
    yield ev.BlocksReleased(request="a", sequence=1, block_ids=[3], reason="cow")
    yield ev.BlocksReused(request="b", sequence=0, block_ids=[1], gaps_ns=[])
    yield _allocated("b", [5, 6, 7, 8], "prefill")
    yield _admitted("b", 17, 4, 21)
    yield _scheduled(["a", "a", "b"], [2, 2, 13], {3: 4, 4: 4, 5: 4, 6: 4, 7: 4, 8: 1})
    yield ev.BlocksStored(
        hashes=[_hash(5), _hash(6), _hash(7)], block_ids=[5, 6, 7], parent=_hash(1), request="b", first_index=1
    )
    yield ev.FirstToken(request="b", ttft_ns=41 * MS)
    yield ev.DraftsVerified(
        requests=["a", "a"],
        proposed=[1, 1],
        accepted=[1, 0],
        num_drafts=2,
        accepted_tokens=1,
        rejected_tokens=1,
        unwritten_block_ids=[4],
        filled_slots=[3],
    )
    yield _completed((8, 0, 0, 11), (2, 0), generated=4, inter_token={20 * MS: 2, 0: 1})


def _step_3() -> Iterator[Event]:
    yield ev.AllocationFailed(request="a", needed=1, available=0, reason="growth")
    yield ev.BlocksReleased(request="b", sequence=0, block_ids=[8, 7, 6, 5, 1], reason="preempted")
    yield ev.RequestPreempted(
        request="b", mode="recompute", reason="blocks", num_blocks=4, tokens_at_risk=17, beneficiary="a"
    )
    yield _allocated("a", [8], "decode")
    yield _scheduled(["a", "a"], [1, 1], {8: 1, 4: 4})
    yield _completed((5, 3, 0, 7), (1, 1), waiting_for={"blocks": 1}, generated=2, inter_token={20 * MS: 2})


def _step_4() -> Iterator[Event]:
    yield ev.BlocksReleased(request="a", sequence=0, block_ids=[8, 3, 2, 1], reason="finished")
    yield ev.BlocksReleased(request="a", sequence=1, block_ids=[4, 2, 1], reason="finished")
    yield _finished("a", "length", prompt=10, generated=7, peak_blocks=5, times_ms=(1, 19, 40, 60))
    yield ev.BlocksReused(request="b", sequence=0, block_ids=[1, 5, 6], gaps_ns=[MS // 2, 20 * MS, 20 * MS])
    yield ev.BlocksEvicted(
        hashes=[_hash(7)],
        block_ids=[7],
        ages_ns=[40 * MS],
        idles_ns=[20 * MS],
        hits=[0],
        reason="pressure",
        request="b",
    )
    yield _allocated("b", [8, 3], "prefill")
    yield ev.RequestResumed(request="b", mode="recompute", away_ns=20 * MS, hit_tokens=12, recompute_tokens=5)
    yield _scheduled(["b"], [6], {8: 4, 3: 2})
    yield ev.BlocksDuplicated(request="b", sequence=0, block_ids=[8], originals=[2])
    yield ev.EngineStalled(stuck_ns=31_000 * MS, num_running=1, num_waiting=0)
    yield ev.RequestRecovered(request="b", recompute_ns=20 * MS)
    yield _completed((5, 1, 2, 5), (1, 0), recomputed=5, inter_token={40 * MS: 1})


def _step_5() -> Iterator[Event]:
    yield ev.BlocksRelocated(sources=[8], destinations=[4])
    yield _rebuilt(NUM_BLOCKS, NUM_BLOCKS - 1, "resized", 3 * MS, reason="the night is quiet")
    yield _rebuilt(NUM_BLOCKS - 1, 5, "refused", None, error="running requests hold 5 blocks")
    yield _rebuilt(NUM_BLOCKS - 1, 90_000, "failed", 7 * MS, error="MemoryError")
    yield _rebuilt(NUM_BLOCKS - 1, NUM_BLOCKS, "resized", 2 * MS, reason="morning")
    yield _allocated("b", [7], "decode")
    yield ev.OutOfMemory(num_tokens=1, num_sequences=1)
    yield ev.StepFailed(error="OutOfMemoryError")
    yield ev.BlocksReleased(request="b", sequence=0, block_ids=[7, 3, 4, 6, 5, 1], reason="aborted")
    yield _finished("b", "error", prompt=17, generated=2, peak_blocks=6, times_ms=(21, 20, 40, 81))
    yield ev.RequestRejected(request="c", reason="too_long")
    yield ev.BlocksEvicted(
        hashes=[_hash(2), _hash(1), _hash(5), _hash(6)],
        block_ids=[2, 1, 5, 6],
        ages_ns=[100 * MS, 100 * MS, 80 * MS, 80 * MS],
        idles_ns=[40 * MS, 0, 0, 0],
        hits=[0, 2, 1, 1],
        reason="reset",
        request="",
    )
    yield ev.CacheCleared(block_ids=[])
    yield from _swapped()
    yield _completed((0, 0, 8, 0), (0, 0), generated=0)


def _swapped() -> Iterator[Event]:
    queued_ns = START_NS + 100 * MS
    yield ev.RequestQueued(request="g", prompt_tokens=6, num_sequences=1, queued_ns=queued_ns, priority=2)
    yield ev.WaitReasonsChanged(requests=["g"], reasons=["sequences"])
    yield _allocated("g", [1, 2], "prefill")
    yield _admitted("g", 6, 0, 1)
    yield _scheduled(["g"], [6], {1: 4, 2: 2})
    yield ev.OutOfMemory(num_tokens=6, num_sequences=1)
    yield ev.StepFailed(error="OutOfMemoryError", unwritten_block_ids=[1, 2], filled_slots=[0, 0])
    yield ev.BlocksReleased(request="g", sequence=0, block_ids=[2, 1], reason="preempted")
    yield ev.RequestPreempted(
        request="g",
        mode="swap",
        reason="blocks",
        num_blocks=2,
        tokens_at_risk=0,
        beneficiary="b",
        recompute_estimate_ns=4 * MS,
        swap_estimate_ns=2 * MS,
    )
    yield ev.WaitReasonsChanged(requests=["g"], reasons=["transfer"])
    yield ev.SwapAbandoned(request="g", reason="copy")
    yield ev.WaitReasonsChanged(requests=["g"], reasons=["blocks"])
    yield _finished("g", "deadline", prompt=6, generated=0, peak_blocks=2, times_ms=(1, None, None, None))
    yield ev.BlocksLaidOut(num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_SIZE, block_bytes=4096)
    yield _rebuilt(NUM_BLOCKS, NUM_BLOCKS, "rebuilt", 5 * MS, reason="other blocks, and back")


def _live_changes() -> Iterator[Event]:
    """An operator tries another watermark under load, and holds back waiting requests meanwhile."""
    yield ev.AdmissionPaused(actor="night shift", reason="try another watermark", duration_ns=60_000 * MS)
    for old, new, blocks in (("1", "2", 2), ("2", "1", 1)):
        yield ev.ConfigChanged(
            actor="night shift",
            key="watermark",
            old=old,
            new=new,
            declared="1",
            reason="try another watermark",
            config={**_CONFIG, "watermark_blocks": blocks},
        )
    yield ev.AdmissionResumed(actor="", reason="its time is over", paused_ns=60_000 * MS)
    yield ev.AdapterLoaded(adapter="sql", load_id="5a", rank=8, num_bytes=2048, total_bytes=2048)
    yield ev.AdapterLoaded(adapter="poet", load_id="5b", rank=4, num_bytes=1024, total_bytes=3072)
    yield ev.AdapterFreed(adapter="sql", load_id="5a", num_bytes=2048, total_bytes=1024, in_use_ns=30 * MS)


def _step_6() -> Iterator[Event]:
    yield from _live_changes()
    yield ev.RequestQueued(request="d", prompt_tokens=9, num_sequences=2, queued_ns=START_NS + PAUSE_NS + 100 * MS)
    yield ev.RequestQueued(request="f", prompt_tokens=4, num_sequences=1, queued_ns=START_NS + PAUSE_NS + 100 * MS)
    yield ev.RequestQueued(request="e", prompt_tokens=5, num_sequences=1, queued_ns=START_NS + PAUSE_NS + 100 * MS)
    yield ev.DrainStarted(grace_ns=30_000 * MS)
    yield ev.PrefixMismatched(request="d", block_hash=_hash(99), index=0)
    yield _allocated("d", [2, 1, 5], "prefill")
    yield _admitted("d", 9, 0, 1, regretted_tokens=4)
    yield _allocated("f", [6], "prefill")
    yield _admitted("f", 4, 0, 1)
    yield _scheduled(["d", "f"], [9, 4], {2: 4, 1: 4, 5: 1, 6: 4})
    yield ev.BlocksStored(hashes=[_hash(11), _hash(12)], block_ids=[2, 1], parent=None, request="d")
    yield ev.BlocksStored(hashes=[_hash(16)], block_ids=[6], parent=None, request="f")
    yield ev.FirstToken(request="d", ttft_ns=20 * MS)
    yield ev.SequenceForked(request="d", parent=0, child=1, num_blocks=3)
    yield ev.FirstToken(request="f", ttft_ns=20 * MS)
    yield ev.BlocksReleased(request="f", sequence=0, block_ids=[6], reason="finished")
    yield ev.PrefixPinned(pin="pin-1", hashes=[_hash(16)], num_tokens=4, actor="ops", reason="system prompt")
    yield ev.PrefixPinned(pin="pin-2", hashes=[_hash(11), _hash(16)], num_tokens=8)
    yield ev.PrefixUnpinned(pin="pin-2", hashes=[_hash(11), _hash(16)], cause="asked", actor="ops")
    yield _finished("f", "stop", prompt=4, generated=1, peak_blocks=1, times_ms=(1, 19, 0, 20))
    yield _completed((3, 1, 4, 6), (1, 1), waiting_for={"sequences": 1}, generated=3)


def _end() -> Iterator[Event]:
    yield ev.BlocksReleased(request="d", sequence=0, block_ids=[5, 1, 2], reason="aborted")
    yield ev.BlocksReleased(request="d", sequence=1, block_ids=[5, 1, 2], reason="aborted")
    yield _finished("d", "abort", prompt=9, generated=2, peak_blocks=3, times_ms=(1, 19, 0, 20))
    yield ev.RequestFinished(
        request="e",
        reason="abort",
        prompt_tokens=5,
        generated_tokens=0,
        cached_tokens=0,
        num_preemptions=0,
        peak_blocks=None,
        queue_ns=None,
        prefill_ns=None,
        decode_ns=None,
        end_to_end_ns=None,
    )
    yield ev.EngineEnded(reason="stopped")


def _finished(
    request: str,
    reason: Literal["length", "error", "stop", "abort", "deadline"],
    *,
    prompt: int,
    generated: int,
    peak_blocks: int,
    times_ms: tuple[int, int | None, int | None, int | None],
) -> ev.RequestFinished:
    queue, prefill, decode, total = (None if each is None else each * MS for each in times_ms)
    return ev.RequestFinished(
        request=request,
        reason=reason,
        prompt_tokens=prompt,
        generated_tokens=generated,
        cached_tokens=0,
        num_preemptions=1 if request in ("b", "g") else 0,
        peak_blocks=peak_blocks,
        queue_ns=queue,
        prefill_ns=prefill,
        decode_ns=decode,
        end_to_end_ns=total,
        recomputed_tokens=5 if request == "b" else 0,
        reasons=["abort", "abort"] if request == "d" else [],
        error={"error": "OutOfMemoryError", "deadline": "DeadlineExceeded"}.get(reason, ""),
        tenant="blue" if request == "a" else "",
        draft_tokens=2 if request == "a" else 0,
        accepted_draft_tokens=1 if request == "a" else 0,
    )


_STEPS = (_step_1, _step_2, _step_3, _step_4, _step_5, _step_6)
