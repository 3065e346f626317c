"""Processes that compile grammars which nobody has tried yet: `python -m kvwatch_engine.guidance.trial FD NICENESS`.

A grammar may take minutes, much memory, or the whole stack, which ends a process. Here nothing is lost by that:

    trial process ──fork──► keeper ──fork──► worker      for each grammar
     has the vocabulary      says how the      compiles it, and says what came of it;
     ready; lives on         worker ended      ends itself when its time is over

The worker has the vocabulary by copy-on-write, so that it begins within milliseconds. Its stack is smaller than that of
the server's threads: what it survives the server survives. All of it but the start steps back before the model's work,
and a worker that takes long steps back further: whoever shares its processor does not notice.

Messages: first a `VocabularySource` on the socket FD, answered by a `Trial`. Then each byte on it brings a socket of
its own for one `Untried`, answered there by a `Trial`. The trial process ends when its socket does.
"""

import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from kvwatch_engine.guidance.lark_size import largest_terminal
from kvwatch_engine.guidance.messages import Silence, Trial, Untried, receive_message, send_message
from kvwatch_engine.guidance.vocabulary import VocabularySource, make_matcher, matcher_error, one_line

_STACK_BYTES: Final = 2**20
_LONG_SECONDS: Final = 0.1
_LONG_NICENESS: Final = 19
"""Of a worker that has taken so long: one or two hundredths."""
_JSON_OPTIONS: Final = {
    "item_separator": ",",
    "key_separator": ":",
    # As much as people and models write to make JSON readable, never so much that a text is nothing but blanks.
    "whitespace_pattern": r"[ ]|\n[ ]{0,40}",
    "whitespace_flexible": True,
    "coerce_one_of": False,
    "lenient": False,
}
"""Override what a schema says of itself in `x-guidance`: a request chooses its schema, not what is ignored of it."""


def try_grammar(vocabulary: LLTokenizer, untried: Untried) -> Trial:
    """Compile a grammar and find out what it allows first."""
    try:
        compiled = _in_own_form(untried)
    except Exception as error:  # converters fail in any way, RecursionError among them
        return Trial(error=one_line(str(error)) or type(error).__name__)
    if untried.kind == "grammar":
        size = largest_terminal(compiled, untried.max_terminal_size)
        if size > untried.max_terminal_size:
            limit = untried.max_terminal_size
            return Trial(error=f"a terminal stands for more than {limit} characters; make it a rule (lower case)")
    matcher = make_matcher(vocabulary, compiled)
    if not matcher.is_error():
        matcher.compute_bitmask()
    reason = matcher_error(matcher)
    return Trial(error=_remedied(reason)) if reason else Trial(compiled)


def _remedied(reason: str) -> str:
    """Return a complaint of the library with what a caller can do in the place of options that nobody has here."""
    if reason.startswith("oneOf constraints"):
        return "oneOf is supported where its branches cannot both hold, which cannot be seen of these; use anyOf"
    return reason


def _in_own_form(untried: Untried) -> str:
    match untried.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(untried.text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(untried.text)
        case "choice":
            choices = msgspec.json.decode(untried.text, type=list[str])
            quoted = (msgspec.json.encode(choice).decode() for choice in choices)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
        case "lark":
            return LLMatcher.grammar_from_lark(untried.text)
        case "grammar":
            if untried.text.lstrip().startswith("{"):
                # The library would take it for its own form, in which one may ask for anything.
                raise ValueError("a grammar begins with a rule, not with a brace")
            return LLMatcher.grammar_from_lark(any_to_lark(untried.text))


def serve(control: socket.socket, niceness: int) -> None:
    """Read the vocabulary, then have grammars tried, stepping back so far, until the other side ends."""
    source = msgspec.msgpack.decode(receive_message(control), type=VocabularySource)
    try:
        vocabulary = source.build()
    except Exception as error:  # whatever the library dislikes is the answer
        send_message(control, Trial(error=one_line(str(error)) or type(error).__name__))
        return
    send_message(control, Trial())
    os.nice(niceness)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        asked, sockets, *_ = socket.recv_fds(control, 1, 1)
        if not asked:
            return
        with suppress(OSError), socket.socket(fileno=sockets[0]) as connection:  # no process left: silence says so
            if os.fork() == 0:
                control.close()
                _end_after(_keep, vocabulary, connection)


def _keep(vocabulary: LLTokenizer, connection: socket.socket) -> None:
    """Have one grammar tried, and say how that ended if the worker could not."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    untried = msgspec.msgpack.decode(receive_message(connection), type=Untried)
    worker = os.fork()
    if worker == 0:
        _end_after(_work, vocabulary, untried, connection)
    if not _ends_within(worker, _LONG_SECONDS):
        _step_back(worker)
    _, status = os.waitpid(worker, 0)
    if status:
        send_message(connection, Trial(ended_by=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0))


def _ends_within(process: int, seconds: float) -> bool:
    descriptor = os.pidfd_open(process)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))
    finally:
        os.close(descriptor)


def _step_back(process: int) -> None:
    """Lower the priority of a process, which each of its threads has for itself; it may end meanwhile."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), _LONG_NICENESS)


def _work(vocabulary: LLTokenizer, untried: Untried, connection: socket.socket) -> None:
    signal.setitimer(signal.ITIMER_REAL, untried.seconds)  # SIGALRM and SIGPROF end a process
    signal.setitimer(signal.ITIMER_PROF, untried.cpu_seconds)
    threading.stack_size(_STACK_BYTES)
    trials: list[Trial] = []

    def work() -> None:
        _bound_memory(untried.spare_bytes)  # here, since the thread's own is there now
        trials.append(try_grammar(vocabulary, untried))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    [trial] = trials
    send_message(connection, trial)


def _end_after(work: Callable[..., None], *arguments: object) -> NoReturn:
    """Do what a forked process is for, and end it without what its parent has planned for its own end."""
    status = 1
    try:
        work(*arguments)
        status = 0
    finally:
        os._exit(status)


def _bound_memory(spare_bytes: int) -> None:
    """Allow so much more memory than is in use now, where the system can say how much that is."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + spare_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Serve the socket that was handed down."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # workers crash by design
    with suppress(Silence), socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control, int(sys.argv[2]))


if __name__ == "__main__":
    main()
