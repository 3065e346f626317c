"""A process that compiles grammars which nobody has tried yet: `python -m kvwatch_engine.guidance.trial`.

A grammar may take minutes, much memory, or the whole stack, which ends a process. Here nothing is lost by that: whoever
asks (`trials.py`) kills it at a deadline. Its stack is smaller than that of the server's threads, so that what it
survives the server survives.

Messages: first a `VocabularySource`, answered by a `Trial`; then `Untried` ones, each answered by a `Trial`. It ends
when its standard input does.
"""

import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from kvwatch_engine.guidance.lark_size import largest_terminal
from kvwatch_engine.guidance.messages import LENGTH_BYTES, Trial, Untried, packed
from kvwatch_engine.guidance.vocabulary import VocabularySource, make_matcher, matcher_error, one_line

_STACK_BYTES: Final = 2**20
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


def read_message(stream: BinaryIO) -> bytes:
    """Return the next message; empty at the end."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    return stream.read(length)


def write_message(stream: BinaryIO, message: msgspec.Struct) -> None:
    """Send a message."""
    stream.write(packed(message))
    stream.flush()


def _serve(requests: BinaryIO, answers: BinaryIO, spare_bytes: int) -> None:
    source = msgspec.msgpack.decode(read_message(requests), type=VocabularySource)
    try:
        vocabulary = source.build()
    except Exception as error:  # whatever the library dislikes is the answer
        write_message(answers, Trial(error=one_line(str(error)) or type(error).__name__))
        return
    write_message(answers, Trial())
    _bound_memory(spare_bytes)
    while body := read_message(requests):
        write_message(answers, try_grammar(vocabulary, msgspec.msgpack.decode(body, type=Untried)))


def _bound_memory(spare_bytes: int) -> None:
    """Allow so much more memory than is in use now, where the system can say how much that is."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + spare_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Serve until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it crashes by design
    threading.stack_size(_STACK_BYTES)
    serving = threading.Thread(
        target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1])), name="guidance-trial"
    )
    serving.start()
    serving.join()


if __name__ == "__main__":
    main()
