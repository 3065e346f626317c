"""Asks the trial process, with a deadline. Whatever becomes of it, the next grammar finds one that works."""

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO

import msgspec

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance.grammar import Grammar, GuidanceLimits
from kvwatch_engine.guidance.messages import LENGTH_BYTES, Trial, Untried, packed
from kvwatch_engine.guidance.vocabulary import VocabularySource

_EXIT_SECONDS = 10.0


class TrialProcessDied(Exception):
    """The process ended before it answered."""


class Trials:
    """The trial process, started when it is first needed. One thread only, but for `kill`."""

    def __init__(self, source: VocabularySource, limits: GuidanceLimits) -> None:
        self._source = source
        self.limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, grammar: Grammar) -> str:
        """Return a grammar in the library's own form, once it was compiled there.

        Raises:
            RequestInvalid: it cannot be compiled, or not within its time and memory.
        """
        limits = self.limits
        process = self._started(grammar)
        untried = Untried(grammar.kind, grammar.text, limits.max_terminal_size)
        try:
            trial = _ask(process, untried, limits.compile_seconds)
        except TimeoutError as error:
            self.close()
            raise grammar.refusal(
                f"it takes more than {limits.compile_seconds:g} s to compile; make it simpler"
            ) from error
        except (TrialProcessDied, OSError) as error:
            self.close()
            raise grammar.refusal(
                f"compiling it takes more than {limits.trial_bytes // 2**20} MiB of memory, or all of the stack; make "
                "it simpler"
            ) from error
        if trial.error:
            raise grammar.refusal(trial.error)
        return trial.compiled

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "both are pipes"
            with suppress(OSError):  # what was not written yet has nobody to read it
                pipe.close()
        process.wait(_EXIT_SECONDS)

    def _started(self, grammar: Grammar) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        command = [sys.executable, "-m", "kvwatch_engine.guidance.trial", str(self.limits.trial_bytes)]
        process = self._process = subprocess.Popen(  # noqa: S603 - a module of ours
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            trial = _ask(process, self._source, self.limits.start_seconds)
        except (TimeoutError, TrialProcessDied, OSError) as error:
            self.close()
            raise RequestInvalid(
                f"{grammar.param}: the process that compiles grammars could not be started; send the request again",
                param=grammar.param,
            ) from error
        if trial.error:
            self.close()
            raise unavailable(grammar, trial.error)
        return process


def unavailable(grammar: Grammar, reason: str) -> RequestInvalid:
    """Return the refusal of all grammars by a model whose tokens the library cannot use."""
    return RequestInvalid(
        f"{grammar.param} is not supported with this model's tokenizer: {reason}",
        param=grammar.param,
        code="unsupported",
    )


def _ask(process: subprocess.Popen[bytes], message: msgspec.Struct, seconds: float) -> Trial:
    """Send a message and return the answer.

    Raises:
        TimeoutError: it did not come in time.
        TrialProcessDied, OSError: it will not come.
    """
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    deadline = time.monotonic() + seconds
    process.stdin.write(packed(message))
    process.stdin.flush()
    length = int.from_bytes(_read(process.stdout, LENGTH_BYTES, deadline), "little")
    return msgspec.msgpack.decode(_read(process.stdout, length, deadline), type=Trial)


def _read(pipe: IO[bytes], num_bytes: int, deadline: float) -> bytes:
    """Read exactly so many bytes, past the buffer, which `poll` does not see."""
    pieces: list[bytes] = []
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while num_bytes > 0:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError
        piece = os.read(pipe.fileno(), num_bytes)
        if not piece:
            raise TrialProcessDied
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
