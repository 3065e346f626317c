"""What comes over the stream as lines: readable ones for people, JSON for programs. Knows no event by name.

Names come from outside, so control characters are made visible: a request's name must not move a terminal's cursor.
"""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvwatch.stream.contract import Gap, Started
from kvwatch.telemetry.schema import REGISTRY, Event, EventSpec
from kvwatch.telemetry.snapshot import EngineSnapshot

MAX_SHOWN = 6
"""Elements of a list that are shown in a readable line."""

HASH_DIGITS = 8
"""Hexadecimal digits of a hash that are shown in a readable line."""

NS_PER_SECOND = 1_000_000_000
_TIME_UNITS = ((NS_PER_SECOND, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))
_COMMON = frozenset(Event.__struct_fields__)
_REQUEST_FIELDS = ("request", "requests")


class TextLines:
    """Readable lines."""

    def __init__(self) -> None:
        self._wall_offset_ns = 0

    def started(self, started: Started) -> str:
        """Return a line that says where the subscription begins."""
        self._wall_offset_ns = started.wall_offset_ns
        labels = " ".join(f"{name}={_shown(value)}" for name, value in started.labels.items())
        return f"-- epoch {_shown(started.epoch)}, from event {started.seq} {labels}".rstrip()

    def gap(self, gap: Gap) -> str:
        """Return a line that says how many events were missed."""
        return f"-- {gap.num_missed} events from {gap.seq} on were missed"

    def snapshot(self, snapshot: EngineSnapshot) -> str:
        """Return a line with the counts of a snapshot."""
        parts = []
        for tier in snapshot.tiers:
            used = sum(1 for count in tier.ref_counts if count)
            known = zip(tier.ref_counts, tier.hashes, strict=True)
            cached = sum(1 for count, block_hash in known if not count and block_hash is not None)
            empty = tier.num_blocks - 1 - used - cached
            parts.append(f"{_shown(tier.tier)}: {used} used, {cached} cached, {empty} empty blocks")
        states = [request.state for request in snapshot.requests]
        parts += [f"{states.count(state)} {_shown(state)}" for state in sorted(set(states))]
        place = f"{self._time(snapshot.time_ns)} step {snapshot.step:<7}"
        return f"{place} state before event {snapshot.seq}: {'; '.join(parts)}"

    def event(self, event: Event) -> str:
        """Return the line of one event: time, step, request, what, and everything else that it says."""
        spec = REGISTRY.of(type(event))
        request = next((_names(getattr(event, name)) for name in _REQUEST_FIELDS if name in spec.fields), "") or "-"
        rest = " ".join(
            f"{name.removesuffix('_ns')}={self._value(spec, name, getattr(event, name))}"
            for name in spec.fields
            if name not in _COMMON and name not in _REQUEST_FIELDS and getattr(event, name) not in (None, "", [], {})
        )
        return f"{self._time(event.time_ns)} step {event.step:<7} {request:<16} {spec.name:<24} {rest}".rstrip()

    def _value(self, spec: EventSpec, name: str, value: Any) -> str:
        """Return a field's value for people: times of the day, durations with their unit, long lists cut."""
        field = spec.fields[name]
        show: Callable[[Any], str] = self._time if field.is_instant else _duration if field.unit == "ns" else _shown
        if isinstance(value, list):
            shown = ",".join(show(item) for item in value[:MAX_SHOWN])
            return f"[{shown},... {len(value)}]" if len(value) > MAX_SHOWN else f"[{shown}]"
        return show(value)

    def _time(self, time_ns: int) -> str:
        moment = datetime.fromtimestamp((time_ns + self._wall_offset_ns) / NS_PER_SECOND, UTC).astimezone()
        return moment.strftime("%H:%M:%S.%f")[:-3]


class JsonLines:
    """One JSON object a line; hashes are hexadecimal, times are Unix time in ns beside the monotonic ones."""

    def __init__(self) -> None:
        self._wall_offset_ns = 0
        self._encode = msgspec.json.Encoder(enc_hook=str).encode

    def started(self, started: Started) -> str:
        """Return the object of a beginning."""
        self._wall_offset_ns = started.wall_offset_ns
        return self._line("started", msgspec.structs.asdict(started))

    def gap(self, gap: Gap) -> str:
        """Return the object of a gap."""
        return self._line("gap", msgspec.structs.asdict(gap))

    def snapshot(self, snapshot: EngineSnapshot) -> str:
        """Return the object of a whole snapshot."""
        content = msgspec.to_builtins(snapshot, builtin_types=(bytes,))
        return self._line("snapshot", {"unix_ns": snapshot.time_ns + self._wall_offset_ns, **content})

    def event(self, event: Event) -> str:
        """Return the object of one event, with all its fields."""
        content = {name: getattr(event, name) for name in event.__struct_fields__}
        return self._line(
            "event",
            {"event": REGISTRY.of(type(event)).name, "unix_ns": event.time_ns + self._wall_offset_ns, **content},
        )

    def _line(self, kind: str, content: dict[str, Any]) -> str:
        return self._encode({"kind": kind, **_hexadecimal(content)}).decode()


def _hexadecimal(value: Any) -> Any:
    """Replace byte strings, at any depth, by their digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hexadecimal(item) for key, item in value.items()}
    return [_hexadecimal(item) for item in value] if isinstance(value, list) else value


def _duration(value: int) -> str:
    for size, unit in _TIME_UNITS:
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}" if value < 1000 * NS_PER_SECOND else f"{value // NS_PER_SECOND}s"
    return "0s"


def _names(requests: str | list[str]) -> str:
    """Return the names of requests, each once: one that is there for each of its sequences has their number."""
    if isinstance(requests, str):
        return _shown(requests)
    return _shown([f"{name}*{number}" if number > 1 else name for name, number in Counter(requests).items()])


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()[:HASH_DIGITS]
    if isinstance(value, list):
        items = ",".join(_shown(item) for item in value[:MAX_SHOWN])
        return f"{items},... {len(value)}" if len(value) > MAX_SHOWN else items
    if isinstance(value, dict):
        return "{" + ",".join(f"{_shown(key)}:{_shown(item)}" for key, item in value.items()) + "}"
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
