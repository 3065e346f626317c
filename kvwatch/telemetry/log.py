"""The event log: one bounded, sequenced, in-process ring.

The engine thread appends; any number of subscribers on other threads read through cursors of their own. A subscriber
can neither block nor raise into the engine: one that falls behind by more than the capacity finds a gap, counts it and
heals itself with a snapshot (see `kvwatch.ledger`).

Why no lock: the ring is a list of references, and each event carries the sequence number under which it was appended.
Storing a reference is atomic in CPython, so a reader checks that the event it found is the one it asked for; a
different number means that the writer has lapped it.
"""

import threading
from typing import Protocol, cast

from kvwatch.telemetry.clock import Clock, SystemClock
from kvwatch.telemetry.schema import Event

DEFAULT_CAPACITY = 65_536
"""Events kept for subscribers; about a minute of a busy engine."""


class GapError(Exception):
    """The log no longer holds an event that the cursor wants; heal with a snapshot. Never reaches the engine."""

    def __init__(self, wanted: int, oldest: int) -> None:
        super().__init__(f"event {wanted} was asked for, the oldest kept is {oldest}")
        self.wanted = wanted
        self.oldest = oldest


class Emitter(Protocol):
    """What an emit site needs of the log."""

    @property
    def active(self) -> bool:
        """Whether anybody listens; emit sites check this before building an event."""
        ...

    def append(self, event: Event) -> None:
        """Append one event."""
        ...


class EventLog:
    """Bounded, sequenced log of events.

    `append` and `begin` belong to the engine thread. `subscribe` and everything on a cursor may be called from any
    thread, each cursor from one thread at a time.
    """

    __slots__ = ("_capacity", "_clock", "_cursors", "_holes", "_lock", "_ring", "active", "head", "now_ns", "step")

    def __init__(self, capacity: int = DEFAULT_CAPACITY, clock: Clock | None = None) -> None:
        self._ring: list[Event | None] = [None] * capacity
        self._capacity = capacity
        self._clock = clock or SystemClock()
        self._cursors: list[Cursor] = []
        self._lock = threading.Lock()  # guards the list of cursors only
        self._holes: tuple[tuple[int, int], ...] = ()  # (first number, number after) of what was skipped
        self.active = False
        """True while at least one subscriber is attached. Read by emit sites; set here only."""
        self.head = 0
        """Sequence number that the next event will get."""
        self.now_ns = self._clock.monotonic_ns()
        """Monotonic time in ns given to events; advanced by `begin`."""
        self.step = 0

    @property
    def capacity(self) -> int:
        """Number of events kept."""
        return self._capacity

    @property
    def clock(self) -> Clock:
        """The clock that stamps events."""
        return self._clock

    def begin(self, step: int) -> int:
        """Read the clock and stamp what follows with it and with `step`; return the time in ns. Engine thread only."""
        self.step = step
        self.now_ns = now = self._clock.monotonic_ns()
        return now

    def append(self, event: Event) -> None:
        """Append one event. Engine thread only; O(1), never blocks, never raises."""
        head = self.head
        event.seq = head
        event.step = self.step
        event.time_ns = self.now_ns
        self._ring[head % self._capacity] = event
        # Last: a reader that sees the new head must find the event in place.
        self.head = head + 1

    def forward(self, event: Event) -> None:
        """Append an event of another engine's log, which keeps its step and its time. Appender's thread only."""
        self.step, self.now_ns = event.step, event.time_ns
        self.append(event)

    def skip(self, count: int) -> None:
        """Leave out `count` numbers, for events that were lost before they came here. Appender's thread only.

        Whoever reads on finds a gap there, and heals as from any other.
        """
        head = self.head
        oldest = head + count - self._capacity
        # First: a reader that sees the new head must know of the hole.
        self._holes = (*(hole for hole in self._holes if hole[1] > oldest), (head, head + count))
        self.head = head + count

    def subscribe(self, name: str) -> "Cursor":
        """Attach a subscriber that sees everything appended from now on. `name` labels its self-metrics."""
        with self._lock:
            cursor = Cursor(self, name, self.head)
            self._cursors.append(cursor)
            self.active = True
        return cursor

    def unsubscribe(self, cursor: "Cursor") -> None:
        """Detach a subscriber; emit sites become idle when it was the last. Safe to call twice."""
        with self._lock:
            if cursor in self._cursors:
                self._cursors.remove(cursor)
            self.active = bool(self._cursors)

    def _read(self, start: int, limit: int) -> list[Event]:
        head, ring, capacity = self.head, self._ring, self._capacity
        end = min(head, start + limit)
        if start < head - capacity:
            raise GapError(start, head - capacity)
        for begin, after in self._holes:
            if begin <= start < after:
                raise GapError(start, after)
            if start < begin < end:
                end = begin
        first, stop = start % capacity, start % capacity + end - start
        # Slicing is atomic in CPython, and events are overwritten oldest first: when the oldest of a slice is the
        # one that was asked for, so are the others.
        events = ring[first:stop]
        if events and not _is_event(events[0], start):
            raise GapError(start, self.head - capacity)
        if stop > capacity:
            wrapped = ring[: stop - capacity]
            if _is_event(wrapped[0], start + len(events)):
                events += wrapped
        found = cast("list[Event]", events)  # every place below the head holds an event
        for event in found:
            if event.is_settled_late:
                event.settle()
        return found


def _is_event(event: Event | None, seq: int) -> bool:
    return event is not None and event.seq == seq


class Cursor:
    """A subscriber's place in the log."""

    __slots__ = ("_log", "name", "num_gaps", "num_lost", "position")

    def __init__(self, log: EventLog, name: str, position: int) -> None:
        self._log = log
        self.name = name
        self.position = position
        """Sequence number of the next event to read."""
        self.num_gaps = 0
        self.num_lost = 0
        """Events that were overwritten before they were read."""

    @property
    def lag(self) -> int:
        """Number of events appended and not yet read."""
        return self._log.head - self.position

    def read(self, limit: int = 256) -> list[Event]:
        """Return up to `limit` next events, in order, and advance past them.

        Raises:
            GapError: the next event was overwritten. The position stays; call `resume_at` with a snapshot's number.
        """
        events = self._log._read(self.position, limit)
        self.position += len(events)
        return events

    def resume_at(self, seq: int) -> None:
        """Continue at `seq`, which a snapshot names, counting what lies between as one gap."""
        if seq > self.position:
            self.num_gaps += 1
            self.num_lost += seq - self.position
        self.position = seq

    def close(self) -> None:
        """Detach from the log. Safe to call twice."""
        self._log.unsubscribe(self)
