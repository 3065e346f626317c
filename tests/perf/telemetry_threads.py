"""Processor time of telemetry's own threads, and of other processes: numbers without noise beside throughput."""

import contextlib
import os
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")


class TelemetryThreads:
    """Tells the threads of the process that came after this object was made from those that were there before."""

    def __init__(self) -> None:
        self._before = {task.name for task in _TASKS.iterdir()}
        self._files: dict[str, int] = {}

    def look(self) -> None:
        """Find the threads that are there now."""
        found = {task.name for task in _TASKS.iterdir()} - self._before
        for name in self._files.keys() - found:
            os.close(self._files.pop(name))
        for name in found - self._files.keys():
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                self._files[name] = os.open(_TASKS / name / "schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def cpu_ns(self) -> int:
        """Return the nanoseconds that those which were found, and still run, have had a core."""
        return sum(map(_cpu_ns, self._files.values()))


def _cpu_ns(file: int) -> int:
    try:
        return int(os.pread(file, 100, 0).split()[0])
    except ProcessLookupError:  # it has just ended
        return 0


class Foreign:
    """Tells how much of the processor others had: neither this process nor the one with the given id."""

    def __init__(self, friend: int) -> None:
        self._friend = Path(f"/proc/{friend}/stat")
        self._began = self._taken = 0.0

    def begin(self) -> None:
        """Begin to measure."""
        self._began, self._taken = time.monotonic(), self._taken_seconds()

    def share(self) -> float:
        """Return the part of a core that others had since then."""
        return (self._taken_seconds() - self._taken) / (time.monotonic() - self._began)

    def _taken_seconds(self) -> float:
        ticks = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        friend = sum(map(int, self._friend.read_text().rpartition(")")[2].split()[11:13])) / ticks
        return (user + nice + system + irq + softirq + steal) / ticks - time.process_time() - friend
