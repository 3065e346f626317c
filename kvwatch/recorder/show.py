"""What `kvwatch replay` prints: a recording's outline, the ledger's state, events. Text for people, or JSON.

Does not know where the state comes from.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvwatch.ledger.ledger import Ledger
from kvwatch.ledger.pool import TierPool
from kvwatch.recorder.frames import FrameKind
from kvwatch.recorder.header import RecordingHeader
from kvwatch.recorder.reader import Gap, Recording
from kvwatch.recorder.schema import UnknownEvent
from kvwatch.telemetry.schema import REGISTRY, Event

SHOWN_ELEMENTS = 8
"""Elements of an array that are printed."""
SHOWN_HASH_BYTES = 6

_NS = 10**9
_BASE_FIELDS = frozenset({"seq", "step", "time_ns"})
_NAMES = {spec.cls: spec.name for spec in REGISTRY}


def wall_time(header: RecordingHeader, time_ns: int) -> str:
    """Return a monotonic time of the recording as UTC, with microseconds."""
    wall_ns = time_ns + header.wall_minus_monotonic_ns
    try:
        moment = datetime.fromtimestamp(wall_ns // _NS, UTC)
    except (OverflowError, OSError, ValueError):  # a hostile clock
        return f"{wall_ns} ns"
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{wall_ns % _NS // 1000:06}Z"


# ---------------------------------------------------------------- outline


def outline(recording: Recording) -> dict[str, Any]:
    """Return what a recording is and what it reaches over."""
    header, span = recording.header, recording.span
    gaps = [frame.span.num_events for frame in recording.frames if frame.kind is FrameKind.GAP]
    found: dict[str, Any] = {
        "file": recording.path.name,
        "kind": "ring" if recording.is_ring else "recording",
        "written_by": header.version,
        "epoch": header.epoch,
        "engine": header.identity,
        "reason": header.reason,
        "is_complete": recording.is_complete,
        "lost_bytes": recording.lost_bytes,
        "num_states": sum(frame.kind is FrameKind.STATE for frame in recording.frames),
        "num_gaps": len(gaps),
        "num_lost_events": sum(gaps),
        "has_token_ids": header.has_token_ids,
    }
    if span is not None:
        found |= {
            "events": [span.first_seq, span.end_seq - 1],
            "steps": [span.first_step, span.last_step],
            "times": [wall_time(header, span.first_ns), wall_time(header, span.last_ns)],
            "seconds": (span.last_ns - span.first_ns) / _NS,
        }
    return found


def outline_text(recording: Recording) -> str:
    """Return the outline as lines."""
    found = outline(recording)
    engine = " ".join(f"{name}={quoted(value)}" for name, value in found["engine"].items())
    how = "closed in order" if recording.is_complete else "not closed: the process was killed or still writes it"
    lines = [
        f"{found['kind']:<12}{quoted(found['file'])}, {how}",
        f"{'engine':<12}{engine}, kvwatch {quoted(found['written_by'])}, epoch {quoted(found['epoch'])}",
    ]
    if found["reason"]:
        lines.append(f"{'because of':<12}{quoted(found['reason'])}")
    if "events" in found:
        (first, last), steps, times = found["events"], found["steps"], found["times"]
        lines.append(f"{'events':<12}{first} to {last}, steps {steps[0]} to {steps[1]}")
        lines.append(f"{'time':<12}{times[0]} to {times[1]} ({found['seconds']:.3f} s)")
    if found["num_gaps"]:
        lines.append(f"{'gaps':<12}{found['num_gaps']}, in which {found['num_lost_events']} events were lost")
    if found["lost_bytes"]:
        lines.append(f"{'cut off':<12}{found['lost_bytes']} bytes at the end are no whole frames")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- state


def state(ledger: Ledger, header: RecordingHeader, top: int) -> dict[str, Any]:
    """Return the ledger's state: the law of each tier, requests, the `top` largest block tables and shared blocks."""
    index = ledger.index
    foreign = (
        {}
        if index is None
        else {
            "is_complete": index.is_complete,
            "indexed": [
                {"tier": tier, "group": group, "hashes": number} for (tier, group), number in index.counts.items()
            ],
        }
    )
    return foreign | {
        "seq": ledger.next_seq - 1,
        "step": ledger.step,
        "time": wall_time(header, ledger.time_ns),
        "tiers": {tier: _tier(pool, ledger, top) for tier, pool in ledger.pools.items()},
        "num_running": ledger.num_running,
        "num_waiting": ledger.num_waiting,
        "requests": _requests(ledger, top),
    }


def state_text(ledger: Ledger, header: RecordingHeader, top: int) -> str:
    """Return the state as lines."""
    found = state(ledger, header, top)
    place = f"after event {found['seq']}, step {found['step']}" if found["seq"] >= 0 else "before the first event"
    lines = [f"{'state':<12}{place}, {found['time']}"]
    for tier, pool in found["tiers"].items():
        lines += [
            f"{tier:<12}capacity {pool['capacity']} = empty {pool['empty']} + used {pool['used']} "
            f"+ cached {pool['cached']}",
            f"{'':<12}{pool['table_entries']} table entries, {pool['shared']} blocks shared; "
            f"slots: {pool['held']} held, {pool['filled']} filled; {pool['orphaned']} blocks held by no live request",
        ]
        if pool["most_shared"]:
            shared = ", ".join(f"{block} ({count} times)" for block, count in pool["most_shared"])
            lines.append(f"{'':<12}most shared blocks: {shared}")
    if "indexed" in found:
        note = "" if found["is_complete"] else ", of a history that is not known from its beginning"
        lines += [
            f"{each['tier']:<12}{each['hashes']} hashes resident in group {each['group']}{note}"
            for each in found["indexed"]
        ]
        return "\n".join(lines) + "\n"
    lines.append(f"{'requests':<12}{found['num_running']} running, {found['num_waiting']} waiting")
    if found["requests"]:
        lines.append(f"{'':<12}{'blocks':>8}{'sequences':>11}{'age s':>10}  {'state':<9}request")
        lines += [
            f"{'':<12}{each['blocks']:>8}{each['sequences']:>11}{each['age_s']:>10.3f}  {each['state']:<9}"
            f"{quoted(each['request'])}"
            for each in found["requests"]
        ]
    return "\n".join(lines) + "\n"


def _tier(pool: TierPool, ledger: Ledger, top: int) -> dict[str, Any]:
    counts = Counter({block: count for block, count in enumerate(pool.ref_counts.tolist()) if count > 1})
    return {
        "capacity": pool.capacity,
        "empty": pool.num_empty,
        "used": pool.num_used,
        "cached": pool.num_cached,
        "table_entries": pool.num_entries,
        "shared": pool.num_shared,
        "held": pool.num_used * ledger.limits.block_size_tokens,
        "filled": pool.num_filled_slots,
        "orphaned": pool.orphaned(ledger.requests.keys()),
        "most_shared": counts.most_common(top),
    }


def _requests(ledger: Ledger, top: int) -> list[dict[str, Any]]:
    blocks: dict[str, set[int]] = {}
    sequences: Counter[str] = Counter()
    for pool in ledger.pools.values():
        for (request, _), table in pool.tables.items():
            blocks.setdefault(request, set()).update(table)
            sequences[request] += 1
    rows: list[dict[str, Any]] = [
        {
            "request": name,
            "state": request.state,
            "blocks": len(blocks.get(name, ())),
            "sequences": sequences[name],
            "age_s": (ledger.time_ns - request.queued_ns) / _NS,
        }
        for name, request in ledger.requests.items()
    ]
    return sorted(rows, key=lambda row: -row["blocks"])[:top]


# ---------------------------------------------------------------- events


def event_name(event: Event) -> str:
    """Return an event's name, also of one that this version does not know."""
    return event.name if isinstance(event, UnknownEvent) else _NAMES[type(event)]


def event_text(event: Event, header: RecordingHeader) -> str:
    """Return one event as a line; long arrays are cut."""
    fields = " ".join(f"{name}={_shown(value)}" for name, value in _own_fields(event).items())
    return f"{event.seq:>10} {event.step:>8} {wall_time(header, event.time_ns)} {event_name(event):<26} {fields}\n"


def event_json(event: Event) -> str:
    """Return one event as a line of JSON, whole; bytes as hexadecimal digits."""
    base = {"seq": event.seq, "step": event.step, "time_ns": event.time_ns, "event": event_name(event)}
    return msgspec.json.encode(base | _own_fields(event), enc_hook=str).decode() + "\n"


def gap_text(gap: Gap) -> str:
    """Return a gap as a line."""
    return f"{gap.first_seq:>10} to {gap.end_seq - 1}: {gap.end_seq - gap.first_seq} events were lost\n"


def quoted(text: str) -> str:
    """Return foreign text so that it can do nothing to a terminal."""
    return text if text.isprintable() and text else repr(text)


def plain(value: Any) -> Any:
    """Return a value with bytes as hexadecimal digits, at any depth."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return value


def _own_fields(event: Event) -> dict[str, Any]:
    if isinstance(event, UnknownEvent):
        return {}
    return {name: plain(getattr(event, name)) for name in event.__struct_fields__ if name not in _BASE_FIELDS}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        shown = ",".join(_shown(each) for each in value[:SHOWN_ELEMENTS])
        return f"[{shown}]" if len(value) <= SHOWN_ELEMENTS else f"[{shown},... {len(value)} in all]"
    if isinstance(value, str):
        is_hash = len(value) == 64 and not value.strip("0123456789abcdef")
        return value[: 2 * SHOWN_HASH_BYTES] if is_hash else quoted(value)
    return "none" if value is None else str(value)
