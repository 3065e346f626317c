"""Parts of a machine that fail when told to: memory, files, and a worker that moves only when it is asked."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvwatch_engine.memory.tiers.file_system import FileSystem
from kvwatch_engine.memory.tiers.stores import Bytes, MemoryStore
from kvwatch_engine.memory.tiers.worker import Job, Mover


@dataclass
class Fault:
    """Lets the n-th call from now on fail, once or for good. Counts calls and failures."""

    countdown: int = 0
    """Calls until the first failure; 0 for never."""
    is_lasting: bool = False
    num_calls: int = 0
    num_failures: int = 0

    def arm(self, countdown: int, *, is_lasting: bool = False) -> None:
        self.countdown, self.is_lasting = countdown, is_lasting

    def disarm(self) -> None:
        self.countdown = 0

    def strike(self, error: Exception) -> None:
        """Count a call; raise if it is its turn."""
        self.num_calls += 1
        if self.countdown == 0:
            return
        self.countdown -= 1
        if self.countdown == 0:
            self.countdown = int(self.is_lasting)
            self.num_failures += 1
            raise error


class FaultyMemory(MemoryStore):
    """Memory whose copies may fail."""

    def __init__(self, blocks: Callable[[], Bytes], fault: Fault) -> None:
        super().__init__(blocks)
        self._fault = fault

    def read(self, keys: Sequence[int], out: Bytes) -> None:
        self._fault.strike(RuntimeError("copy failed"))
        super().read(keys, out)

    def write(self, keys: Sequence[int], data: Bytes) -> None:
        self._fault.strike(RuntimeError("copy failed"))
        super().write(keys, data)


class FaultyFiles(FileSystem):
    """The real file system, whose writes and reads may fail."""

    def __init__(self, write_errno: int = 28) -> None:
        self.writes, self.reads = Fault(), Fault()
        self._write_errno = write_errno

    def write(self, path: Path, parts: list[bytes | memoryview]) -> None:
        """On a full disk the first part may be there already."""
        try:
            self.writes.strike(OSError(self._write_errno, "no room"))
        except OSError:
            super().write(path, parts[:1])
            raise
        super().write(path, parts)

    def read(self, path: Path, size: int) -> bytes:
        self.reads.strike(OSError(5, "input/output error"))
        return super().read(path, size)


class SteppedWorker:
    """Carries out real jobs, but only when a test says so."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._jobs: deque[Job] = deque()
        self._ended: list[Job] = []

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def take_ended(self) -> list[Job]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, seconds: float) -> bool:  # noqa: ARG002  # nothing moves while one waits
        self.carry_out(1)
        return bool(self._ended)

    def stop(self) -> None:
        self._jobs.clear()

    def carry_out(self, num_jobs: int) -> None:
        """Carry out the oldest jobs."""
        for _ in range(min(num_jobs, len(self._jobs))):
            job = self._jobs.popleft()
            self._mover.carry_out(job)
            self._ended.append(job)
