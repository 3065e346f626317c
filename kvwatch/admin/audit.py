"""The audit trail: what was asked for, by whom, from where, why, and what became of it. No audit, no change.

Each change has two lines, in the log and in the file if there is one: `begun` before anything is done, and how it
ended. What counts is the file, or the log where there is none. The last entries are kept for whoever asks. Knows no
HTTP beyond the problem it raises.
"""

import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import BinaryIO, Literal

import msgspec
import structlog

from kvwatch.admin import problems
from kvwatch.admin.problems import Problem
from kvwatch.control import SettingChange
from kvwatch.logs import num_lost_lines
from kvwatch.telemetry.clock import Clock

LOGGER = "kvwatch.audit"
MAX_ENTRIES = 1000
"""Entries that are kept; the file keeps all."""

Outcome = Literal["begun", "done", "refused", "failed"]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change, or an attempt at one."""

    id: int
    time: str
    """When it was asked for, in UTC."""
    actor: str
    """Name of the token; `kvwatch` for what it does by itself."""
    address: str
    """Where it came from."""
    engine: str
    dp_rank: int
    action: str
    reason: str
    """Why, in the words of whoever asked."""
    subject: str = ""
    """What it is about, for instance a request."""
    outcome: Outcome = "begun"
    changes: list[SettingChange] = []
    """Old and new values."""
    expires_at: str | None = None
    """When it reverts by itself."""
    message: str = ""
    """What came of it, or what stood against it."""
    reverts: int | None = None
    """The entry that it takes back."""


class AuditTrail:
    """Writes and keeps entries. Any thread.

    Args:
        clock: Tells the time.
        file: What entries are appended to, beside the log; none for the log alone.
        num_lost_lines: Tells how many lines the log could not write so far.
    """

    def __init__(
        self, clock: Clock, file: BinaryIO | None = None, num_lost_lines: Callable[[], int] = num_lost_lines
    ) -> None:
        self._clock = clock
        self._file = file
        self._num_lost_lines = num_lost_lines
        self._is_line_open = False
        """Whether the file ends with a part of a line, since there was no space for all of it."""
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, AuditEntry] = OrderedDict()
        self._next_id = clock.wall_ns() // 1_000_000  # not from 0 again after a restart
        # Whatever the level of the log: what was changed is always written.
        logging.getLogger(LOGGER).setLevel(logging.INFO)
        self._logger = structlog.get_logger(LOGGER)

    def begin(self, entry: AuditEntry) -> AuditEntry:
        """Write that something is about to be done; return the entry with its number and time.

        Raises:
            Problem: it cannot be written; then it must not be done.
        """
        with self._lock:
            numbered = msgspec.structs.replace(entry, id=self._next_id, time=utc(self._clock.wall_ns()))
            try:
                self._write(numbered)
            except OSError as error:
                detail = (
                    f"the audit cannot be written ({error.strerror}), so nothing was changed; mend the audit file, or "
                    "whatever reads the log"
                )
                raise Problem(problems.NO_AUDIT, detail) from error
            self._next_id += 1
            self._keep(numbered)
            return numbered

    def end(self, entry: AuditEntry) -> AuditEntry:
        """Write how it ended. What was done is done: that it cannot be written is only logged."""
        with self._lock:
            self._keep(entry)
            try:
                self._write(entry)
            except OSError as error:
                self._logger.warning("the end of a change could not be written to the audit", error=repr(error))
        return entry

    def tell(self, message: str, **fields: object) -> None:
        """Write a line to the log, whatever its level, that is no entry."""
        self._logger.info(message, **fields)

    def find(self, number: int) -> AuditEntry | None:
        """Return an entry that is still kept."""
        with self._lock:
            return self._entries.get(number)

    def page(self, before: int, limit: int) -> list[AuditEntry]:
        """Return entries below a number, the newest first."""
        with self._lock:
            return [each for number, each in reversed(self._entries.items()) if number < before][:limit]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    # ------------------------------------------------------------ inside

    def _keep(self, entry: AuditEntry) -> None:
        self._entries[entry.id] = entry
        while len(self._entries) > MAX_ENTRIES:
            self._entries.popitem(last=False)

    def _write(self, entry: AuditEntry) -> None:
        if self._file is not None:
            line = msgspec.json.encode(entry) + b"\n"
            # What was begun and not ended must not swallow the next entry.
            content = b"\n" + line if self._is_line_open else line
            written = self._file.write(content)
            if written != len(content):
                self._is_line_open = self._is_line_open or bool(written)
                raise OSError(errno.ENOSPC, "no space for a whole line")
            self._is_line_open = False
        shown = {
            name: value
            for name in entry.__struct_fields__
            if (value := getattr(entry, name)) not in ("", None, [], ()) and name not in {"time", "changes"}
        }
        changes = {str(each.key): f"{each.old} -> {each.new}" for each in entry.changes}
        num_lost = self._num_lost_lines()
        self._logger.info("audit", **shown, **({"changes": changes} if changes else {}))
        if self._file is None and self._num_lost_lines() > num_lost:
            raise OSError(errno.EIO, "the log takes no line")


def utc(wall_ns: int) -> str:
    """Return a Unix time in ns as people write it."""
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
