"""What every metric must say, computed from the engine's own structures: pools, tables, requests, steps. No events.

Calls of the scheduler and the lifecycle are noted as they happen, the rest is read between two steps. What each tier
has is in `pool_oracle.py`, what moves between them in `transfer_oracle.py`, what people change in `change_oracle.py`.
`RandomLoad` in `random_load.py` drives an engine at random; `Oracle.differences` compares a view with all of this.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from change_oracle import ChangeWatch
from pool_oracle import Book, Key, PoolWatch, around
from transfer_oracle import TransferWatch

from kvwatch.ledger.view import View
from kvwatch.telemetry import metrics as m
from kvwatch.telemetry.snapshot import SequenceState
from kvwatch_engine.contracts.errors import is_out_of_memory
from kvwatch_engine.contracts.request import FinishReason, Refusal
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_hash import hash_in_group
from kvwatch_engine.memory.prefix import Prefix
from kvwatch_engine.memory.tiers.tiers import MemoryTiers
from kvwatch_engine.scheduling.policy import most_blocks
from kvwatch_engine.scheduling.request import Request, RequestState, Sequence, WaitReason

SEVERITY = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.LENGTH, FinishReason.STOP)
NOT_FROM_THE_ENGINE = {m.TELEMETRY_EVENTS, m.LEDGER_UPDATE_TIMESTAMP}
"""What tells of the observatory itself; tests of its parts hold it to the truth."""


@cache
def longest_sequence(settings: EngineSettings) -> int:
    """Return the longest sequence whose blocks the pool has; each length is tried."""
    capacity = settings.num_blocks - 1
    fitting = (n for n in range(1, settings.max_model_len + 1) if most_blocks(settings, n, 1, 1) <= capacity)
    return max(fitting, default=0)


class Opening(NamedTuple):
    """What a request found when it got its first blocks; it runs when what other tiers have of it has come."""

    size: int
    """Tokens in a block then."""
    num_hits: int
    """Blocks found on the device."""
    num_regretted: int


class Oracle(Book):
    """Watches one engine core. Attach it before anything happens."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self.core = core
        self.requests: dict[str, Request] = {}
        self.last_step_ns: int | None = None
        self.stall_since_ns: int | None = None
        self.live_in_step: dict[str, list[Sequence]] = {}
        self.openings: dict[str, Opening] = {}
        self.computed: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Most tokens that a sequence ever had computed."""
        self.resumed: dict[str, int] = {}
        self.last_token_ns: dict[tuple[str, int], int] = {}
        self.finished: set[str] = set()
        self.preempted_ns: dict[str, int] = {}
        self.pool = PoolWatch(core.manager.pool, self, lambda: self.now)
        self.changes = ChangeWatch(core, self, self.pool)
        self.transfers: TransferWatch | None = None
        if isinstance(core.tiers, MemoryTiers):
            self.transfers = TransferWatch(core.tiers, self, lambda: self.now, core.log.clock.monotonic_ns)
        self._attach()

    @property
    def now(self) -> int:
        return self.core.log.now_ns

    # ------------------------------------------------------------------ what is noted as it happens

    def _attach(self) -> None:
        manager = self.core.manager
        lifecycle, scheduler = self.core.scheduler.lifecycle, self.core.scheduler
        around(manager, "open", self._open)
        around(lifecycle, "queue", self._queue)
        around(lifecycle, "start", self._start)
        around(lifecycle, "fail_allocation", self._fail_allocation)
        around(lifecycle, "preempt", self._preempt)
        around(lifecycle, "note_token", self._token)
        around(lifecycle, "_finish", self._finish)
        around(scheduler, "apply", self._apply)
        around(self.core._executor, "execute", self._execute)
        around(self.core, "reject", self._reject)

    def _open(self, call: Callable[..., Any], owner: Any, prefix: Prefix, num_tokens: int) -> bool:
        request = self.requests[owner.request]
        num_regretted = 0
        if request.admitted_ns is None and self._is_looked_up(request):
            num_regretted = self._num_regretted(request, len(prefix) + self._num_further(request, len(prefix)))
        opened: bool = call(owner, prefix, num_tokens)
        if opened:
            if self.transfers is not None:
                self.transfers.restores.pop(owner.request, None)
            self.openings[owner.request] = Opening(self.core.settings.block_size, len(prefix), num_regretted)
        return opened

    def _start(self, call: Callable[..., Any], request: Request) -> None:
        name, was_swapped = request.request_id, request.state is RequestState.SWAPPED
        call(request)
        if name in self.preempted_ns:
            mode = "swap" if was_swapped else "recompute"
            self.observe(m.PREEMPTION_AWAY, self.now - self.preempted_ns[name], mode)
            if not was_swapped:
                self.add(m.PREFIX_CACHE_RESUMED_HIT_TOKENS, sum(self._num_hit_tokens(name).values()))
            self.resumed[name] = self.now
            self._note_recovered(request)
            return
        prompt, opening = request.num_prompt_tokens, self.openings[name]
        self.add(m.PROMPT_TOKENS, prompt)
        self.observe(m.QUEUE_SECONDS, self.now - request.queued_ns)
        if self._is_looked_up(request):
            size = self.core.settings.block_size
            self.add(m.PREFIX_CACHE_QUERIED_TOKENS, prompt)
            self.add(m.PREFIX_CACHE_GRANULARITY_LOST_TOKENS, prompt - (prompt - 1) // size * size)
        for tier, num_tokens in self._num_hit_tokens(name).items():
            self.add(m.PREFIX_CACHE_HIT_TOKENS, num_tokens, tier)
        self.add(m.PREFIX_CACHE_REGRETTED_TOKENS, opening.num_regretted * opening.size)

    def _is_looked_up(self, request: Request) -> bool:
        """Whether a new request's prompt may be found: log-probabilities of it need all of its logits."""
        is_scored = request.sampling.prompt_logprobs is not None and request.num_prompt_tokens > 1
        return self.core.settings.enable_prefix_cache and not is_scored

    def _num_hit_tokens(self, name: str) -> Counter[str]:
        opening = self.openings[name]
        found = Counter(device=opening.num_hits * opening.size)
        if self.transfers is not None:
            for tier, num_blocks in self.transfers.num_restored(name).items():
                found[tier] += num_blocks * opening.size
        return found

    def _num_further(self, request: Request, num_hits: int) -> int:
        """Look for what tiers behind the device have of a prefix after its first blocks."""
        if self.transfers is None or not request.is_restorable:
            return 0
        leader, size = request.live_sequences()[0], self.core.settings.block_size
        num_blocks = (leader.num_tokens - 1) // size
        hashes = leader.chain.upto(num_blocks, leader.tokens)[:num_blocks]
        known = {content for watch in self.transfers.pools for content in watch.pool.hashes}
        missing = (place for place, content in enumerate(hashes[num_hits:]) if content not in known)
        return next(missing, num_blocks - num_hits)

    def _num_regretted(self, request: Request, num_hits: int) -> int:
        """Look for the longest prefix of which each group's part is there or was evicted, all of what is seen of it."""
        size = self.core.settings.block_size
        can_hit = (request.num_prompt_tokens - 1) // size
        leader = request.live_sequences()[0]
        hashes = leader.chain.upto(can_hit, leader.tokens)[:can_hit]
        known = {content for content in self.pool.pool.hashes if content is not None}.union(*self.pool.evicted)
        first = num_hits if self.transfers is not None else 0  # what comes before was found behind the device
        for length in range(can_hit, num_hits, -1):
            if all(
                hash_in_group(hashes[index], group) in known
                for group, window in enumerate(self.core.settings.windows)
                for index in range(first, length)
                if window is None or (index + 1) * size > length * size - window + 1
            ):
                return length - num_hits
        return 0

    def _note_recovered(self, request: Request) -> None:
        live = request.live_sequences()
        if request.request_id in self.resumed and self._has_recovered(live, _computed(live)):
            self.observe(m.RECOMPUTE_SECONDS, self.now - self.resumed.pop(request.request_id))

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
        self.add(m.PREEMPTIONS, 1, how.mode, "blocks" if beneficiary else how.reason)
        self.preempted_ns[victim.request_id] = self.now
        self.resumed.pop(victim.request_id, None)
        self._note_computed(victim)
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
        del self.requests[request.request_id]
        for sequence in request.sequences:
            key = (request.request_id, sequence.index)
            self.last_token_ns.pop(key, None)
            self.computed.pop(key, None)

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
        times = {} if result.operations is None else result.operations._asdict()
        for name, duration in {**times, "logits_ns": result.logits_ns}.items():
            if duration is not None:
                self.add(m.FORWARD_OPERATION_SECONDS, duration, name.removesuffix("_ns"))
        return result

    def _apply(self, call: Callable[..., Any], scheduled: Any, result: StepResult) -> Any:
        for chunk in scheduled.chunks:
            if chunk.sequence.finish_reason is None:
                key = tuple(chunk.sequence.owner)
                self.add(m.RECOMPUTED_TOKENS, max(0, min(chunk.end, self.computed[key]) - chunk.start))
        self.live_in_step = {name: request.live_sequences() for name, request in self.requests.items()}
        drafted = [(scheduled.sampled[row], len(draft.token_ids)) for row, draft in scheduled.drafts.items()]
        before = [len(sequence.output_token_ids) for sequence, _ in drafted]
        applied = call(scheduled, result)
        self.live_in_step = {}
        for (sequence, num_proposed), num_tokens in zip(drafted, before, strict=True):
            num_accepted = max(0, len(sequence.output_token_ids) - num_tokens - 1)
            self.add(m.SPEC_DECODE_DRAFTS)
            self.add(m.SPEC_DECODE_DRAFT_TOKENS, num_accepted, "accepted")
            self.add(m.SPEC_DECODE_DRAFT_TOKENS, num_proposed - num_accepted, "rejected")
        self.add(m.STEP_BUILD_SECONDS, 0)
        for phase in ("schedule", "apply"):
            self.observe(m.STEP_DURATION, 0, phase)
        self._complete()
        return applied

    def _reject(self, call: Callable[..., Any], refusal: Refusal) -> None:
        self.add(m.REQUESTS_REJECTED, 1, refusal.reason)
        call(refusal)

    def _complete(self) -> None:
        """A step is over: read what the engine has now."""
        lifecycle, now = self.core.scheduler.lifecycle, self.now
        for name in list(self.resumed):
            self._note_recovered(self.requests[name])
        for request in lifecycle.running:
            self._note_computed(request)
        if self.stall_since_ns is not None:
            self.add(m.KV_STALL_SECONDS, now - self.stall_since_ns)
        self.stall_since_ns = now if "blocks" in self._reasons() else None
        self.last_step_ns = now

    def _note_computed(self, request: Request) -> None:
        for sequence in request.live_sequences():
            key = (request.request_id, sequence.index)
            self.computed[key] = max(self.computed[key], sequence.num_computed)

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
        kept = {content for pin in self.core.pins.all() for content in pin.hashes}
        pinned = [block for block in range(1, pool.num_blocks) if pool.hashes[block] in kept]
        reasons = Counter(self._reasons())
        queue = [each.queued_ns for each in (*lifecycle.waiting, *lifecycle.arriving)]
        found: dict[Key, float | None] = {
            (m.KV_PINNED_BLOCKS, ("device",)): len(pinned),
            (m.KV_WATERMARK_BLOCKS, ("device",)): settings.watermark_blocks,
            (m.KV_BLOCK_SIZE_TOKENS, ()): settings.block_size,
            (m.KV_BLOCK_BYTES, ()): self.core.block_bytes,
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
        found |= {(m.CONFIG_DRIFT, (key,)): number for key, number in self.core.config_drift.items()}
        num_idle_pinned = sum(not pool.ref_counts[block] for block in pinned)
        num_arriving = 0 if self.transfers is None else self.transfers.num_arriving("device")
        found |= self.pool.gauges(settings.block_size, len(settings.windows), num_idle_pinned, num_arriving)
        live = {request.request_id for request in lifecycle.requests()}
        if self.transfers is not None:
            found |= self.transfers.gauges(settings.block_size)
            live |= self.transfers.requests
        found |= self._orphans(live)
        found[m.CONFIG_VALUE, ("max_model_len",)] = longest_sequence(settings)
        return {key: number for key, number in found.items() if number is not None}

    def _orphans(self, live: set[str]) -> dict[Key, float]:
        """Return how many blocks of each tier nobody holds who is live, or whose blocks are on their way."""
        tiers, tables = self.core.tiers, list[SequenceState](self.core.manager.to_states())
        watches = [self.pool]
        if tiers is not None and self.transfers is not None:
            tables += tiers.sequences()
            watches += self.transfers.pools
        found: dict[Key, float] = {}
        for watch in watches:
            held = _blocks(each for each in tables if each.tier == watch.tier)
            assert held == set(watch.used), f"who holds what in {watch.tier}"
            kept = _blocks(each for each in tables if each.tier == watch.tier and each.request in live)
            found[m.KV_ORPHANED_BLOCKS, (watch.tier,)] = len(held - kept)
        return found

    def differences(self, view: View, offset_ns: int, *, is_clock_real: bool = False) -> list[str]:
        """Compare a view with all of this. With a real clock, times of day and of the engine's work are left out."""
        found: list[str] = []
        left_out = NOT_FROM_THE_ENGINE | ({m.LAST_STEP_TIMESTAMP, m.STEP_BUILD_SECONDS} if is_clock_real else set())
        gauges = {(s.metric, s.labels): s.value for s in view.gauges if s.metric not in left_out}
        expected = {key: number for key, number in self.gauges(offset_ns).items() if key[0] not in left_out}
        found += _unequal(gauges, expected)
        counters = {(s.metric, s.labels): s.value for s in view.counters if s.metric not in left_out}
        divisors = {m.KV_STALL_SECONDS: 1e9, m.FORWARD_OPERATION_SECONDS: 1e9}
        counted = {
            key: amount / divisors.get(key[0], 1) for key, amount in self.counts.items() if key[0] not in left_out
        }
        found += _unequal(counters, dict.fromkeys(counters, 0.0) | counted)
        for sample in view.histograms:
            wanted = self.binned(sample.metric, sample.labels, sample.bounds)
            told = (sample.counts, sample.sum)
            if sample.metric is m.STEP_DURATION and is_clock_real:
                wanted, told = ((sum(wanted[0]),), 0.0), ((sample.count,), 0.0)
            if told != wanted:
                found.append(f"{sample.metric.name}{sample.labels}: view {told} != engine {wanted}")
        shown = {(sample.metric, sample.labels) for sample in view.histograms}
        found += [f"{metric.name}{labels} is missing" for metric, labels in self.observed.keys() - shown]
        return found


def _computed(sequences: list[Sequence]) -> dict[int, int]:
    return {sequence.index: sequence.num_computed for sequence in sequences}


def _blocks(tables: Iterable[SequenceState]) -> set[int]:
    return {block for table in tables for block in table.block_ids if block}


def _shown(label: str) -> str:
    return "other" if label else ""


def _unequal(told: dict[Key, float], expected: dict[Key, float]) -> list[str]:
    return [
        f"{metric.name}{labels}: view {told.get((metric, labels))} != engine {expected.get((metric, labels))}"
        for metric, labels in told.keys() | expected.keys()
        if told.get((metric, labels)) != expected.get((metric, labels))
    ]
