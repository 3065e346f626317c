"""The process that compiles grammars, one after the other, and may die of one of them."""

import os
import resource
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from llguidance import LLTokenizer

from kvwatch_engine.guidance.attempt import try_grammar
from kvwatch_engine.guidance.linux_process import end_with_parent, processor_seconds
from kvwatch_engine.guidance.messages import ALLOWANCE_BYTES, Allowance, Trial, Untried, receive_message, send_message

_STACK_BYTES: Final = 2**20
"""Less than that of the server's threads: what a worker survives the server survives."""
_KEPT_BYTES: Final = 64 * 2**20
"""Memory beyond that of its beginning with which a worker still takes the next grammar."""
_GRACE_SECONDS: Final = 1.0
"""After which a worker ends by itself whose time was over: nobody is there any more to end it."""
DONE: Final = b"."
"""What a worker says when it has answered and takes the next grammar."""
LAST: Final = b"!"
"""What it says when it has answered and has become too large for another one."""


def work_until_end(vocabulary: LLTokenizer, tasks: socket.socket) -> NoReturn:
    """Compile what comes through a socket until it ends; of a forked process, which ends without its parent's plans."""
    try:
        end_with_parent()
        threading.stack_size(_STACK_BYTES)
        first_bytes = _memory_bytes()
        while _work_once(vocabulary, tasks):
            signal.setitimer(signal.ITIMER_REAL, 0)
            tasks.sendall(DONE if _memory_bytes() - first_bytes <= _KEPT_BYTES else LAST)
    finally:
        os._exit(0)


def _work_once(vocabulary: LLTokenizer, tasks: socket.socket) -> bool:
    """Compile one grammar and answer; return whether there was one."""
    asked, sockets, *_ = socket.recv_fds(tasks, ALLOWANCE_BYTES, 1)
    if not asked:
        return False
    allowance = Allowance.unpack(asked)
    signal.setitimer(signal.ITIMER_REAL, allowance.seconds + _GRACE_SECONDS)  # SIGALRM ends a process
    with socket.socket(fileno=sockets[0]) as connection:
        untried = msgspec.msgpack.decode(receive_message(connection), type=Untried)
        trials: list[Trial] = []

        def work() -> None:
            _bound_memory(untried.spare_bytes)  # here, since the thread's own is there now
            trials.append(try_grammar(vocabulary, untried))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        [trial] = trials
        send_message(connection, trial)
    return True


def _bound_memory(spare_bytes: int) -> None:
    """Allow so much more memory than is in use now, where the system can say how much that is."""
    in_use = _memory_bytes()
    if in_use:
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (in_use + spare_bytes, hard))


def _memory_bytes() -> int:
    """Return the size of this process; 0 where the system does not say it."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


class Worker:
    """A worker as the process sees it that gives turns. With a grammar it is stopped but for its turns."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        """Fork one.

        Raises:
            OSError: no process is left.
        """
        self.tasks, theirs = socket.socketpair()
        self._connection: socket.socket | None = None
        self._seconds_before = 0.0
        self.allowance = Allowance(0.0, 0.0)
        self.deadline = 0.0
        """Monotonic time at which its grammar's time is over."""
        self._has_gone = False
        with theirs:
            self._pid = os.fork()
            if self._pid == 0:
                self.tasks.close()
                work_until_end(vocabulary, theirs)

    @property
    def is_busy(self) -> bool:
        """Whether it has a grammar."""
        return self._connection is not None

    def take(self, connection: socket.socket, allowance: Allowance, now: float) -> None:
        """Give it a grammar, which comes through a connection and is answered there."""
        self._connection = connection
        self.allowance, self.deadline = allowance, now + allowance.seconds
        self._seconds_before = processor_seconds(self._pid)
        self.stop()
        socket.send_fds(self.tasks, [allowance.pack()], [connection.fileno()])

    @property
    def used_seconds(self) -> float:
        """Time of a processor that its grammar has taken so far."""
        return processor_seconds(self._pid) - self._seconds_before

    def stop(self) -> None:
        """Let it stand still."""
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self._pid, signal.SIGCONT)

    def note_done(self) -> None:
        """Forget its grammar, which it has answered."""
        assert self._connection is not None, "it had one"
        self._connection.close()
        self._connection = None

    def end(self, because_of: int = 0) -> None:
        """End it, if it has not ended; whoever waits for its answer is told why.

        Its memory may take a while to be given back where no core is idle: nobody waits for that. See `has_gone`.

        Args:
            because_of: signal to tell; 0 if it has ended already, and its own end is told.
        """
        os.kill(self._pid, signal.SIGKILL)
        self.tasks.close()
        if self._connection is not None:
            told = because_of or self._own_end()
            with suppress(OSError):
                send_message(self._connection, Trial(ended_by=told))
            self.note_done()

    def _own_end(self) -> int:
        """Return the signal that has ended it, 0 for none; its memory is gone by the time that its socket has ended."""
        status = os.waitpid(self._pid, 0)[1]
        self._has_gone = True
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def has_gone(self) -> bool:
        """Whether nothing is left of it, once it was ended; asked until that is so."""
        self._has_gone = self._has_gone or os.waitpid(self._pid, os.WNOHANG)[0] != 0
        return self._has_gone
