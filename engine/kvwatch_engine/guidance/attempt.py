"""One grammar: what the library makes of it, within the process that may die of it."""

from typing import Final

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from kvwatch_engine.guidance.lark_size import largest_terminal
from kvwatch_engine.guidance.messages import Trial, Untried
from kvwatch_engine.guidance.vocabulary import make_matcher, matcher_error, one_line

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
