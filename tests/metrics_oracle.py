"""What every metric must say, computed from the engine's own structures: pool, tables, requests, steps. No events.

Calls of the pool and the lifecycle are noted as they happen, the rest is read between two steps. `Load` in
`random_load.py` drives an engine at random; `Oracle.differences` compares a view with all of this, metric by metric.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.ledger.view import View
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.schema import Metric
from kvwatch_engine.contracts.block import BlockHash
from kvwatch_engine.contracts.errors import is_out_of_memory
from kvwatch_engine.contracts.request import FinishReason, Refusal
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_hash import hash_in_group
from kvwatch_engine.memory.prefix import Prefix
from kvwatch_engine.resize import PreparedResize
from kvwatch_engine.scheduling.request import Request, RequestState, Sequence, WaitReason

Key = tuple[Metric, tuple[str, ...]]
WINDOW_NS = 60_000_000_000
SEVERITY = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.LENGTH, FinishReason.STOP)
NOT_FROM_THE_ENGINE = {m.TELEMETRY_EVENTS, m.LEDGER_UPDATE_TIMESTAMP}
"""What tells of the observatory itself; tests of its parts hold it to the truth."""


class Oracle:
    """Watches one engine core. Attach it before anything happens."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.counts: Counter[Key] = Counter()
        self.observed: defaultdict[Key, list[int]] = defaultdict(list)
        self.requests: dict[str, Request] = {}
        self.last_step_ns: int | None = None
        self.stall_since_ns: int | None = None
        self.free: list[tuple[int, int]] = []
        """(free blocks, end) of stretches of time that are over."""
        self.num_free = core.manager.pool.num_free
        self.begin_ns = core.log.now_ns
        self.live_in_step: dict[str, list[Sequence]] = {}
        self.allocated_ns: dict[int, int] = {}
        self.released_ns: dict[int, int] = {}
        self.evicted: list[set[bytes]] = [set(), set()]
        """What was evicted for want of room: lately, and before."""
        self.computed: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Most tokens that a sequence ever had computed."""
        self.resumed: dict[str, int] = {}
        self.last_token_ns: dict[tuple[str, int], int] = {}
        self.finished: set[str] = set()
        self.preempted_ns: dict[str, int] = {}
        self._attach()

    @property
    def now(self) -> int:
        return self.core.log.now_ns

    def add(self, metric: Metric, amount: int = 1, *labels: str) -> None:
        self.counts[metric, labels] += amount

    def observe(self, metric: Metric, quantity: int, *labels: str) -> None:
        self.observed[metric, labels].append(quantity)

    # ------------------------------------------------------------------ what is noted as it happens

    def _attach(self) -> None:
        pool, manager = self.core.manager.pool, self.core.manager
        lifecycle, scheduler = self.core.scheduler.lifecycle, self.core.scheduler
        _around(pool, "allocate", self._allocate)
        _around(pool, "reuse", self._reuse)
        _around(pool, "release", self._release)
        _around(pool, "store", self._store)
        _around(pool, "_evict", self._evict)
        _around(pool, "clear_cache", self._clear)
        _around(pool, "pin", self._pin)
        _around(pool, "unpin", self._pin)
        _around(manager, "open", self._open)
        _around(lifecycle, "queue", self._queue)
        _around(lifecycle, "fail_allocation", self._fail_allocation)
        _around(lifecycle, "preempt", self._preempt)
        _around(lifecycle, "note_token", self._token)
        _around(lifecycle, "_finish", self._finish)
        _around(scheduler, "apply", self._apply)
        _around(self.core._executor, "execute", self._execute)
        _around(self.core, "reject", self._reject)
        _around(self.core, "prepare_resize", self._prepare_resize)
        _around(self.core, "resize", self._resize)

    def _note_free(self) -> None:
        """The pool has just changed: what it was before lasted until now."""
        self.free.append((self.num_free, self.now))
        self.num_free = self.core.manager.pool.num_free

    def _allocate(self, call: Callable[..., Any], count: int, owner: Any, reason: str, group: int = 0) -> Any:
        blocks = call(count, owner, reason, group)
        if blocks is not None:
            self.add(m.KV_BLOCK_ALLOCATIONS, count, "device", reason)
            if reason == "cow":
                self.add(m.KV_BLOCK_COPIES, count, "device")
            self.allocated_ns |= dict.fromkeys(blocks, self.now)
        self._note_free()
        return blocks

    def _reuse(self, call: Callable[..., Any], blocks: list[int], owner: Any, group: int = 0) -> None:
        pool = self.core.manager.pool
        for block in blocks:
            if pool.ref_counts[block] == 0:
                self.observe(m.KV_BLOCK_REUSE_GAP, self.now - self.released_ns[block])
        call(blocks, owner, group)
        self._note_free()

    def _release(self, call: Callable[..., Any], blocks: list[int], owner: Any, reason: str, group: int = 0) -> None:
        self.add(m.KV_BLOCK_RELEASES, len(blocks), "device", reason)
        call(blocks, owner, reason, group)
        pool = self.core.manager.pool
        self.released_ns |= {block: self.now for block in blocks if pool.ref_counts[block] == 0}
        self._note_free()

    def _store(self, call: Callable[..., Any], blocks: Any, hashes: list[BlockHash], *more: Any) -> None:
        num_new = sum(self.core.manager.pool.find(content) is None for content in hashes)
        self.add(m.KV_BLOCK_STORES, num_new, "device")
        if num_new < len(hashes):
            self.add(m.PREFIX_CACHE_DUPLICATE_BLOCKS, len(hashes) - num_new, "device")
        call(blocks, hashes, *more)

    def _pin(self, call: Callable[..., Any], hashes: Any) -> None:
        call(hashes)
        self._note_free()

    def _evict(self, call: Callable[..., Any], count: int, beneficiary: str, reason: str) -> Any:
        hashes = list(self.core.manager.pool.hashes)
        blocks = call(count, beneficiary, reason)
        self.add(m.KV_BLOCK_EVICTIONS, count, "device", reason)
        for block in blocks:
            self.observe(m.KV_BLOCK_LIFETIME, self.now - self.allocated_ns[block])
            self.observe(m.KV_BLOCK_IDLE, self.now - self.released_ns[block])
        gone = {content for block in blocks if (content := hashes[block]) is not None}
        if reason == "pressure":
            self.evicted[0] |= gone
            if len(self.evicted[0]) >= self.core.manager.pool.num_blocks:
                self.evicted = [set(), self.evicted[0]]
        else:
            self.evicted = [some - gone for some in self.evicted]
        return blocks

    def _clear(self, call: Callable[..., Any], *by: str) -> Any:
        cached = call(*by)
        self.evicted = [set(), set()]
        return cached

    def _open(self, call: Callable[..., Any], owner: Any, prefix: Prefix, num_tokens: int) -> bool:
        request, size = self.requests[owner.request], self.core.settings.block_size
        hits, prompt = len(prefix) * size, request.num_prompt_tokens
        if request.admitted_ns is None:
            self.add(m.PROMPT_TOKENS, prompt)
            self.observe(m.QUEUE_SECONDS, self.now - request.queued_ns)
            if self.core.settings.enable_prefix_cache:
                self.add(m.PREFIX_CACHE_QUERIED_TOKENS, prompt)
                self.add(m.PREFIX_CACHE_HIT_TOKENS, hits, "device")
                self.add(m.PREFIX_CACHE_GRANULARITY_LOST_TOKENS, prompt - (prompt - 1) // size * size)
                self.add(m.PREFIX_CACHE_REGRETTED_TOKENS, self._num_regretted(request, len(prefix)) * size)
        else:
            self.observe(m.PREEMPTION_AWAY, self.now - self.preempted_ns[owner.request], "recompute")
            self.add(m.PREFIX_CACHE_RESUMED_HIT_TOKENS, hits)
            self.resumed[owner.request] = self.now
        opened: bool = call(owner, prefix, num_tokens)
        if owner.request in self.resumed and self._has_recovered(request.live_sequences(), {owner.sequence: hits}):
            self.observe(m.RECOMPUTE_SECONDS, 0)
            del self.resumed[owner.request]
        return opened

    def _num_regretted(self, request: Request, num_hits: int) -> int:
        """Look for the longest prefix of which each group's part is there or was evicted, all of what is seen of it."""
        size = self.core.settings.block_size
        can_hit = (request.num_prompt_tokens - 1) // size
        leader = request.live_sequences()[0]
        hashes = leader.chain.upto(can_hit, leader.tokens)[:can_hit]
        known = {content for content in self.core.manager.pool.hashes if content is not None}.union(*self.evicted)
        for length in range(can_hit, num_hits, -1):
            if all(
                hash_in_group(hashes[index], group) in known
                for group, window in enumerate(self.core.settings.windows)
                for index in range(length)
                if window is None or (index + 1) * size > length * size - window + 1
            ):
                return length - num_hits
        return 0

    def _has_recovered(self, sequences: list[Sequence], computed: dict[int, int]) -> bool:
        """Whether the sequences have again what they ever had; `computed` says what each has now."""
        return all(computed.get(s.index, 0) >= self.computed[s.request.request_id, s.index] for s in sequences)

    def _queue(self, call: Callable[..., Any], request: Request) -> None:
        self.requests[request.request_id] = request
        call(request)

    def _fail_allocation(self, call: Callable[..., Any], *args: Any, is_admission: bool) -> None:
        self.add(m.KV_ALLOCATION_FAILURES, 1, "admission" if is_admission else "growth")
        call(*args, is_admission=is_admission)

    def _preempt(self, call: Callable[..., Any], victim: Request, beneficiary: Request | None, how: Any) -> None:
        self.add(m.PREEMPTIONS, 1, how.mode, "blocks" if beneficiary else "memory")
        self.preempted_ns[victim.request_id] = self.now
        self.resumed.pop(victim.request_id, None)
        call(victim, beneficiary, how)

    def _token(self, call: Callable[..., Any], sequence: Any) -> Any:
        request = sequence.request
        key = (request.request_id, sequence.index)
        self.add(m.GENERATED_TOKENS)
        if not any(owner == request.request_id for owner, _ in self.last_token_ns):
            self.observe(m.TIME_TO_FIRST_TOKEN, self.now - request.queued_ns)
        if key in self.last_token_ns:
            self.observe(m.INTER_TOKEN_LATENCY, self.now - self.last_token_ns[key])
        self.last_token_ns[key] = self.now
        return call(sequence)

    def _finish(self, call: Callable[..., Any], request: Request) -> None:
        reasons = {sequence.finish_reason for sequence in request.sequences}
        reason = next(reason for reason in SEVERITY if reason in reasons)
        call(request)
        assert request.request_id not in self.finished
        self.finished.add(request.request_id)
        self.add(m.REQUESTS_FINISHED, 1, reason.value, _shown(request.origin.adapter), _shown(request.origin.tenant))
        self.observe(m.REQUEST_PROMPT_TOKENS, len(request.prompt_token_ids))
        self.observe(m.REQUEST_GENERATED_TOKENS, sum(len(s.output_token_ids) for s in request.sequences))
        times = [ns for (owner, _), ns in self.last_token_ns.items() if owner == request.request_id]
        if request.admitted_ns is not None:
            self.observe(m.REQUEST_KV_BLOCKS, request.peak_blocks)
        if request.first_token_ns is not None and request.admitted_ns is not None:
            self.observe(m.PREFILL_SECONDS, request.first_token_ns - request.admitted_ns)
            self.observe(m.DECODE_SECONDS, max(times) - request.first_token_ns)
            self.observe(m.END_TO_END, max(times) - request.queued_ns)
        since_ns = self.resumed.pop(request.request_id, None)
        in_step = self.live_in_step.get(request.request_id)
        if since_ns is not None and in_step and self._has_recovered(in_step, _computed(in_step)):
            self.observe(m.RECOMPUTE_SECONDS, self.now - since_ns)  # and ended in the same step
        self._end_stall()

    def _execute(self, call: Callable[..., Any], step: StepInput) -> StepResult:
        self.add(m.COMPUTED_TOKENS, step.num_tokens)
        self.observe(m.STEP_TOKENS, step.num_tokens)
        self.observe(m.BATCH_SIZE, len(step.context_lens))
        try:
            result: StepResult = call(step)
        except Exception as error:
            self.add(m.STEP_ERRORS)
            self.add(m.OUT_OF_MEMORY, int(is_out_of_memory(error)))
            raise
        for phase, duration in {"forward": result.forward_ns, "sample": result.sample_ns}.items():
            self.observe(m.STEP_DURATION, duration, phase)
        return result

    def _apply(self, call: Callable[..., Any], scheduled: Any, result: StepResult) -> Any:
        for chunk in scheduled.chunks:
            if chunk.sequence.finish_reason is None:
                key = tuple(chunk.sequence.owner)
                self.add(m.RECOMPUTED_TOKENS, max(0, min(chunk.end, self.computed[key]) - chunk.start))
        self.live_in_step = {name: request.live_sequences() for name, request in self.requests.items()}
        applied = call(scheduled, result)
        self.live_in_step = {}
        for phase in ("schedule", "apply"):
            self.observe(m.STEP_DURATION, 0, phase)
        self._complete()
        return applied

    def _reject(self, call: Callable[..., Any], refusal: Refusal) -> None:
        self.add(m.REQUESTS_REJECTED, 1, refusal.reason)
        call(refusal)

    def _prepare_resize(self, call: Callable[..., Any], num_blocks: int) -> Any:
        try:
            return call(num_blocks)
        except ChangeRefused:
            self.add(m.POOL_REBUILDS, 1, "refused")
            raise

    def _resize(self, call: Callable[..., Any], prepared: PreparedResize) -> None:
        started_ns = self.core.log.clock.monotonic_ns()
        try:
            call(prepared)
        except ChangeFailed:
            self.add(m.POOL_REBUILDS, 1, "failed")
            raise
        else:
            self.add(m.POOL_REBUILDS, 1, "resized")
            for times in (self.allocated_ns, self.released_ns):
                times |= {new: times[old] for old, new in prepared.plan.moves.items() if old in times}
            self.free.clear()
            self.num_free, self.begin_ns = self.core.manager.pool.num_free, self.now
        finally:
            self.observe(m.POOL_REBUILD_SECONDS, self.core.log.clock.monotonic_ns() - started_ns)

    def _complete(self) -> None:
        """A step is over: read what the engine has now."""
        lifecycle, now = self.core.scheduler.lifecycle, self.now
        for request in self.requests.values():
            live = request.live_sequences()
            if request.request_id in self.resumed and self._has_recovered(live, _computed(live)):
                self.observe(m.RECOMPUTE_SECONDS, now - self.resumed.pop(request.request_id))
        for request in lifecycle.running:
            for sequence in request.live_sequences():
                key = (request.request_id, sequence.index)
                self.computed[key] = max(self.computed[key], sequence.num_computed)
        if self.stall_since_ns is not None:
            self.add(m.KV_STALL_SECONDS, now - self.stall_since_ns)
        self.stall_since_ns = now if "blocks" in self._reasons() else None
        self.last_step_ns = now

    def _end_stall(self) -> None:
        if self.stall_since_ns is not None and "blocks" not in self._reasons():
            self.add(m.KV_STALL_SECONDS, self.now - self.stall_since_ns)
            self.stall_since_ns = None

    def _reasons(self) -> list[str]:
        lifecycle = self.core.scheduler.lifecycle
        return [each.wait_reason.value for each in (*lifecycle.waiting, *lifecycle.arriving) if each.wait_reason]

    # ------------------------------------------------------------------ what a view must say

    def gauges(self, offset_ns: int) -> dict[Key, float]:
        """Return every gauge, and no other."""
        pool, settings, lifecycle = self.core.manager.pool, self.core.settings, self.core.scheduler.lifecycle
        used = [block for block in range(1, pool.num_blocks) if pool.ref_counts[block]]
        cached = [b for b in range(1, pool.num_blocks) if not pool.ref_counts[b] and pool.hashes[b] is not None]
        kept = {content for pin in self.core.pins.all() for content in pin.hashes}
        pinned = [block for block in range(1, pool.num_blocks) if pool.hashes[block] in kept]
        size, capacity = settings.block_size, pool.num_blocks - 1
        reasons = Counter(self._reasons())
        queue = [each.queued_ns for each in (*lifecycle.waiting, *lifecycle.arriving)]
        found: dict[Key, float | None] = {
            (m.KV_BLOCK_CAPACITY, ("device",)): capacity,
            (m.KV_BLOCKS, ("device", "", "empty")): capacity - len(used) - len(cached),
            (m.KV_FREE_BLOCKS, ("device",)): capacity - len({*used, *pinned}),
            (m.KV_PINNED_BLOCKS, ("device",)): len(pinned),
            (m.KV_USAGE_RATIO, ("device",)): len(used) / capacity,
            (m.KV_WATERMARK_BLOCKS, ("device",)): settings.watermark_blocks,
            (m.KV_ORPHANED_BLOCKS, ("device",)): 0,
            (m.KV_BLOCK_SIZE_TOKENS, ()): size,
            (m.KV_BLOCK_BYTES, ()): self.core.snapshot().block_bytes,
            (m.REQUESTS, ("running",)): len(lifecycle.running),
            (m.REQUESTS, ("waiting",)): sum(each.state is RequestState.WAITING for each in lifecycle.requests()),
            (m.REQUESTS, ("swapped",)): sum(each.state is RequestState.SWAPPED for each in lifecycle.requests()),
            (m.QUEUE_LIMIT, ("requests",)): settings.max_queued_requests,
            (m.QUEUE_LIMIT, ("tokens",)): settings.max_queued_tokens,
            (m.OLDEST_WAITING_TIMESTAMP, ()): (min(queue) + offset_ns) / 1e9 if queue else None,
            (m.LAST_STEP_TIMESTAMP, ()): None if self.last_step_ns is None else (self.last_step_ns + offset_ns) / 1e9,
        }
        found |= {(m.WAITING_REQUESTS, (reason.value,)): reasons[reason.value] for reason in WaitReason}
        states = ("running", "draining", "stalled", "stopped", "failed")
        found |= {(m.ENGINE_STATE, (state,)): state == "running" for state in states}
        found |= {(m.CONFIG_VALUE, (key,)): number for key, number in settings.numbers().items()}
        for number in range(len(settings.windows)):
            found |= self._group(number, used, cached)
        found |= self._extremes(capacity)
        return {key: number for key, number in found.items() if number is not None}

    def _group(self, number: int, used: list[int], cached: list[int]) -> dict[Key, float | None]:
        """Return what one KV group has of the blocks that are used and cached."""
        pool, size = self.core.manager.pool, self.core.settings.block_size
        group = self.core.manager.groups[number]
        mine = [block for block in used if not pool.groups or pool.groups[block] == number]
        held, filled = len(mine) * size, sum(pool.filled_slots[block] for block in mine)
        entries = sum(block != 0 for table in group.tables.values() for block in table)
        assert {block for table in group.tables.values() for block in table if block} == set(mine)
        place = ("device", str(number))
        return {
            (m.KV_BLOCKS, (*place, "used")): len(mine),
            (m.KV_BLOCKS, (*place, "cached")): sum(not pool.groups or pool.groups[b] == number for b in cached),
            (m.KV_TOKEN_CAPACITY, place): (pool.num_blocks - 1) * size,
            (m.KV_HELD_SLOTS, place): held,
            (m.KV_FILLED_SLOTS, place): filled,
            (m.KV_WASTE_RATIO, place): 1 - filled / held if held else 0.0,
            (m.KV_SHARED_BLOCKS, place): sum(pool.ref_counts[block] > 1 for block in mine),
            (m.KV_SHARING_SAVED_BLOCKS, place): entries - len(mine),
        }

    def _extremes(self, capacity: int) -> dict[Key, float | None]:
        begin = self.now - WINDOW_NS
        if begin < self.begin_ns:
            return {}
        lowest = min([self.core.manager.pool.num_free, *(number for number, end in self.free if end > begin)])
        return {
            (m.KV_FREE_BLOCKS_MIN, ("device", "60s")): lowest,
            (m.KV_USAGE_RATIO_MAX, ("device", "60s")): (capacity - lowest) / capacity,
        }

    def differences(self, view: View, offset_ns: int, *, is_clock_real: bool = False) -> list[str]:
        """Compare a view with all of this. With a real clock, times of day and of the engine's work are left out."""
        found: list[str] = []
        left_out = NOT_FROM_THE_ENGINE | ({m.LAST_STEP_TIMESTAMP} if is_clock_real else set())
        gauges = {(s.metric, s.labels): s.value for s in view.gauges if s.metric not in left_out}
        expected = {key: number for key, number in self.gauges(offset_ns).items() if key[0] not in left_out}
        found += _unequal(gauges, expected)
        counters = {(s.metric, s.labels): s.value for s in view.counters if s.metric not in NOT_FROM_THE_ENGINE}
        divisors = {m.KV_STALL_SECONDS: 1e9}
        counted = {key: amount / divisors.get(key[0], 1) for key, amount in self.counts.items()}
        found += _unequal(counters, dict.fromkeys(counters, 0.0) | counted)
        for sample in view.histograms:
            observed = self.observed.pop((sample.metric, sample.labels), [])
            self.observed[sample.metric, sample.labels] = observed
            scale = 1e9 if sample.metric.unit == "seconds" else 1
            counts = [0] * (len(sample.bounds) + 1)
            for quantity in observed:
                counts[bisect_left([round(bound * scale) for bound in sample.bounds], quantity)] += 1
            wanted = (tuple(counts), sum(observed) / scale)
            told = (sample.counts, sample.sum)
            if sample.metric is m.STEP_DURATION and is_clock_real:
                wanted, told = ((len(observed),), 0.0), ((sample.count,), 0.0)
            if told != wanted:
                found.append(f"{sample.metric.name}{sample.labels}: view {told} != engine {wanted}")
        shown = {(sample.metric, sample.labels) for sample in view.histograms}
        found += [f"{metric.name}{labels} is missing" for metric, labels in self.observed.keys() - shown]
        return found


def _computed(sequences: list[Sequence]) -> dict[int, int]:
    return {sequence.index: sequence.num_computed for sequence in sequences}


def _shown(label: str) -> str:
    return "other" if label else ""


def _unequal(told: dict[Key, float], expected: dict[Key, float]) -> list[str]:
    return [
        f"{metric.name}{labels}: view {told.get((metric, labels))} != engine {expected.get((metric, labels))}"
        for metric, labels in told.keys() | expected.keys()
        if told.get((metric, labels)) != expected.get((metric, labels))
    ]


def _around(thing: Any, name: str, note: Callable[..., Any]) -> None:
    """Have calls of a method go through `note`, which gets the method first."""
    method = getattr(thing, name)

    @wraps(method)
    def noted(*args: Any, **more: Any) -> Any:
        return note(method, *args, **more)

    setattr(thing, name, noted)
