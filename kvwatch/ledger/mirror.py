"""Everything known of one engine: ledger, counters and the newest view; and when a view is published.

A view shows the state at the end of a step: of the newest one that is known, every `view_interval_seconds`. Whoever
brings events may come at the same pace; then the first step of what he brings is as old as the last view, so it is not
the one to show. The end of the last running request is shown at once: an idle engine must not look busy until its next
step. When an engine falls silent in the middle of a step (stuck, or aborted while idle), what its last events said is
shown after `QUIET_NS`. Extremes of the last while are exact as of the view's time, and change by themselves when the
window moves on.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import structlog

from kvwatch.ledger.collector import BATCH
from kvwatch.ledger.feeds import Labels
from kvwatch.ledger.gauges import extremes, gauges
from kvwatch.ledger.ledger import CHECKED_TIER, Ledger
from kvwatch.ledger.series import SeriesSettings
from kvwatch.ledger.store import MetricStore
from kvwatch.ledger.view import Sample, View
from kvwatch.ledger.window import RollingMinimum
from kvwatch.telemetry import metrics
from kvwatch.telemetry.clock import Clock
from kvwatch.telemetry.events import (
    BlocksLaidOut,
    BlocksReleased,
    PoolRebuilt,
    PrefixUnpinned,
    RequestFinished,
    StepCompleted,
)
from kvwatch.telemetry.schema import REGISTRY, Event, Metric
from kvwatch.telemetry.snapshot import EngineSnapshot

QUIET_NS = 250_000_000
"""An engine that has said nothing for so long, in ns, is not in the middle of anything that ends soon."""

OVERDUE = 3
"""Intervals without a view after which one is published although more is known: catching up takes long."""

VIOLATION_LOG_NS = 60_000_000_000
"""At most one violation is logged in this time, in ns; all are counted."""

WINDOW_SECONDS = 60
"""Length of the window of minima and maxima: at least two scrape intervals, so that no extreme falls between two."""

NS_PER_SECOND = 1_000_000_000

logger = structlog.get_logger(__name__)


class Mirror:
    """Mirror of one engine. Observatory thread only, except `view`, which any thread may read."""

    def __init__(
        self,
        clock: Clock,
        view_interval_seconds: float = 0.5,
        *,
        series: SeriesSettings | None = None,
        window_seconds: int = WINDOW_SECONDS,
        foreign: Collection[Metric] | None = None,
    ) -> None:
        """Create a mirror that knows nothing yet.

        Args:
            clock: the clock of the log.
            view_interval_seconds: least time between two views of a busy engine, or a tenth less for those who come
                at this pace and are early now and then; 0 for one at every step.
            series: allow-lists of labels and further bounds of histograms.
            window_seconds: length of the window of minima and maxima.
            foreign: for a foreign engine the metrics that its events can feed.
        """
        self._clock = clock
        self._window_seconds = window_seconds
        self._lowest_free: dict[str, RollingMinimum] = {}
        self._interval_ns = round(view_interval_seconds * NS_PER_SECOND)
        self._store = MetricStore(REGISTRY, series, foreign)
        self._stall_ns: defaultdict[Labels, int] = defaultdict(int)
        self._violations: defaultdict[Labels, int] = defaultdict(int)
        if foreign is None:  # without steps there is neither a stall nor a checksum
            self._stall_ns = self._store.counter(metrics.KV_STALL_SECONDS, NS_PER_SECOND).cells
            self._violations = self._store.counter(metrics.LEDGER_VIOLATIONS).cells
        self._num_events: Counter[type[Event]] = Counter({spec.cls: 0 for spec in REGISTRY})
        self._batch: Sequence[Event] = ()
        """Events of the batch in progress that no counter and no histogram has yet."""
        self._names = {spec.cls: spec.name for spec in REGISTRY}
        self._published_ns = self._applied_ns = clock.monotonic_ns()
        self._logged_ns: int | None = None
        self._stalled_since_ns: int | None = None
        self._is_at_step_boundary = True
        self._newest_step_seq: int | None = None
        """Number of the last `StepCompleted` of what is being applied; none while more is there."""
        self.ledger = Ledger()
        self._actions = self._make_actions()
        self.view = self._make_view(self._published_ns)
        """The newest view."""

    @property
    def num_violations(self) -> int:
        """Steps after which ledger and engine disagreed."""
        return self._violations[()]

    def load(self, snapshot: EngineSnapshot) -> None:
        """Begin anew from a snapshot, keeping counters, and publish what it says."""
        self._batch = ()
        self.ledger.load(snapshot)
        self._store.open_tiers({*(each.tier for each in snapshot.tiers), *(each.tier for each in snapshot.indexed)})
        self._actions = self._make_actions()
        # What happened while events were lost is not known: extremes begin anew.
        self._lowest_free = {
            tier: RollingMinimum(self._window_seconds * NS_PER_SECOND, snapshot.time_ns) for tier in self.ledger.pools
        }
        is_stalled = bool(self.ledger.waiting_for.get("blocks"))
        self._stalled_since_ns = snapshot.time_ns if is_stalled else None
        self._is_at_step_boundary = True
        self.publish()
        self._applied_ns = self._published_ns  # the clock of a remote engine may have jumped when it restarted

    def apply(self, events: Sequence[Event]) -> None:
        """Apply events, which continue where the last ones ended; publish a view when one is due."""
        if not events:
            return
        self._batch = events
        self._newest_step_seq = _newest_step_seq(events) if len(events) < BATCH else None
        actions = self._actions
        for event in events:
            for action in actions[type(event)]:
                action(event)
        self.ledger.advance(events[-1])
        self._count_events()
        self._is_at_step_boundary = type(events[-1]) is StepCompleted
        self._applied_ns = self._clock.monotonic_ns()
        if self.ledger.index is not None and self._applied_ns - self._published_ns >= self._interval_ns:
            self.publish()  # nobody says when a step of a foreign engine is over

    def settle(self) -> None:
        """Publish what is not shown yet if it will not be overtaken soon. Call when no more events are there."""
        now = self._clock.monotonic_ns()
        if self.ledger.next_seq == self.view.seq + 1:
            if any(self.view.time_ns < changes <= now for changes in self._changes_ns()):
                self.publish(now)
            return
        is_due = self._is_at_step_boundary and now - self._published_ns >= self._interval_ns * 9 // 10
        if is_due or not self.ledger.requests or now - self._applied_ns >= QUIET_NS:
            self.publish(now)

    def publish(self, now_ns: int | None = None) -> None:
        """Publish a view of the state as it is now, which is the time of the newest event unless said otherwise."""
        self.view = self._make_view(self.ledger.time_ns if now_ns is None else now_ns)
        self._published_ns = self._clock.monotonic_ns()

    def _make_actions(self) -> dict[type[Event], tuple[Callable[[Any], None], ...]]:
        """Return, for each event class, what is to be called with an event. Counters wait for the end of the batch."""
        actions: dict[type[Event], tuple[Callable[[Any], None], ...]] = {}
        for cls in self._names:
            handler = self.ledger.handlers.get(cls)
            actions[cls] = (handler,) if handler else ()
        actions[StepCompleted] += (self._complete,)
        actions[RequestFinished] += (self._end_stall,)
        actions[PoolRebuilt] += (self._restart_extremes,)
        actions[BlocksLaidOut] += (self._restart_extremes_behind,)
        actions[BlocksReleased] = (self._end_low, *actions[BlocksReleased])
        actions[PrefixUnpinned] = (self._end_low_of_device, *actions[PrefixUnpinned])
        return actions

    def _complete(self, event: StepCompleted) -> None:
        wrong = self.ledger.check(event)
        if wrong:
            self._violations[()] += 1
            self._report(event, wrong)
        if self._stalled_since_ns is not None:
            self._stall_ns[()] += event.time_ns - self._stalled_since_ns
        self._stalled_since_ns = event.time_ns if event.waiting_for.get("blocks") else None
        is_newest = event.seq == self._newest_step_seq
        is_idle = is_newest and not self.ledger.num_running  # a pause that is over already must not hide what followed
        wait_ns = self._interval_ns * 9 // 10 if is_newest else self._interval_ns * OVERDUE
        if is_idle or self._clock.monotonic_ns() - self._published_ns >= wait_ns:
            self.publish()

    def _end_stall(self, event: RequestFinished) -> None:
        """Whoever waited for blocks may have been the last to do so; the next step may be hours away."""
        if self._stalled_since_ns is not None and not self.ledger.waiting_for.get("blocks"):
            self._stall_ns[()] += event.time_ns - self._stalled_since_ns
            self._stalled_since_ns = None

    def _end_low(self, event: BlocksReleased) -> None:
        """Only this and the end of a pin raise the number of free blocks: before, it is the lowest since the last."""
        self._lowest_free[event.tier].end_stretch(self.ledger.pools[event.tier].num_free, event.time_ns)

    def _end_low_of_device(self, event: PrefixUnpinned) -> None:
        """Pins are in the device's pool only."""
        self._lowest_free[CHECKED_TIER].end_stretch(self.ledger.pools[CHECKED_TIER].num_free, event.time_ns)

    def _restart_extremes(self, event: PoolRebuilt) -> None:
        """What was the lowest of another pool says nothing of this one."""
        if event.outcome in ("resized", "rebuilt"):
            self._lowest_free[event.tier] = RollingMinimum(self._window_seconds * NS_PER_SECOND, event.time_ns)

    def _restart_extremes_behind(self, event: BlocksLaidOut) -> None:
        """A tier behind the device has other blocks too, and no `PoolRebuilt` of its own."""
        if event.tier != CHECKED_TIER:
            self._lowest_free[event.tier] = RollingMinimum(self._window_seconds * NS_PER_SECOND, event.time_ns)

    def _changes_ns(self) -> list[int]:
        """Return when each tier's extremes change if nothing happens any more."""
        pools = self.ledger.pools
        return [minimum.changes_ns(pools[tier].num_free) for tier, minimum in self._lowest_free.items()]

    def _count_events(self) -> None:
        """Count what was applied of the batch: all of it, or up to the step that is being shown."""
        if self._batch:
            num_applied = self.ledger.next_seq - self._batch[0].seq
            applied, self._batch = self._batch[:num_applied], self._batch[num_applied:]
            self._num_events.update(map(type, applied))
            self._store.feed(applied)

    def _report(self, event: StepCompleted, wrong: list[str]) -> None:
        now = self._clock.monotonic_ns()
        if self._logged_ns is None or now - self._logged_ns >= VIOLATION_LOG_NS:
            self._logged_ns = now
            logger.error("ledger violation", step=event.step, seq=event.seq, equations=wrong)

    def _make_view(self, now_ns: int) -> View:
        ledger, clock = self.ledger, self._clock
        self._count_events()
        seen = [
            Sample(metrics.TELEMETRY_EVENTS, (self._names[cls],), number) for cls, number in self._num_events.items()
        ]
        return View(
            seq=ledger.next_seq - 1,
            step=ledger.step,
            time_ns=now_ns,
            gauges=(
                *gauges(ledger, clock.wall_ns() - clock.monotonic_ns()),
                *extremes(ledger, self._lowest_free, now_ns, f"{self._window_seconds}s"),
            ),
            counters=(*self._store.counters(), *seen),
            histograms=tuple(self._store.histograms()),
        )


def _newest_step_seq(events: Sequence[Event]) -> int | None:
    return next((event.seq for event in reversed(events) if type(event) is StepCompleted), None)
