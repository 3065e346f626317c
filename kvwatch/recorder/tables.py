"""A recording as tables: one for each event class, one row for each step, one row for each request.

Owns columns and rows; does not know file formats. Rows come one after the other, so that a long recording takes no
more memory than a short one.
"""

from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec

from kvwatch.derive.lock import wire_type
from kvwatch.ledger.ledger import CHECKED_TIER, Ledger
from kvwatch.recorder.reader import Gap, Recording
from kvwatch.recorder.replay import Replay
from kvwatch.recorder.schema import UnknownEvent
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.schema import REGISTRY, Event
from kvwatch.telemetry.snapshot import EngineSnapshot

STEPS, REQUESTS = "steps", "requests"

Row = tuple[Any, ...]


class Column(msgspec.Struct, frozen=True):
    """One column; `type` is a type of the lock file, such as `list<int64>`."""

    name: str
    type: str


class Table(msgspec.Struct, frozen=True):
    """One table."""

    name: str
    columns: tuple[Column, ...]


class StepRow(msgspec.Struct, array_like=True):
    """The device tier and the queue at the end of a step, as the ledger has them. Times in ns."""

    seq: int
    step: int
    time_ns: int
    unix_ns: int
    capacity: int
    num_empty: int
    num_used: int
    num_cached: int
    num_table_entries: int
    num_shared: int
    num_filled_slots: int
    num_running: int
    num_waiting: int


class RequestRow(msgspec.Struct, array_like=True):
    """What became of a request, as far as the recording tells. Monotonic times in ns."""

    request: str
    queued_ns: int | None = None
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    reason: str | None = None
    """Why it ended; none while it lives."""
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    num_preemptions: int = 0
    peak_blocks: int | None = None


def tables() -> dict[str, Table]:
    """Return all tables by name; those of events have their names."""
    events = [
        Table(spec.name, (Column("unix_ns", "int64"), *(Column(n, wire_type(t)) for n, t in spec.types.items())))
        for spec in REGISTRY
    ]
    return {table.name: table for table in (_table(STEPS, StepRow), _table(REQUESTS, RequestRow), *events)}


def rows(recording: Recording) -> Iterator[tuple[str, Row]]:
    """Return (table, row) in the order in which things happened.

    Raises:
        RecordingError: the recording is damaged.
    """
    offset = recording.header.wall_minus_monotonic_ns
    names = {spec.cls: spec.name for spec in REGISTRY}
    replay, requests = Replay(recording), _Requests()
    for item in replay:
        if isinstance(item, Gap):
            yield from requests.forget()
        elif isinstance(item, EngineSnapshot):
            requests.load(item)
        elif not isinstance(item, UnknownEvent):
            yield names[type(item)], (item.time_ns + offset, *msgspec.structs.astuple(item))
            if isinstance(item, ev.StepCompleted) and replay.ledger.is_loaded:
                yield STEPS, msgspec.structs.astuple(step_row(replay.ledger, offset))
            yield from requests.take(item)
    yield from requests.forget()


def step_row(ledger: Ledger, wall_minus_monotonic_ns: int) -> StepRow:
    """Return the ledger's counts after the event that it has just applied."""
    pool = ledger.pool(CHECKED_TIER)
    return StepRow(
        seq=ledger.next_seq - 1,
        step=ledger.step,
        time_ns=ledger.time_ns,
        unix_ns=ledger.time_ns + wall_minus_monotonic_ns,
        capacity=pool.capacity,
        num_empty=pool.num_empty,
        num_used=pool.num_used,
        num_cached=pool.num_cached,
        num_table_entries=pool.num_entries,
        num_shared=pool.num_shared,
        num_filled_slots=pool.num_filled_slots,
        num_running=ledger.num_running,
        num_waiting=ledger.num_waiting,
    )


class _Requests:
    """Rows of live requests; a row is given out when its request ends, or nothing more can be known of it."""

    def __init__(self) -> None:
        self._live: dict[str, RequestRow] = {}

    def load(self, snapshot: EngineSnapshot) -> None:
        for each in snapshot.requests:
            self._row(each.request).queued_ns = each.queued_ns

    def take(self, event: Event) -> Iterator[tuple[str, Row]]:
        if isinstance(event, ev.RequestQueued):
            row = self._row(event.request)
            row.queued_ns, row.prompt_tokens = event.queued_ns, event.prompt_tokens
        elif isinstance(event, ev.RequestAdmitted):
            row = self._row(event.request)
            row.admitted_ns, row.prompt_tokens, row.cached_tokens = event.time_ns, event.prompt_tokens, event.hit_tokens
        elif isinstance(event, ev.FirstToken):
            self._row(event.request).first_token_ns = event.time_ns
        elif isinstance(event, ev.RequestPreempted):
            self._row(event.request).num_preemptions += 1
        elif isinstance(event, ev.RequestFinished):
            row = self._row(event.request)
            row.finished_ns, row.reason, row.peak_blocks = event.time_ns, event.reason, event.peak_blocks
            row.prompt_tokens, row.generated_tokens = event.prompt_tokens, event.generated_tokens
            row.cached_tokens, row.num_preemptions = event.cached_tokens, event.num_preemptions
            del self._live[event.request]
            yield REQUESTS, msgspec.structs.astuple(row)

    def forget(self) -> Iterator[tuple[str, Row]]:
        for row in self._live.values():
            yield REQUESTS, msgspec.structs.astuple(row)
        self._live.clear()

    def _row(self, request: str) -> RequestRow:
        return self._live.setdefault(request, RequestRow(request))


def _table(name: str, row: type[msgspec.Struct]) -> Table:
    hints = get_type_hints(row)
    return Table(name, tuple(Column(field, wire_type(hints[field])) for field in row.__struct_fields__))
