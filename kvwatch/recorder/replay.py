"""Rebuilds the ledger from a recording, at any event, step or time.

Owns the order: state, then events, and nothing known in gaps. Does not know files (that is the reader) nor how a state
is shown.
"""

from collections.abc import Iterator

import msgspec

from kvwatch.errors import RecordingError
from kvwatch.ledger.ledger import CHECKED_TIER, Ledger
from kvwatch.recorder.frames import FrameKind
from kvwatch.recorder.reader import Frame, Gap, Recording
from kvwatch.telemetry.events import StepCompleted, StepScheduled
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

CONTRADICTIONS = (LookupError, ValueError, TypeError, ArithmeticError, AssertionError)
"""What a ledger may raise when events or states of a damaged or hostile file make no sense."""


class Target(msgspec.Struct, frozen=True):
    """A place in a recording; one of the three. None of them is the end."""

    step: int | None = None
    """The end of this step."""
    seq: int | None = None
    """After this event."""
    time_ns: int | None = None
    """After everything up to this monotonic time in ns."""

    def describe(self) -> str:
        """Return it as the user would say it."""
        if self.step is not None:
            return f"step {self.step}"
        return f"event {self.seq}" if self.seq is not None else f"time {self.time_ns}"

    def may_begin_with(self, frame: Frame) -> bool:
        """Whether the target is not before the state in this frame."""
        span = frame.span
        if self.step is not None:
            return span.first_step < self.step
        if self.seq is not None:
            return span.first_seq <= self.seq + 1
        return self.time_ns is None or span.first_ns <= self.time_ns

    def is_before(self, event: Event) -> bool:
        """Whether the event comes after the target."""
        if self.step is not None:
            return event.step > self.step
        if self.seq is not None:
            return event.seq > self.seq
        return self.time_ns is not None and event.time_ns > self.time_ns

    def is_reached_by(self, event: Event) -> bool:
        """Whether nothing after this event belongs to the target."""
        if self.step is not None:
            return type(event) is StepCompleted and event.step >= self.step
        return self.seq is not None and event.seq >= self.seq


END = Target()


class Replay:
    """Walks through a recording with a ledger that is always at the event that was just returned.

    `ledger.is_loaded` is false where nothing is known: before the first state, and in and after a gap up to the next
    one. Iterating again goes on where it stopped.
    """

    def __init__(self, recording: Recording, first: int = 0) -> None:
        self._recording = recording
        self._items = self._walk(first)
        self.ledger = Ledger()

    def __iter__(self) -> Iterator[Event | Gap | EngineSnapshot]:
        """Return events, and gaps and the states that follow them, in order; each once it has been applied.

        Raises:
            RecordingError: the recording is damaged or contradicts itself.
        """
        return self._items

    def _walk(self, first: int) -> Iterator[Event | Gap | EngineSnapshot]:
        for item in self._recording.items(first):
            if isinstance(item, Gap):
                self.ledger = Ledger()
                yield item
            elif isinstance(item, EngineSnapshot):
                # A state in the middle says what is known already.
                if not self.ledger.is_loaded or self.ledger.next_seq != item.seq:
                    self.ledger = _loaded(item)
                    yield item
            else:
                for event in item:
                    if self.ledger.is_loaded:
                        _apply(self.ledger, event)
                    yield event


def ledger_at(recording: Recording, target: Target = END) -> Ledger:
    """Return the ledger as it was at `target`.

    Raises:
        RecordingError: the recording does not reach there, knows nothing of it, or is damaged.
    """
    states = [place for place, frame in enumerate(recording.frames) if frame.kind is FrameKind.STATE]
    if not states:
        raise RecordingError(
            f"{recording.path} holds no state, so blocks cannot be rebuilt; --events still lists its events"
        )
    _check_reach(recording, target, recording.frames[states[0]])
    fitting = [place for place in states if target.may_begin_with(recording.frames[place])]
    place = fitting[-1] if fitting else states[0]
    state = recording.read(recording.frames[place])
    assert isinstance(state, EngineSnapshot)
    ledger = _loaded(state)
    for item in recording.items(place + 1):
        if isinstance(item, Gap):
            raise RecordingError(
                f"{target.describe()} lies in a gap: events {item.first_seq} to {item.end_seq - 1} were lost; "
                "choose a place before or after them"
            )
        # A state in the middle says what is known already.
        if not isinstance(item, EngineSnapshot) and _apply_until(ledger, item, target):
            break
    return ledger


def _apply_until(ledger: Ledger, events: list[Event], target: Target) -> bool:
    """Apply events up to the target; return whether it was reached."""
    for event in events:
        if target.is_before(event):
            return True
        _apply(ledger, event)
        if target.is_reached_by(event):
            return True
    return False


def _apply(ledger: Ledger, event: Event) -> None:
    if event.seq != ledger.next_seq:
        raise RecordingError(f"event {event.seq} stands where {ledger.next_seq} should; the recording is damaged")
    try:
        if type(event) is StepScheduled:  # the ledger looks at what was written only when somebody asks
            _check_written(ledger, event)
        ledger.apply(event)
    except CONTRADICTIONS as error:
        raise RecordingError(
            f"event {event.seq} contradicts the state before it ({error!r}); the recording is damaged"
        ) from error


def _check_written(ledger: Ledger, event: StepScheduled) -> None:
    blocks, capacity = event.written_block_ids, ledger.pool(CHECKED_TIER).capacity
    if blocks and not 0 <= min(blocks) <= max(blocks) <= capacity:
        raise IndexError(f"a block beyond {capacity} was written")


def _check_reach(recording: Recording, target: Target, first_state: Frame) -> None:
    first, last = first_state.span, recording.frames[-1].span
    ranges = [
        ("step", target.step, first.first_step, last.last_step),
        ("event", target.seq, first.first_seq - 1, last.end_seq - 1),
        ("time", target.time_ns, first.first_ns, last.last_ns),
    ]
    for name, wanted, low, high in ranges:
        if wanted is not None and not low <= wanted <= high:
            raise RecordingError(f"{name} {wanted} is not in the recording; it knows {name}s {low} to {high}")


def _loaded(snapshot: EngineSnapshot) -> Ledger:
    """Return a ledger with a state; columns are compared first, since a ledger trusts its engine."""
    wrong = [
        tier.tier
        for tier in snapshot.tiers
        if not len(tier.ref_counts) == len(tier.hashes) == len(tier.filled_slots) == tier.num_blocks >= 1
        or len(tier.block_groups) not in (0, tier.num_blocks)
    ]
    wrong += [each.tier for each in snapshot.indexed if len(each.hashes) != len(each.ref_counts)]
    is_checked = snapshot.is_foreign or CHECKED_TIER in {tier.tier for tier in snapshot.tiers}
    if wrong or not is_checked:
        raise RecordingError(f"the state before event {snapshot.seq} makes no sense; the recording is damaged")
    ledger = Ledger()
    try:
        ledger.load(snapshot)
    except CONTRADICTIONS as error:
        raise RecordingError(
            f"the state before event {snapshot.seq} makes no sense ({error!r}); the recording is damaged"
        ) from error
    return ledger
