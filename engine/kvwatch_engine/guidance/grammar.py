"""A grammar as a request gives it, and how large one may be. Compiles nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvwatch_engine.contracts.errors import RequestInvalid

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
"""`lark` is a grammar that this server wrote, `grammar` one that a request brings."""

INVALID_GRAMMAR = "invalid_grammar"
"""Code of the refusal of a grammar that cannot be compiled, or not within its bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceLimits:
    """How large a grammar may be, and what it may take. Every refusal names its limit."""

    max_bytes: int = 65_536
    """Of a schema as JSON, of all choices together, of a grammar."""
    max_regex_chars: int = 4_096
    max_depth: int = 64
    """Levels of a schema."""
    max_schema_values: int = 10_000
    """Objects, lists, numbers and texts of a schema, all levels together."""
    max_choices: int = 1_000
    max_terminal_size: int = 10_000
    """Characters that a terminal of a grammar stands for, when each terminal in it is written out."""
    compile_cpu_seconds: float = 0.15
    """Time of a processor that compiling a grammar may take; what people write takes some milliseconds."""
    compile_seconds: float = 0.7
    """Time after which whoever brings a grammar is told to come back, since the machine has been too busy for it."""
    answer_seconds: float = 0.8
    """The same, with the time that it waited for others to be compiled."""
    turn_seconds: float = 0.000_25
    rest_seconds: float = 0.001_5
    """How long a process that compiles may go on, and how long it is stopped then, while others want all cores."""
    max_trials: int = 4
    """Grammars that are compiled at the same time, by turns."""
    start_seconds: float = 60.0
    """Time in which the trial process must have started."""
    trial_bytes: int = 256 * 2**20
    """Memory that compiling one grammar may take, beside that of the vocabulary."""
    mask_seconds: float = 1.0
    """Time that a step waits for what a grammar allows next, once the model is done."""
    mask_threads: int = 2
    max_pending: int = 64
    """Grammars that wait to be compiled; more are answered 429."""
    max_cached: int = 32
    """Compiled grammars that are kept for the next request that brings them."""
    max_refusals: int = 256
    """Grammars that cannot be compiled whose refusals are kept, for the next request that brings one of them."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must be. Equal ones are compiled once."""

    kind: GrammarKind
    text: str
    """JSON Schema as JSON, a regular expression, choices as a JSON list, or a grammar in Lark's or GBNF's form."""
    param: str = ""
    """Field of the request that it came from."""

    def refusal(self, reason: str) -> RequestInvalid:
        """Return the error that refuses it."""
        return RequestInvalid(f"{self.param}: {reason}", param=self.param, code=INVALID_GRAMMAR)

    def check_size(self, limits: GuidanceLimits) -> None:
        """Refuse one that is too long.

        Raises:
            RequestInvalid: so.
        """
        if self.kind == "regex" and len(self.text) > limits.max_regex_chars:
            raise self.refusal(
                f"the expression has {len(self.text)} characters, the limit is {limits.max_regex_chars}; shorten it"
            )
        num_bytes = len(self.text.encode("utf-8", "replace"))
        if num_bytes > limits.max_bytes:
            raise self.refusal(f"it has {num_bytes} bytes, the limit is {limits.max_bytes}; make it smaller")


def check_schema(schema: object, param: str, limits: GuidanceLimits) -> None:
    """Refuse a schema that is nested too deeply or holds too much, before it is written out as JSON.

    Args:
        schema: decoded JSON.
        param: field of the request that it came from.
        limits: how deep, and how many values.

    Raises:
        RequestInvalid: so.
    """
    refuse = Grammar("json_schema", "", param).refusal
    level: Sequence[object] = [schema]
    num_values = 0
    for _ in range(limits.max_depth):
        num_values += len(level)
        if num_values > limits.max_schema_values:
            raise refuse(f"the schema holds more than {limits.max_schema_values} values; make it smaller")
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
        if not level:
            return
    raise refuse(f"the schema is nested more than {limits.max_depth} levels deep; name parts of it in $defs")
