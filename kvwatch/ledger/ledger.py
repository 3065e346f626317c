"""Rebuilds an engine's KV state from its events, and holds it to the law after every step.

    capacity (null block left out) = empty + sum over KV groups of (used + cached), in every tier

Owns the pools of all tiers and the states of live requests. Each event class says in its docstring how it changes the
state. Nothing here raises on an event that contradicts the state: that is a *fault*, reported with the next step.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal, get_args

from kvwatch.ledger.group import GroupPool
from kvwatch.ledger.index import IndexCounts
from kvwatch.ledger.pool import FIRST_GROUP, TierPool
from kvwatch.ledger.transfers import OpenTransfers
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot, GroupState, RequestState, TierState, TransferState

EngineState = Literal["running", "draining", "stalled", "stopped", "failed"]
ENGINE_STATES: tuple[EngineState, ...] = get_args(EngineState)
MAX_FAULTS = 8
"""Faults kept between two steps; one is enough to know, eight to understand."""

_LIVE_LIMITS = ("watermark_blocks", "max_queued_requests", "max_queued_tokens")
"""Limits that change with the settings of the same name."""

CHECKED_TIER = "device"
"""The tier that the checksums of `StepCompleted` speak of."""


@dataclass(slots=True)
class LiveRequest:
    """What is known of a request that was queued and has not finished."""

    state: Literal["waiting", "running", "swapped"]
    queued_ns: int
    waits_since_seq: int = -1
    """Event since which it waits; -1 if it waits since before the snapshot that was loaded, which says why."""
    wait_reason: str = ""
    """What it waits for; empty while it runs, was not looked at yet, or nobody told that for each request."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine was configured with, as its snapshot says."""

    block_size_tokens: int = 0
    block_bytes: int = 0
    watermark_blocks: int = 0
    max_queued_requests: int = 0
    max_queued_tokens: int = 0


class Ledger:
    """State of one engine. Observatory thread only.

    `load` a snapshot first; then `apply` every event from `next_seq` on, in order. Before the first `load` there are
    no pools and events are ignored.
    """

    def __init__(self) -> None:
        self.next_seq = 0
        """Number of the first event that was not applied."""
        self.step = 0
        self.time_ns = 0
        """Monotonic time in ns of the newest event."""
        self.limits = Limits()
        self.waiting_for: dict[str, int] = {}
        """Waiting requests by reason, as of the last step, less those that wait no more. Those that came since then
        were not looked at yet: they are in no reason."""
        self.last_step_ns: int | None = None
        """Monotonic time in ns at which the last step was completed."""
        self.config: Mapping[str, float] = {}
        """Values of the engine's settings that are numbers."""
        self.config_drift: Mapping[str, float] = {}
        """For each setting that can change live: 1 if its live value is not the declared one, else 0."""
        self.memory_bytes: Mapping[str, int] = {}
        """Memory of the device by what it is for."""
        self.groups: Mapping[str, GroupState] = {}
        """KV groups by name; none where there is only one, with full attention."""
        self._reasons_seq = 0
        """Event up to which `waiting_for` knows the queue."""
        self._base_state: EngineState = "running"
        self._is_stalled = False
        self._is_loaded = False
        self._index: IndexCounts | None = None
        self._pools: dict[str, TierPool] = {}
        self._transfers = OpenTransfers((), self._pools)
        self._requests: dict[str, LiveRequest] = {}
        self._num_running = 0
        self._faults: list[str] = []
        self._handlers: dict[type[Event], Callable[[Any], None]] = {}

    # ------------------------------------------------------------ changing

    def load(self, snapshot: EngineSnapshot) -> None:
        """Replace everything by what a snapshot says. O(blocks)."""
        sequences = snapshot.sequences
        self._pools = {
            state.tier: TierPool(
                state,
                (each for each in sequences if each.tier == state.tier),
                self._fault,
                _group_names(snapshot),
                snapshot.pins if state.tier == CHECKED_TIER else (),
            )
            for state in snapshot.tiers
        }
        self.groups = {each.group: each for each in snapshot.groups}
        self._transfers = OpenTransfers(snapshot.transfers, self._pools)
        self._requests = {
            r.request: LiveRequest(_state(r.state), r.queued_ns, -1 if r.wait_reason else snapshot.seq, r.wait_reason)
            for r in snapshot.requests
        }
        self._num_running = sum(request.state == "running" for request in self._requests.values())
        self.waiting_for = dict(Counter(r.wait_reason for r in snapshot.requests if r.wait_reason))
        self._reasons_seq = snapshot.seq
        self._base_state, self._is_stalled = _engine_state(snapshot.engine_state), False
        self.config, self.memory_bytes = dict(snapshot.config), dict(snapshot.memory_bytes)
        self.config_drift = dict(snapshot.config_drift)
        self.limits = Limits(
            snapshot.block_size_tokens,
            snapshot.block_bytes,
            snapshot.watermark_blocks,
            snapshot.max_queued_requests,
            snapshot.max_queued_tokens,
        )
        self.next_seq, self.step, self.time_ns = snapshot.seq, snapshot.step, snapshot.time_ns
        self.last_step_ns = snapshot.last_step_ns
        self._faults.clear()
        self._index = IndexCounts(snapshot, self._fault) if snapshot.is_foreign else None
        self._is_loaded = True
        self._handlers = self._make_handlers()

    def apply(self, event: Event) -> None:
        """Apply one event. O(blocks of the event)."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        self.advance(event)

    def advance(self, event: Event) -> None:
        """Note that everything up to and including `event` has been applied."""
        self.next_seq = event.seq + 1
        self.step = event.step
        self.time_ns = event.time_ns

    def check(self, event: ev.StepCompleted) -> list[str]:
        """Return what is wrong after a step, as equations with their numbers; empty when all is well. O(1)."""
        wrong, self._faults = self._faults, []
        for pool in self._pools.values():
            if pool.capacity != pool.num_empty + pool.num_used + pool.num_cached:
                wrong.append(
                    f"{pool.tier}: capacity {pool.capacity} != empty {pool.num_empty} + used {pool.num_used}"
                    f" + cached {pool.num_cached}"
                )
        pool = self._pools[CHECKED_TIER]
        mine = (
            pool.num_used,
            pool.num_cached,
            pool.num_empty,
            pool.num_entries,
            self._num_running,
            self.num_waiting,
        )
        theirs = (
            event.num_used_blocks,
            event.num_cached_blocks,
            event.num_empty_blocks,
            event.num_table_entries,
            event.num_running,
            event.num_waiting,
        )
        if mine != theirs:
            names = ("used", "cached", "empty", "table entries", "running", "waiting")
            wrong += [
                f"{name}: ledger {a} != engine {b}" for name, a, b in zip(names, mine, theirs, strict=True) if a != b
            ]
        return wrong

    # ------------------------------------------------------------ reading

    @property
    def handlers(self) -> Mapping[type[Event], Callable[[Any], None]]:
        """What changes the state, by event class; replaced by `load`.

        For callers that apply many events: they call the handlers themselves, and `advance` with the last event.
        """
        return self._handlers

    @property
    def is_loaded(self) -> bool:
        """Whether a snapshot was loaded."""
        return self._is_loaded

    @property
    def index(self) -> IndexCounts | None:
        """Counts of resident hashes, all that is known of a foreign engine; none for one whose blocks are known."""
        return self._index

    @property
    def pools(self) -> Mapping[str, TierPool]:
        """Pools by tier."""
        return self._pools

    @property
    def transfers(self) -> OpenTransfers:
        """What is on its way between tiers."""
        return self._transfers

    @property
    def requests(self) -> Mapping[str, LiveRequest]:
        """Live requests by id, oldest first."""
        return self._requests

    @property
    def num_running(self) -> int:
        """Running requests."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: waiting for their first admission or preempted, by swap or otherwise."""
        return len(self._requests) - self._num_running

    @property
    def num_swapped(self) -> int:
        """Of these, those whose K/V is kept behind the device. O(live requests)."""
        return sum(request.state == "swapped" for request in self._requests.values())

    @property
    def engine_state(self) -> EngineState:
        """What the engine is doing: the gravest that applies."""
        if self._is_stalled and self._base_state in ("running", "draining"):
            return "stalled"
        return self._base_state

    def pool(self, tier: str) -> TierPool:
        """Return the pool of a tier.

        Raises:
            KeyError: the engine has no such tier, or nothing was loaded yet.
        """
        return self._pools[tier]

    def to_snapshot(self) -> EngineSnapshot:
        """Return the state in the form in which an engine tells it. Of a foreign engine only its source can do that.

        Reasons for waiting that nobody told for each request are given to those that have waited longest.
        """
        assert self._index is None, "counts do not tell which hashes are resident"
        untold = Counter(self.waiting_for) - Counter(r.wait_reason for r in self._requests.values())
        reasons = list(untold.elements())[::-1]
        return EngineSnapshot(
            seq=self.next_seq,
            step=self.step,
            time_ns=self.time_ns,
            block_size_tokens=self.limits.block_size_tokens,
            block_bytes=self.limits.block_bytes,
            watermark_blocks=self.limits.watermark_blocks,
            max_queued_requests=self.limits.max_queued_requests,
            max_queued_tokens=self.limits.max_queued_tokens,
            tiers=[pool.to_state() for pool in self._pools.values()],
            sequences=[each for pool in self._pools.values() for each in pool.to_sequences()],
            requests=[
                RequestState(name, r.state, r.queued_ns, r.wait_reason or self._untold_reason(r, reasons))
                for name, r in self._requests.items()
            ],
            engine_state=self.engine_state,
            config=dict(self.config),
            config_drift=dict(self.config_drift),
            memory_bytes=dict(self.memory_bytes),
            last_step_ns=self.last_step_ns,
            transfers=self._transfers.to_states(),
            pins=self._pools[CHECKED_TIER].to_pins(),
            groups=list(self.groups.values()),
        )

    def differences(self, snapshot: EngineSnapshot) -> list[str]:
        """Compare with what the engine says of itself, down to the single block; empty when equal.

        Order of sequences and requests does not count, nor do times, nor what an empty block once held.
        """
        mine = self.to_snapshot()
        found = [
            f"{name}: ledger {ours} != engine {theirs}"
            for name, ours, theirs in [
                ("seq", mine.seq, snapshot.seq),
                ("tiers", [t.tier for t in mine.tiers], [t.tier for t in snapshot.tiers]),
                ("tables", _tables(mine), _tables(snapshot)),
                ("requests", _requests(mine), _requests(snapshot)),
                ("transfers", _transfers(mine), _transfers(snapshot)),
                ("pins", mine.pins, snapshot.pins),
            ]
            if ours != theirs
        ]
        for ours, theirs in zip(mine.tiers, snapshot.tiers, strict=False):
            if ours.num_blocks != theirs.num_blocks:
                found.append(f"{ours.tier}: ledger {ours.num_blocks} blocks != engine {theirs.num_blocks}")
                continue
            for block in range(1, ours.num_blocks):
                a, b = _block(ours, block), _block(theirs, block)
                is_empty = not a[0] and a[1] is None
                if a[:2] != b[:2] or (a != b and not is_empty):
                    found.append(f"{ours.tier} block {block}: ledger {a} != engine {b}")
        return found

    # ------------------------------------------------------------ inside

    def _fault(self, sentence: str) -> None:
        if len(self._faults) < MAX_FAULTS:
            self._faults.append(sentence)

    def _make_handlers(self) -> dict[type[Event], Callable[[Any], None]]:
        if self._index is not None:
            return dict(self._index.handlers)
        pools = self._pools

        def by_group(change: Callable[[GroupPool, Any], None]) -> Callable[[Any], None]:
            if len(pools) == 1 and len(pools[CHECKED_TIER].groups) == 1:  # nothing to choose: half the cost is saved
                return MethodType(change, pools[CHECKED_TIER].group(FIRST_GROUP))
            return lambda event: change(pools[event.tier].group(event.group), event)

        def by_tier(change: Callable[[TierPool, Any], None]) -> Callable[[Any], None]:
            return lambda event: change(pools[event.tier], event)

        return {
            ev.BlocksAllocated: by_group(GroupPool.allocate),
            ev.BlocksReleased: by_group(GroupPool.release),
            ev.BlocksStored: by_group(GroupPool.store),
            ev.BlocksEvicted: by_group(GroupPool.evict),
            ev.BlocksReused: by_group(GroupPool.reuse),
            ev.BlocksShared: by_group(GroupPool.share),
            ev.BlocksCopied: by_group(GroupPool.copy),
            ev.CacheCleared: by_tier(TierPool.clear),
            ev.PrefixPinned: lambda event: pools[CHECKED_TIER].pin(event.pin, event.hashes),
            ev.PrefixUnpinned: lambda event: pools[CHECKED_TIER].unpin(event.pin),
            ev.BlocksRelocated: by_tier(TierPool.relocate),
            ev.BlocksLaidOut: self._laid_out,
            ev.PoolRebuilt: self._rebuilt,
            ev.SequenceForked: pools[CHECKED_TIER].fork,
            ev.StepScheduled: self._scheduled,
            ev.DraftsVerified: self._drafts_verified,
            ev.StepCompleted: self._completed,
            ev.RequestQueued: self._queued,
            ev.StepFailed: self._failed,
            ev.RequestAdmitted: lambda event: self._move(event, "running"),
            ev.RequestResumed: lambda event: self._move(event, "running"),
            ev.RequestPreempted: lambda event: self._move(event, "swapped" if event.mode == "swap" else "waiting"),
            ev.SwapAbandoned: self._swap_abandoned,
            ev.WaitReasonsChanged: self._wait_reasons_changed,
            ev.RequestFinished: self._finished,
            ev.DrainStarted: self._draining,
            ev.ConfigChanged: self._config_changed,
            ev.AdapterLoaded: self._adapters_changed,
            ev.AdapterFreed: self._adapters_changed,
            ev.EngineStalled: self._stalled,
            ev.EngineEnded: self._ended,
            **self._transfers.handlers,
        }

    def _scheduled(self, event: ev.StepScheduled) -> None:
        self._pools[CHECKED_TIER].write(event.written_block_ids, event.filled_slots)

    def _drafts_verified(self, event: ev.DraftsVerified) -> None:
        self._pools[CHECKED_TIER].write(event.unwritten_block_ids, event.filled_slots)

    def _completed(self, event: ev.StepCompleted) -> None:
        self.waiting_for = dict(event.waiting_for)
        self._reasons_seq = event.seq
        self.last_step_ns = event.time_ns
        self._is_stalled = False
        self.advance(event)

    def _queued(self, event: ev.RequestQueued) -> None:
        if event.request in self._requests:
            self._fault(f"request {event.request} was queued though it is live")
            return
        self._requests[event.request] = LiveRequest("waiting", event.queued_ns, event.seq)

    def _move(
        self,
        event: ev.RequestAdmitted | ev.RequestResumed | ev.RequestPreempted,
        state: Literal["waiting", "running", "swapped"],
    ) -> None:
        name = event.request
        request = self._requests.get(name)
        if request is None or (request.state == "running") is (state == "running"):
            self._fault(f"request {name} became {state} though it was {request.state if request else 'unknown'}")
            return
        if state == "running":
            self._leave_queue(request)
            self._num_running += 1
        else:
            request.waits_since_seq = event.seq
            self._num_running -= 1
        request.state = state

    def _swap_abandoned(self, event: ev.SwapAbandoned) -> None:
        request = self._requests.get(event.request)
        if request is None or request.state != "swapped":
            state = request.state if request else "unknown"
            self._fault(f"the swap of request {event.request} was abandoned though it was {state}")
            return
        request.state = "waiting"

    def _wait_reasons_changed(self, event: ev.WaitReasonsChanged) -> None:
        counts = self.waiting_for
        for name, reason in zip(event.requests, event.reasons, strict=True):
            request = self._requests.get(name)
            if request is None or request.state == "running":
                self._fault(
                    f"request {name} waits for {reason} though it was {request.state if request else 'unknown'}"
                )
                continue
            if request.wait_reason:
                counts[request.wait_reason] = max(0, counts.get(request.wait_reason, 0) - 1)
            request.wait_reason = reason
            counts[reason] = counts.get(reason, 0) + 1

    def _untold_reason(self, request: LiveRequest, reasons: list[str]) -> str:
        """Return one of the reasons that nobody told for each request, if it is among those that it counts."""
        was_looked_at = request.state != "running" and request.waits_since_seq < self._reasons_seq
        return reasons.pop() if reasons and was_looked_at else ""

    def _leave_queue(self, request: LiveRequest) -> None:
        """Take a request out of `waiting_for`, if it is in there."""
        if request.wait_reason:
            self.waiting_for[request.wait_reason] = max(0, self.waiting_for.get(request.wait_reason, 0) - 1)
            request.wait_reason = ""
        elif request.waits_since_seq < self._reasons_seq:
            # Nobody told it for each request: then all that wait do so for the same reason.
            for reason, number in self.waiting_for.items():
                if number > 0:
                    self.waiting_for[reason] = number - 1
                    return

    def _finished(self, event: ev.RequestFinished) -> None:
        request = self._requests.pop(event.request, None)
        if request is None:
            self._fault(f"request {event.request} finished though it was not live")
        elif request.state == "running":
            self._num_running -= 1
        else:
            self._leave_queue(request)

    def _laid_out(self, event: ev.BlocksLaidOut) -> None:
        self._pools[event.tier].lay_out(event)
        if event.tier == CHECKED_TIER:
            self.limits = replace(self.limits, block_size_tokens=event.block_size_tokens, block_bytes=event.block_bytes)

    def _rebuilt(self, event: ev.PoolRebuilt) -> None:
        if event.outcome not in ("resized", "rebuilt"):
            return
        if event.outcome == "resized":
            self._pools[event.tier].resize(event.new_num_blocks)
        if event.tier != CHECKED_TIER:
            return
        self.limits = replace(self.limits, watermark_blocks=event.watermark_blocks)
        in_force: dict[str, int | None] = {
            "num_blocks": event.new_num_blocks,
            "watermark_blocks": event.watermark_blocks,
            "block_size": self.limits.block_size_tokens,
            "max_model_len": event.max_model_len,
        }
        known = {key: float(n) for key, n in in_force.items() if n is not None and key in self.config}
        self.config = {**self.config, **known}
        if "kv" in self.memory_bytes:
            self.memory_bytes = {**self.memory_bytes, "kv": event.new_num_blocks * self.limits.block_bytes}

    def _failed(self, event: ev.StepFailed) -> None:
        self._is_stalled = False
        self._pools[CHECKED_TIER].write(event.unwritten_block_ids, event.filled_slots)

    def _config_changed(self, event: ev.ConfigChanged) -> None:
        self.config = dict(event.config)
        self.config_drift = {**self.config_drift, event.key: float(event.is_drift)}
        self.limits = replace(
            self.limits, **{name: int(event.config[name]) for name in _LIVE_LIMITS if name in event.config}
        )

    def _adapters_changed(self, event: ev.AdapterLoaded | ev.AdapterFreed) -> None:
        self.memory_bytes = {**self.memory_bytes, "adapters": event.total_bytes}

    def _draining(self, _: ev.DrainStarted) -> None:
        self._base_state = "draining"

    def _stalled(self, _: ev.EngineStalled) -> None:
        self._is_stalled = True

    def _ended(self, event: ev.EngineEnded) -> None:
        self._base_state = event.reason


def _state(name: str) -> Literal["waiting", "running", "swapped"]:
    assert name in {"waiting", "running", "swapped"}, name
    return name  # type: ignore[return-value]


def _engine_state(name: str) -> EngineState:
    (state,) = (each for each in ENGINE_STATES if each == name)
    return state


def _group_names(snapshot: EngineSnapshot) -> list[str]:
    return [each.group for each in snapshot.groups] or [FIRST_GROUP]


def _block(tier: TierState, block: int) -> tuple[int, bytes | None, int, int]:
    """Return what a snapshot says of one block: reference count, hash, filled slots, group."""
    group = tier.block_groups[block] if tier.block_groups else 0
    return tier.ref_counts[block], tier.hashes[block], tier.filled_slots[block], group


def _tables(snapshot: EngineSnapshot) -> dict[tuple[str, str, int, str], list[int]]:
    return {(s.tier, s.request, s.sequence, s.group): s.block_ids for s in snapshot.sequences if s.block_ids}


def _transfers(snapshot: EngineSnapshot) -> dict[int, TransferState]:
    return {state.transfer: state for state in snapshot.transfers}


def _requests(snapshot: EngineSnapshot) -> dict[str, tuple[str, int]]:
    return {r.request: (r.state, r.queued_ns) for r in snapshot.requests}
