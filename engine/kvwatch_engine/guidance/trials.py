"""Asks the trial process, with a deadline. Whatever becomes of it, the next grammar finds one that works."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance.grammar import Grammar, GuidanceLimits
from kvwatch_engine.guidance.messages import Allowance, Silence, Trial, Untried, receive_message, send_message
from kvwatch_engine.guidance.vocabulary import VocabularySource

_EXIT_SECONDS = 10.0
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Forks copy, and ends give back, a tenth of the page tables."""
_GRACE_SECONDS = 0.1
"""In which a worker whose time is over can say what came of it."""


class TrialStarved(Exception):
    """A grammar had too little of a machine in its time to know whether it can be compiled."""


class _TrialLost(Exception):
    """Somebody else has ended what compiled a grammar, such as a system that is short of memory."""


class Trials:
    """The trial process, started when it is first needed. Any thread; several may ask at the same time."""

    def __init__(self, source: VocabularySource, limits: GuidanceLimits) -> None:
        self._source = source
        self.limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(self, grammar: Grammar, seconds: float) -> str:
        """Return a grammar in the library's own form, once it was compiled there.

        Raises:
            RequestInvalid: it cannot be compiled, or not with the processor's time and the memory that it may take.
            TrialStarved: it had too little of a processor within `seconds` to know, or was ended by others again and
                again.
        """
        try:
            trial = self._try(grammar, seconds)
        except (Silence, OSError, _TrialLost) as lost:
            if not isinstance(lost, _TrialLost):  # the process has ended since the last time
                self._note_end()
            try:
                trial = self._try(grammar, seconds)
            except _TrialLost as error:
                raise TrialStarved from error
            except (Silence, OSError) as error:
                raise _not_started(grammar) from error
        if trial.ended_by is not None:
            raise _refusal(grammar, trial.ended_by, self.limits)
        if trial.error:
            raise grammar.refusal(trial.error)
        return trial.compiled

    def _try(self, grammar: Grammar, seconds: float) -> Trial:
        untried = Untried(
            kind=grammar.kind,
            text=grammar.text,
            max_terminal_size=self.limits.max_terminal_size,
            spare_bytes=self.limits.trial_bytes,
        )
        allowance = Allowance(seconds, self.limits.compile_cpu_seconds)
        with self._connect(grammar, allowance) as connection:
            deadline = time.monotonic() + seconds + _GRACE_SECONDS
            try:
                connection.settimeout(seconds)
                send_message(connection, untried)
                trial = msgspec.msgpack.decode(receive_message(connection, deadline), type=Trial)
            except TimeoutError as error:
                raise TrialStarved from error
        if trial.ended_by == signal.SIGKILL:  # nobody here ends a worker so without saying why
            raise _TrialLost
        return trial

    def close(self) -> None:
        """End the process, if there is one. Grammars that are being tried end with their time."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait(_EXIT_SECONDS)

    def _note_end(self) -> None:
        """Forget the process if it ends now; if it does not, one grammar found no process of its own."""
        with self._lock, suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(_GRACE_SECONDS)
            self._close()

    def _connect(self, grammar: Grammar, allowance: Allowance) -> socket.socket:
        """Return what a grammar is sent through, and answered."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._started(grammar), [allowance.pack()], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def _started(self, grammar: Grammar) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._close()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "kvwatch_engine.guidance.trial",
                str(theirs.fileno()),
                str(self.limits.turn_seconds),
                str(self.limits.rest_seconds),
                str(self.limits.max_trials),
            ]
            self._process = subprocess.Popen(  # noqa: S603 - a module of ours
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # NumPy's threads: a process that forks has none.
                env={**_HUGE_PAGES, **os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        self._control = ours
        try:
            ours.settimeout(self.limits.start_seconds)
            send_message(ours, self._source)
            answer = receive_message(ours, time.monotonic() + self.limits.start_seconds)
        except (Silence, OSError) as error:
            self._close()
            raise _not_started(grammar) from error
        trial = msgspec.msgpack.decode(answer, type=Trial)
        if trial.error:
            self._close()
            raise unavailable(grammar, trial.error)
        return ours


def unavailable(grammar: Grammar, reason: str) -> RequestInvalid:
    """Return the refusal of all grammars by a model whose tokens the library cannot use."""
    return RequestInvalid(
        f"{grammar.param} is not supported with this model's tokenizer: {reason}",
        param=grammar.param,
        code="unsupported",
    )


def _not_started(grammar: Grammar) -> RequestInvalid:
    return RequestInvalid(
        f"{grammar.param}: the process that compiles grammars could not be started; send the request again",
        param=grammar.param,
    )


def _refusal(grammar: Grammar, ended_by: int, limits: GuidanceLimits) -> RequestInvalid:
    """Return the refusal of a grammar whose worker was ended.

    Raises:
        TrialStarved: its time was over, not that of the processor which it had.
    """
    if ended_by == signal.SIGALRM:
        raise TrialStarved
    if ended_by == signal.SIGPROF:
        reason = f"it takes more than {limits.compile_cpu_seconds:g} s of a processor to compile"
    else:
        reason = f"compiling it takes more than {limits.trial_bytes // 2**20} MiB of memory, or all of the stack"
    return grammar.refusal(f"{reason}; make it simpler")
