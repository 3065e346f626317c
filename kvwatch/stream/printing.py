"""Prints a subscription line by line: what `kvwatch tail` does once it is connected."""

import sys
from collections.abc import Iterator
from typing import TextIO

from kvwatch.stream.client import EventBatch, Interrupted, Item, Stream
from kvwatch.stream.contract import Gap, Started
from kvwatch.stream.lines import JsonLines, TextLines
from kvwatch.telemetry.snapshot import EngineSnapshot


def print_stream(stream: Stream, lines: TextLines | JsonLines, *, is_following: bool) -> None:
    """Print events to stdout, and what concerns the connection to stderr, until the newest event or for ever.

    Raises:
        StreamError: the server refuses, or is lost and the stream does not resume.
    """
    try:
        for item in stream if is_following else _until_now(stream):
            if isinstance(item, Interrupted):
                _print(f"{item.reason}; trying again", sys.stderr)
            else:
                for line in _lines_of(item, lines):
                    _print(line, sys.stdout)
                sys.stdout.flush()
    finally:
        stream.cancel()


def _until_now(stream: Stream) -> Iterator[Item]:
    """Yield items up to the event that was the newest when the stream began."""
    begins_with_snapshot = stream.begins_with_snapshot
    head = 0
    for item in stream:
        yield item
        position = -1
        if isinstance(item, Started):
            head, position = item.head, -1 if begins_with_snapshot else item.seq
        elif isinstance(item, EventBatch):
            position = item.next_seq
        elif isinstance(item, EngineSnapshot):
            position = item.seq
        if position >= head:
            return


def _lines_of(item: Item, lines: TextLines | JsonLines) -> Iterator[str]:
    if isinstance(item, EventBatch):
        yield from map(lines.event, item.events)
    elif isinstance(item, Started):
        yield lines.started(item)
    elif isinstance(item, Gap):
        yield lines.gap(item)
    elif isinstance(item, EngineSnapshot):
        yield lines.snapshot(item)


def _print(line: str, out: TextIO) -> None:
    out.write(f"{line}\n")
