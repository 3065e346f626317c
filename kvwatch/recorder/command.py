"""`kvwatch replay`: what a recording or a flight recorder's ring says, at any step; its events; exports."""

import argparse
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kvwatch.config import unknown_name
from kvwatch.errors import ConfigError
from kvwatch.recorder import show
from kvwatch.recorder.csv_export import write_csv
from kvwatch.recorder.frames import FrameKind
from kvwatch.recorder.parquet_export import write_parquet
from kvwatch.recorder.reader import Gap, Recording
from kvwatch.recorder.replay import END, Replay, Target, ledger_at
from kvwatch.recorder.tables import rows
from kvwatch.recorder.trace import write_trace
from kvwatch.telemetry.schema import Event
from kvwatch.telemetry.snapshot import EngineSnapshot

NS_PER_SECOND = 1_000_000_000


class ReplayCommand:
    """The command `replay`."""

    name = "replay"
    help = "rebuild an engine's KV state from a recording or a flight recorder's ring, list its events, export it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the file, the place in it, and what to do."""
        parser.add_argument("file", metavar="FILE", type=Path, help="a .kvrec or .kvring file")
        place = parser.add_mutually_exclusive_group()
        place.add_argument("--step", type=int, help="show the state at the end of this step (default: at the end)")
        place.add_argument("--seq", type=int, help="show the state after this event")
        place.add_argument(
            "--time", help="show the state at this time: 2026-01-31T14:02:00Z, Unix seconds, or -5 (before the end)"
        )
        parser.add_argument("--top", type=int, default=10, help="requests and shared blocks to show (default: 10)")
        parser.add_argument("--events", action="store_true", help="list events instead; up to --step, --seq or --time")
        parser.add_argument("--name", action="append", default=[], help="only events of this name; may be repeated")
        parser.add_argument("--request", help="only events that name this request")
        parser.add_argument("--last", type=int, metavar="N", help="only the last N of these events")
        parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON instead of text")
        parser.add_argument("--csv", type=Path, metavar="DIR", help="write tables as CSV files")
        parser.add_argument("--parquet", type=Path, metavar="DIR", help="write tables as Parquet files")
        parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")

    def run(self, args: argparse.Namespace) -> int:
        """Do it."""
        with Recording(args.file) as recording:
            target = _target(args, recording)
            try:
                if not _export(args, recording):
                    _print(args, recording, target)
                sys.stdout.flush()
            except BrokenPipeError:  # the reader of our output has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


REPLAY_COMMAND = ReplayCommand()


def _target(args: argparse.Namespace, recording: Recording) -> Target:
    if args.time is None:
        return Target(step=args.step, seq=args.seq)
    span = recording.span
    try:
        seconds = float(args.time)
    except ValueError:
        wall_ns = _wall_ns(args.time)
    else:
        if seconds < 0:
            return Target(time_ns=span.last_ns + round(seconds * NS_PER_SECOND)) if span else END
        wall_ns = round(seconds * NS_PER_SECOND)
    return Target(time_ns=wall_ns - recording.header.wall_minus_monotonic_ns)


def _wall_ns(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--time {text!r} is no time; write for instance 2026-01-31T14:02:00Z, 1769868120.5 or -5"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1_000_000) * 1000


def _export(args: argparse.Namespace, recording: Recording) -> bool:
    """Write what was asked for; return whether anything was."""
    written: dict[str, int] = {}
    if args.csv is not None:
        written |= {f"{args.csv / name}.csv": n for name, n in write_csv(rows(recording), args.csv).items()}
    if args.parquet is not None:
        counts = write_parquet(rows(recording), args.parquet)
        written |= {f"{args.parquet / name}.parquet": n for name, n in counts.items()}
    if args.trace is not None:
        written[str(args.trace)] = write_trace(recording, args.trace)
    if args.as_json and written:
        _write_json(written)
    else:
        sys.stdout.writelines(f"wrote {name}: {number} rows\n" for name, number in written.items())
    return any(each is not None for each in (args.csv, args.parquet, args.trace))


def _print(args: argparse.Namespace, recording: Recording, target: Target) -> None:
    if args.events:
        _print_events(args, recording, target)
        return
    has_state = any(frame.kind is FrameKind.STATE for frame in recording.frames)
    is_asked = target != END
    ledger = ledger_at(recording, target) if has_state or is_asked else None
    if args.as_json:
        found = show.state(ledger, recording.header, args.top) if ledger else None
        _write_json({"recording": show.outline(recording), "state": found})
        return
    sys.stdout.write(show.outline_text(recording))
    if ledger is not None:
        sys.stdout.write(show.state_text(ledger, recording.header, args.top))
    else:
        sys.stdout.write("state       not known: the recording holds no state to begin with; see --events\n")


def _print_events(args: argparse.Namespace, recording: Recording, target: Target) -> None:
    known = {recorded.name for recorded in recording.header.events}
    for name in args.name:
        if name not in known:
            raise unknown_name(name, known, "event")
    lines = _event_lines(args, recording, target)
    if args.last is None:
        sys.stdout.writelines(lines)
    else:
        sys.stdout.writelines(_last(lines, args.last))


def _last(lines: Iterator[str], number: int) -> list[str]:
    kept: list[str] = []
    for line in lines:
        kept.append(line)
        if len(kept) > 2 * number:
            del kept[: len(kept) - number]
    return kept[len(kept) - min(number, len(kept)) :]


def _event_lines(args: argparse.Namespace, recording: Recording, target: Target) -> Iterator[str]:
    names = set(args.name)
    for item in Replay(recording):
        if isinstance(item, Gap):
            if not args.as_json:
                yield show.gap_text(item)
        elif not isinstance(item, EngineSnapshot):
            if target.is_before(item):
                return
            if (not names or show.event_name(item) in names) and _is_about(item, args.request):
                yield show.event_json(item) if args.as_json else show.event_text(item, recording.header)


def _is_about(event: Event, request: str | None) -> bool:
    if request is None or getattr(event, "request", None) == request:
        return True
    return request in getattr(event, "requests", ())


def _write_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
