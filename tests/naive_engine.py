"""A naive engine for tests of the observatory: it keeps nothing but tables, hashes and what was written.

Everything else (reference counts, block states, totals) is counted anew each time from these, so that it is obviously
right. It emits the events that a real engine would, and answers as an `EngineControl`. Needs the base install only.
"""

import threading
from collections import Counter

from kvwatch.errors import ControlError
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.clock import Clock
from kvwatch.telemetry.events.block import AllocationReason, ReleaseReason
from kvwatch.telemetry.events.request import FinishReason, WaitReason
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, RequestState, SequenceState, TierState

BLOCK_SIZE = 4
MS = 1_000_000


class ManualClock(Clock):
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * MS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns + 1_700_000_000_000 * MS

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


class NaiveEngine:
    """One engine. `lock` is held while it changes, so that a snapshot from another thread is between two steps."""

    def __init__(self, log: EventLog, num_blocks: int = 13) -> None:
        self.log = log
        self.num_blocks = num_blocks
        self.tables: dict[tuple[str, int], list[int]] = {}
        self.hashes: dict[int, bytes] = {}
        self.filled = dict.fromkeys(range(num_blocks), 0)
        self.running: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.swapped: dict[str, int] = {}
        self.reasons: dict[str, WaitReason] = {}
        """What single requests wait for, as far as that was told."""
        self.waiting_for: dict[str, int] = {}
        self.num_named = 0
        self.num_hashed = 0
        self.step_number = 0
        self.last_step_ns: int | None = None
        self.is_answering = True
        self.lock = threading.RLock()

    # ------------------------------------------------------------ EngineControl

    def snapshot(self, timeout_seconds: float = 5.0) -> EngineSnapshot:
        if not self.is_answering:
            raise ControlError(f"no answer within {timeout_seconds} s; is the engine running?")
        with self.lock:
            return self.state()

    def is_alive(self) -> bool:
        return self.is_answering

    def is_ready(self) -> bool:
        return self.is_answering

    # ------------------------------------------------------------ the naive truth

    def references(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    def used(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    def cached(self) -> set[int]:
        return set(self.hashes) - self.used()

    def empty(self) -> set[int]:
        return set(range(1, self.num_blocks)) - self.used() - self.cached()

    def filled_of_used(self) -> int:
        return sum(self.filled[block] for block in self.used())

    def state(self) -> EngineSnapshot:
        blocks = range(self.num_blocks)
        reasons = [reason for reason, number in self.waiting_for.items() for _ in range(number)]
        waits = dict(zip(self.waiting, reasons, strict=False))
        return EngineSnapshot(
            seq=self.log.head,
            step=self.step_number,
            time_ns=self.log.now_ns,
            block_size_tokens=BLOCK_SIZE,
            block_bytes=64,
            watermark_blocks=1,
            max_queued_requests=8,
            max_queued_tokens=100,
            tiers=[
                TierState(
                    "device",
                    self.num_blocks,
                    [self.references(block) for block in blocks],
                    [self.hashes.get(block) for block in blocks],
                    [self.filled[block] for block in blocks],
                )
            ],
            sequences=[SequenceState(r, s, list(table)) for (r, s), table in self.tables.items() if table],
            requests=[RequestState(name, "running", at) for name, at in self.running.items()]
            + [
                RequestState(name, state, at, self.reasons.get(name) or waits.get(name, ""))
                for state, queue in (("waiting", self.waiting), ("swapped", self.swapped))
                for name, at in queue.items()
            ],
            last_step_ns=self.last_step_ns,
        )

    # ------------------------------------------------------------ what happens

    def emit(self, event: Event) -> None:
        if self.log.active:
            self.log.append(event)

    def queue(self) -> str:
        self.num_named += 1
        name = f"r{self.num_named}"
        self.waiting[name] = self.log.now_ns
        self.emit(ev.RequestQueued(request=name, prompt_tokens=8, num_sequences=1, queued_ns=self.log.now_ns))
        return name

    def admit(self, name: str, num_blocks: int = 2, *, is_resumed: bool = False) -> bool:
        """Start a request with what is cached (at most one block) and `num_blocks` new ones."""
        hits = sorted(self.hashes)[:1]
        if len(self.empty()) + len(self.cached() - set(hits)) < num_blocks:
            available = len(self.empty()) + len(self.cached())
            self.emit(ev.AllocationFailed(request=name, needed=num_blocks, available=available, reason="admission"))
            return False
        self.running[name] = self.waiting.pop(name)
        self.reasons.pop(name, None)
        if hits:
            gaps = [5 * MS for block in hits if block in self.cached()]
            self.tables[name, 0] = list(hits)
            self.emit(ev.BlocksReused(request=name, sequence=0, block_ids=list(hits), gaps_ns=gaps))
        self.allocate(name, 0, num_blocks, "prefill")
        hit_tokens = len(hits) * BLOCK_SIZE
        if is_resumed:
            self.emit(
                ev.RequestResumed(
                    request=name, mode="recompute", away_ns=7 * MS, hit_tokens=hit_tokens, recompute_tokens=3
                )
            )
        else:
            self.emit(
                ev.RequestAdmitted(
                    request=name,
                    prompt_tokens=8,
                    queried_tokens=8,
                    hit_tokens=hit_tokens,
                    granularity_lost_tokens=1,
                    queue_ns=2 * MS,
                )
            )
        return True

    def allocate(self, name: str, sequence: int, number: int, reason: AllocationReason) -> list[int]:
        missing = number - len(self.empty())
        if missing > 0:
            self.evict(sorted(self.cached())[:missing], "pressure", name)
        taken = sorted(self.empty())[:number]
        assert len(taken) == number
        for block in taken:
            self.filled[block] = 0
        if reason != "cow":
            self.tables.setdefault((name, sequence), []).extend(taken)
        self.emit(ev.BlocksAllocated(request=name, sequence=sequence, block_ids=list(taken), reason=reason))
        return taken

    def evict(self, blocks: list[int], reason: str, name: str) -> None:
        hashes = [self.hashes.pop(block) for block in blocks]
        self.emit(
            ev.BlocksEvicted(
                hashes=hashes,
                block_ids=list(blocks),
                ages_ns=[9 * MS] * len(blocks),
                idles_ns=[4 * MS] * len(blocks),
                hits=[0] * len(blocks),
                reason=reason,  # type: ignore[arg-type]
                request=name,
            )
        )

    def release(self, name: str, sequence: int, blocks: list[int], reason: ReleaseReason) -> None:
        table = self.tables[name, sequence]
        for block in blocks:
            table.remove(block)
        if not table:
            del self.tables[name, sequence]
        self.emit(ev.BlocksReleased(request=name, sequence=sequence, block_ids=blocks, reason=reason))

    def release_all(self, name: str, reason: ReleaseReason) -> None:
        for owner, sequence in [key for key in self.tables if key[0] == name]:
            self.release(owner, sequence, self.tables[owner, sequence][::-1], reason)

    def fork(self, name: str) -> None:
        parents = [sequence for owner, sequence in self.tables if owner == name]
        if parents:
            child, table = max(parents) + 1, self.tables[name, parents[0]]
            self.tables[name, child] = list(table)
            self.emit(ev.SequenceForked(request=name, parent=parents[0], child=child, num_blocks=len(table)))

    def copy_on_write(self, name: str, sequence: int) -> None:
        """Give the sequence a last block of its own."""
        table = self.tables[name, sequence]
        source = table[-1]
        if self.references(source) < 2 or not self.empty() | self.cached():
            return
        (destination,) = self.allocate(name, sequence, 1, "cow")
        table[-1] = destination
        self.filled[destination] = self.filled[source]
        self.emit(ev.BlocksCopied(request=name, sequence=sequence, sources=[source], destinations=[destination]))
        self.emit(ev.BlocksReleased(request=name, sequence=sequence, block_ids=[source], reason="cow"))

    def preempt(self, name: str) -> None:
        self.release_all(name, "preempted")
        self.waiting[name] = self.running.pop(name)
        self.emit(
            ev.RequestPreempted(
                request=name, mode="recompute", reason="blocks", num_blocks=1, tokens_at_risk=5, beneficiary="x"
            )
        )

    def swap_out(self, name: str) -> None:
        self.release_all(name, "preempted")
        self.swapped[name] = self.running.pop(name)
        self.emit(
            ev.RequestPreempted(
                request=name, mode="swap", reason="blocks", num_blocks=1, tokens_at_risk=5, beneficiary="x",
                recompute_estimate_ns=3 * MS, swap_estimate_ns=2 * MS,
            )
        )  # fmt: skip

    def swap_in(self, name: str, num_blocks: int = 2) -> bool:
        if len(self.empty()) + len(self.cached()) < num_blocks:
            return False
        self.running[name] = self.swapped.pop(name)
        self.reasons.pop(name, None)
        self.allocate(name, 0, num_blocks, "restore")
        self.emit(ev.RequestResumed(request=name, mode="swap", away_ns=6 * MS, hit_tokens=0, recompute_tokens=0))
        return True

    def abandon_swap(self, name: str) -> None:
        self.waiting[name] = self.swapped.pop(name)
        self.emit(ev.SwapAbandoned(request=name, reason="copy"))

    def say_why(self, reasons: dict[str, WaitReason]) -> None:
        """Tell what these requests wait for."""
        self.reasons |= reasons
        self.waiting_for = dict(Counter(self.reasons.values()))
        self.emit(ev.WaitReasonsChanged(requests=list(reasons), reasons=list(reasons.values())))

    def finish(self, name: str, reason: FinishReason = "stop") -> None:
        self.release_all(name, "aborted" if reason == "abort" else "finished")
        has_run = self.running.pop(name, None) is not None
        self.waiting.pop(name, None)
        self.swapped.pop(name, None)
        self.reasons.pop(name, None)
        self.emit(
            ev.RequestFinished(
                request=name,
                reason=reason,
                prompt_tokens=8,
                generated_tokens=3 if has_run else 0,
                cached_tokens=0,
                num_preemptions=0,
                peak_blocks=3 if has_run else None,
                queue_ns=2 * MS if has_run else None,
                prefill_ns=3 * MS if has_run else None,
                decode_ns=4 * MS if has_run else None,
                end_to_end_ns=9 * MS if has_run else None,
            )
        )

    def clear_cache(self) -> None:
        if self.cached():
            self.evict(sorted(self.cached()), "reset", "")
        lost = sorted(self.hashes)
        self.hashes.clear()
        self.emit(ev.CacheCleared(block_ids=lost))

    def write(self, num_tokens: int = 1) -> None:
        """Compute tokens for every sequence whose last block is its own; full blocks are stored."""
        written: dict[int, int] = {}
        owners = [(key, table) for key, table in self.tables.items() if self.references(table[-1]) == 1]
        for _, table in owners:
            block = table[-1]
            self.filled[block] = written[block] = min(BLOCK_SIZE, self.filled[block] + num_tokens)
        self.emit(
            ev.StepScheduled(
                requests=[name for (name, _), _ in owners],
                num_tokens=[num_tokens] * len(owners),
                total_tokens=num_tokens * len(owners),
                num_sequences=len(owners),
                written_block_ids=list(written),
                filled_slots=list(written.values()),
            )
        )
        for block, filled in written.items():
            if filled == BLOCK_SIZE and block not in self.hashes:
                self.num_hashed += 1
                self.hashes[block] = self.num_hashed.to_bytes(32, "big")
                self.emit(ev.BlocksStored(hashes=[self.hashes[block]], block_ids=[block], parent=None))

    def complete(self, **changes: int) -> None:
        """End the step; `changes` are added to checksums, to make them wrong."""
        event = ev.StepCompleted(
            schedule_ns=MS,
            forward_ns=5 * MS,
            sample_ns=MS,
            apply_ns=MS,
            generated_tokens=len(self.tables),
            recomputed_tokens=0,
            inter_token_ns=[8 * MS],
            inter_token_counts=[len(self.tables)],
            num_used_blocks=len(self.used()),
            num_cached_blocks=len(self.cached()),
            num_empty_blocks=len(self.empty()),
            num_table_entries=sum(map(len, self.tables.values())),
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.swapped),
            waiting_for=dict(Counter(self.reasons.values()) if self.reasons else self.waiting_for),
            build_ns=MS // 4,
            linear_ns=3 * MS,
            logits_ns=MS // 2,
        )
        for name, change in changes.items():
            setattr(event, name, getattr(event, name) + change)
        self.last_step_ns = self.log.now_ns
        self.emit(event)

    # ------------------------------------------------------------ at random

    def act(self, action: int, pick: int) -> None:
        """Do one valid thing, chosen by two numbers."""
        actions = [self._queue, self._admit, self._grow, self._fork, self._copy, self._preempt, self._finish]
        actions += [self._abort_waiting, self._truncate, self._window, self._clear, self._write, self._write]
        actions += [self._swap_out, self._swap_in, self._abandon_swap, self._say_why]
        with self.lock:
            actions[action % len(actions)](pick)

    def step(self, acts: list[tuple[int, int]]) -> None:
        """One step made of these actions."""
        with self.lock:
            self.step_number += 1
            self.log.begin(self.step_number)
            for action, pick in acts:
                self.act(action, pick)
            self.complete()

    def _queue(self, _: int) -> None:
        self.queue()

    def _admit(self, pick: int) -> None:
        if self.waiting:
            self.admit(list(self.waiting)[pick % len(self.waiting)], 1 + pick % 3, is_resumed=bool(pick % 2))

    def _grow(self, pick: int) -> None:
        if self.tables and self.empty() | self.cached():
            self.allocate(*list(self.tables)[pick % len(self.tables)], 1, "decode")

    def _fork(self, pick: int) -> None:
        if self.running:
            self.fork(list(self.running)[pick % len(self.running)])

    def _copy(self, pick: int) -> None:
        if self.tables:
            self.copy_on_write(*list(self.tables)[pick % len(self.tables)])

    def _preempt(self, pick: int) -> None:
        if self.running:
            self.preempt(list(self.running)[pick % len(self.running)])

    def _finish(self, pick: int) -> None:
        if self.running:
            self.finish(list(self.running)[pick % len(self.running)], "length")

    def _abort_waiting(self, pick: int) -> None:
        waiting = [*self.waiting, *self.swapped]
        if waiting:
            self.finish(waiting[pick % len(waiting)], "abort")

    def _swap_out(self, pick: int) -> None:
        if self.running:
            self.swap_out(list(self.running)[pick % len(self.running)])

    def _swap_in(self, pick: int) -> None:
        if self.swapped:
            self.swap_in(list(self.swapped)[pick % len(self.swapped)], 1 + pick % 3)

    def _abandon_swap(self, pick: int) -> None:
        if self.swapped:
            self.abandon_swap(list(self.swapped)[pick % len(self.swapped)])

    def _say_why(self, pick: int) -> None:
        waiting = [*self.waiting, *self.swapped]
        if waiting:
            reasons: tuple[WaitReason, ...] = ("blocks", "sequences", "tokens", "transfer")
            self.say_why({name: reasons[(pick + place) % 4] for place, name in enumerate(waiting) if place % 2 == 0})

    def _truncate(self, pick: int) -> None:
        if self.tables:
            key = list(self.tables)[pick % len(self.tables)]
            self.release(*key, [self.tables[key][-1]], "truncated")

    def _window(self, pick: int) -> None:
        if self.tables:
            key = list(self.tables)[pick % len(self.tables)]
            self.release(*key, [self.tables[key][0]], "window")

    def _clear(self, _: int) -> None:
        self.clear_cache()

    def _write(self, pick: int) -> None:
        self.write(1 + pick % BLOCK_SIZE)
