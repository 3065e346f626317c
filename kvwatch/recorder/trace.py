"""A recording as a trace in Chrome's JSON form, which Perfetto and chrome://tracing open.

Requests are tracks with slices (queue, prefill, decode, preempted, and `running` where the recording begins in the
middle of one); steps are a track of their own, with their phases and the operations of the
forward pass within them; blocks and requests by state are counters, taken from the ledger at each step's end. Does not
know how recordings are stored.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from kvwatch.errors import RecordingError
from kvwatch.ledger.ledger import CHECKED_TIER, Ledger
from kvwatch.recorder.reader import Gap, Recording
from kvwatch.recorder.replay import Replay
from kvwatch.telemetry import events as ev
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

ENGINE, REQUESTS = 1, 2
"""Process numbers in the trace."""
STEPS_TRACK = 1
NS_PER_US = 1000

Entry = dict[str, Any]


def write_trace(recording: Recording, path: Path) -> int:
    """Write the trace, replacing the file; return the number of its entries.

    Raises:
        RecordingError: the recording is damaged, or the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            return _write(recording, file)
    except OSError as error:
        raise RecordingError(f"{path} cannot be written ({error.strerror}); choose another place") from error


def _write(recording: Recording, file: TextIO) -> int:
    number = 0
    file.write('{"displayTimeUnit":"ms","traceEvents":[')
    for entry in entries(recording):
        file.write((",\n" if number else "\n") + msgspec.json.encode(entry).decode())
        number += 1
    file.write("\n]}\n")
    return number


def entries(recording: Recording) -> Iterator[Entry]:
    """Return the entries of the trace; times in microseconds of the engine's monotonic clock.

    Raises:
        RecordingError: the recording is damaged.
    """
    yield _named("process_name", ENGINE, 0, "engine")
    yield _named("process_name", REQUESTS, 0, "requests")
    yield _named("thread_name", ENGINE, STEPS_TRACK, "steps")
    replay, tracks = Replay(recording), _Tracks()
    time_ns = 0
    for item in replay:
        if isinstance(item, Gap):
            yield from tracks.end_all(time_ns)
        elif isinstance(item, EngineSnapshot):
            time_ns = item.time_ns
            yield from tracks.load(item)
            yield from _counters(replay.ledger)
        else:
            time_ns = item.time_ns
            yield from tracks.take(item)
            if isinstance(item, ev.StepCompleted):
                yield from _step(item)
                if replay.ledger.is_loaded:
                    yield from _counters(replay.ledger)
    yield from tracks.end_all(time_ns)


class _Tracks:
    """Open slices of live requests; each request has a track of its own."""

    def __init__(self) -> None:
        self._num_tracks = 0
        self._open: dict[str, tuple[int, str, int]] = {}
        """Track, name and begin in ns of the open slice, by request."""
        self._has_token: set[str] = set()
        self._handlers: dict[type[Event], Callable[[Any], Iterator[Entry]]] = {
            ev.RequestQueued: lambda e: self._begin(e.request, "queue", e.queued_ns),
            ev.RequestAdmitted: lambda e: self._next(e, "prefill"),
            ev.FirstToken: self._first_token,
            ev.RequestPreempted: self._preempted,
            ev.RequestResumed: self._resumed,
            ev.RequestFinished: self._finished,
            ev.BlocksCopied: lambda e: self._mark(e, "copy-on-write", {"blocks": len(e.sources)}),
            ev.AllocationFailed: lambda e: self._mark(e, "no blocks", {"needed": e.needed, "available": e.available}),
        }

    def take(self, event: Event) -> Iterator[Entry]:
        handler = self._handlers.get(type(event))
        return handler(event) if handler is not None else iter(())

    def load(self, snapshot: EngineSnapshot) -> Iterator[Entry]:
        for each in snapshot.requests:
            if each.state == "running":
                yield from self._begin(each.request, "running", snapshot.time_ns)
            else:
                yield from self._begin(each.request, "queue", each.queued_ns)

    def end_all(self, time_ns: int) -> Iterator[Entry]:
        for request in list(self._open):
            yield from self._end(request, time_ns)
        self._has_token.clear()

    def _begin(self, request: str, name: str, time_ns: int) -> Iterator[Entry]:
        self._num_tracks += 1
        self._open[request] = (self._num_tracks, name, time_ns)
        yield _named("thread_name", REQUESTS, self._num_tracks, request)

    def _end(self, request: str, time_ns: int, args: dict[str, Any] | None = None) -> Iterator[Entry]:
        found = self._open.pop(request, None)
        if found is not None:
            track, name, begin_ns = found
            yield _slice(REQUESTS, track, name, (begin_ns, time_ns), {"request": request} | (args or {}))

    def _next(self, event: Any, name: str, args: dict[str, Any] | None = None) -> Iterator[Entry]:
        """End the request's slice and begin another on the same track."""
        found = self._open.get(event.request)
        if found is None:  # seen for the first time: the recording begins without a state
            yield from self._begin(event.request, name, event.time_ns)
            return
        yield from self._end(event.request, event.time_ns, args)
        self._open[event.request] = (found[0], name, event.time_ns)

    def _first_token(self, event: ev.FirstToken) -> Iterator[Entry]:
        self._has_token.add(event.request)
        return self._next(event, "decode")

    def _preempted(self, event: ev.RequestPreempted) -> Iterator[Entry]:
        return self._next(event, "preempted", {"blocks": event.num_blocks, "beneficiary": event.beneficiary})

    def _resumed(self, event: ev.RequestResumed) -> Iterator[Entry]:
        name = "decode" if event.request in self._has_token else "prefill"
        return self._next(event, name, {"recompute_tokens": event.recompute_tokens})

    def _finished(self, event: ev.RequestFinished) -> Iterator[Entry]:
        self._has_token.discard(event.request)
        return self._end(event.request, event.time_ns, {"reason": event.reason, "tokens": event.generated_tokens})

    def _mark(self, event: Any, name: str, args: dict[str, Any]) -> Iterator[Entry]:
        track = self._open.get(event.request, (0,))[0]
        yield {
            "ph": "i", "s": "t", "pid": REQUESTS, "tid": track, "name": name, "ts": event.time_ns / NS_PER_US,
            "args": {"request": event.request} | args,
        }  # fmt: skip


def _counters(ledger: Ledger) -> Iterator[Entry]:
    pool, time = ledger.pool(CHECKED_TIER), ledger.time_ns / NS_PER_US
    blocks = {"used": pool.num_used, "cached": pool.num_cached, "empty": pool.num_empty}
    yield {"ph": "C", "pid": ENGINE, "name": "blocks", "ts": time, "args": blocks}
    yield {
        "ph": "C", "pid": ENGINE, "name": "live requests", "ts": time,
        "args": {"running": ledger.num_running, "waiting": ledger.num_waiting},
    }  # fmt: skip


def _step(event: ev.StepCompleted) -> Iterator[Entry]:
    phases = {
        "schedule": event.schedule_ns, "build": event.build_ns or 0, "forward": event.forward_ns,
        "sample": event.sample_ns, "apply": event.apply_ns,
    }  # fmt: skip
    # The event is stamped when its results are applied, that is after everything but the last phase.
    end_ns = event.time_ns + event.apply_ns
    begin_ns = end_ns - sum(phases.values())
    args = {f"{name}_us": ns / NS_PER_US for name, ns in phases.items()}
    yield _slice(ENGINE, STEPS_TRACK, f"step {event.step}", (begin_ns, end_ns), args)
    for name, ns in phases.items():
        if not ns:
            continue
        yield _slice(ENGINE, STEPS_TRACK, name, (begin_ns, begin_ns + ns), {})
        if name == "forward":
            yield from _operations(event, begin_ns)
        begin_ns += ns


def _operations(event: ev.StepCompleted, begin_ns: int) -> Iterator[Entry]:
    """Return the parts of a forward pass, one after the other: layer by layer they alternate, which nobody measures."""
    parts = {
        "linear": event.linear_ns, "attention": event.attention_ns, "rotary": event.rotary_ns, "norm": event.norm_ns,
        "activation": event.activation_ns, "logits": event.logits_ns,
    }  # fmt: skip
    for name, ns in parts.items():
        if ns is not None:
            yield _slice(ENGINE, STEPS_TRACK, name, (begin_ns, begin_ns + ns), {})
            begin_ns += ns


def _slice(process: int, track: int, name: str, times_ns: tuple[int, int], args: dict[str, Any]) -> Entry:
    begin_ns, end_ns = times_ns
    return {
        "ph": "X", "pid": process, "tid": track, "name": name, "ts": begin_ns / NS_PER_US,
        "dur": max(0, end_ns - begin_ns) / NS_PER_US, "args": args,
    }  # fmt: skip


def _named(what: str, process: int, track: int, name: str) -> Entry:
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": {"name": name}}
