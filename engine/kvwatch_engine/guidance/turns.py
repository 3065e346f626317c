"""Gives turns to the processes that compile grammars, so short and so rare that nobody beside them notices.

A model that computes on all cores waits, hundreds of times in a step, until each of its threads has done its part:
whatever takes a core for some milliseconds makes the step that much longer, whatever its priority, since a system looks
only every few milliseconds whether somebody else should have the core. So a worker is stopped and let go on by signals:
a turn of a fraction of a millisecond, then a rest several times as long. Whoever has used least is next: what people
write takes some milliseconds and has ended long before its hostile neighbours have used up their time.
"""

import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from llguidance import LLTokenizer

from kvwatch_engine.guidance.messages import ALLOWANCE_BYTES, Allowance
from kvwatch_engine.guidance.worker import DONE, LAST, Worker

_QUIET_SECONDS: Final = 0.05
"""For so long nobody must have wanted anything before the next worker is made ready."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How turns are given."""

    turn_seconds: float
    rest_seconds: float
    num_workers: int
    """That are kept ready."""


class Turns:
    """All workers, and whose turn it is. One thread, which does nothing else."""

    def __init__(self, control: socket.socket, vocabulary: LLTokenizer, rhythm: Rhythm) -> None:
        """Take over the socket on which grammars are announced."""
        self._control = control
        self._vocabulary = vocabulary
        self._rhythm = rhythm
        self._workers: list[Worker] = []
        self._ended: list[Worker] = []
        self._is_over = False

    def give(self) -> None:
        """Give turns until the other side ends."""
        while not self._is_over:
            self._ended = [each for each in self._ended if not each.has_gone()]
            busy = [each for each in self._workers if each.is_busy]
            if busy:
                self._give_turn(min(busy, key=_used_seconds))
                self._look(0.0)
            else:
                self._prepare()

    def _prepare(self) -> None:
        """Wait for grammars. Meanwhile have workers ready, one after the other: to fork takes a core for a while."""
        is_short = len(self._workers) < self._rhythm.num_workers
        if self._look(_QUIET_SECONDS if is_short or self._ended else None) or not is_short:
            return
        with suppress(OSError):  # no process is left; one is tried again when it is needed
            self._workers.append(Worker(self._vocabulary))

    def _give_turn(self, worker: Worker) -> None:
        worker.resume()
        select.select([worker.tasks], [], [], self._rhythm.turn_seconds)
        if worker.used_seconds > worker.allowance.cpu_seconds:
            self._end(worker, signal.SIGPROF)
        elif time.monotonic() > worker.deadline:
            self._end(worker, signal.SIGALRM)
        else:
            worker.stop()
        time.sleep(self._rhythm.rest_seconds)

    def _end(self, worker: Worker, because_of: int = 0) -> None:
        self._workers.remove(worker)
        self._ended.append(worker)
        worker.end(because_of)

    def _look(self, seconds: float | None) -> bool:
        """Take note of what has happened, or happens within this time; return whether there was something."""
        sockets = {worker.tasks: worker for worker in self._workers}
        readable, *_ = select.select([self._control, *sockets], [], [], seconds)
        for ready in readable:
            if ready is self._control:
                self._take()
            else:
                self._note(sockets[ready])
        return bool(readable)

    def _note(self, worker: Worker) -> None:
        """Take note that a worker has answered, or ended."""
        said = b""
        with suppress(OSError):
            said = worker.tasks.recv(len(DONE))
        if not said:
            self._end(worker)
            return
        worker.note_done()
        if said == LAST:
            self._end(worker)

    def _take(self) -> None:
        """Give the grammar that is announced to a worker."""
        packed, sockets, *_ = socket.recv_fds(self._control, ALLOWANCE_BYTES, 1)
        if not packed:
            self._is_over = True
            return
        with suppress(OSError):  # no process is left: silence says so
            connection = socket.socket(fileno=sockets[0])
            try:
                self._find_worker().take(connection, Allowance.unpack(packed), time.monotonic())
            except BaseException:
                connection.close()
                raise

    def _find_worker(self) -> Worker:
        for worker in self._workers:
            if not worker.is_busy:
                return worker
        worker = Worker(self._vocabulary)
        self._workers.append(worker)
        return worker


def _used_seconds(worker: Worker) -> float:
    return worker.used_seconds
