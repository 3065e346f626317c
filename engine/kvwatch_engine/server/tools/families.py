"""How families of models write calls: what surrounds them, and a grammar that allows nothing else.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after the other   (Hermes, Qwen, SmolLM3 ...)
llama3    {"name": ..., "parameters": {...}}, the whole answer; several with `;` between, perhaps after <|python_tag|>
mistral   [TOOL_CALLS] and a list of such objects, or a name and its arguments
"""

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvwatch_engine.contracts.tools import FamilyName

_SHORT_ID: Final = string.ascii_letters + string.digits


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's template takes ids of nine letters and digits only."""
    return "".join(secrets.choice(_SHORT_ID) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One way of writing calls."""

    name: FamilyName
    begin: str
    """Marker before calls; a token of its own in most vocabularies, sometimes a special one."""
    ends: tuple[str, ...] = ()
    """Markers after them."""
    opening: str = ""
    """What may stand between marker and first call."""
    between: str = ""
    """What may stand between two calls without another marker."""
    is_bare: bool = False
    """A text that is a call from its first character on needs no marker."""
    names_first: bool = False
    """After the marker a name and its arguments may stand instead of an object."""
    before_arguments: str = ""
    """Marker between such a name and its arguments."""
    arguments_key: str = "arguments"
    new_id: Callable[[], str] = _long_id

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that surrounds calls and may be a special token, which has no text by itself."""
        return tuple(marker for marker in (self.begin, *self.ends, self.before_arguments) if marker)

    def grammar(self, tools: Sequence["OfferedTool"], written: Callable[[str], str], *, is_parallel: bool) -> str:
        """Return a Lark grammar of texts that are calls and nothing else.

        Args:
            tools: functions that may be called.
            written: how the grammar writes a marker: as a text in quotes, or as a special token.
            is_parallel: whether there may be several calls.
        """
        begin, one, more = written(self.begin), "call", "; "
        match self.name:
            case "hermes":
                one, more = f'{begin} "\\n" call "\\n" {written(self.ends[0])}', "\\n"
            case "mistral":
                more = ", "
        start = f'one ("{more}" one)*' if is_parallel else "one"
        if self.name == "mistral":
            start = f'{begin} "[" {start} "]"'
        return "\n".join([f"start: {start}", f"one: {one}", *self._call_rules(tools), ""])

    def grammar_of_texts(
        self, tools: Sequence["OfferedTool"], written: Callable[[str], str], *, is_parallel: bool
    ) -> str:
        """Return a Lark grammar of texts in which what stands behind a marker is a call, and all else is free.

        A family whose calls need no marker has none: nothing tells their beginning from that of a text.

        Args:
            tools: functions that may be called.
            written: how the grammar writes a marker: as a text in quotes, or as a special token.
            is_parallel: whether there may be several calls.
        """
        assert not self.is_bare, "its calls need no marker"
        begin = written(self.begin)
        # The text before a marker ends with it; before a token that has no text it ends by itself.
        opened = f"opened[lazy]: TEXT {begin}" if begin.startswith('"') else f"opened: TEXT {begin}"
        calls = f"opened BLANK call BLANK {written(self.ends[0])}"
        if self.name == "mistral":
            calls = 'opened BLANK "[" call ("," BLANK call)* "]"' if is_parallel else 'opened BLANK "[" call "]"'
        start = "calls* TEXT" if is_parallel else "calls? TEXT"
        rules = [f"start: {start}", f"calls: {calls}", opened, *self._call_rules(tools)]
        return "\n".join([*rules, r"TEXT: /(.|\n)*/", r"BLANK: /[ \n]{0,4}/", ""])

    def _call_rules(self, tools: Sequence["OfferedTool"]) -> list[str]:
        calls = " | ".join(f"call{place}" for place in range(len(tools)))
        rules = [f"call: {calls}"]
        for place, tool in enumerate(tools):
            head = quoted(f'{{"name": "{tool.name}", "{self.arguments_key}": ')
            rules.append(f'call{place}: {head} %json {tool.schema_json} "}}"')
        return rules


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that may be called."""

    name: str
    schema_json: str
    """JSON Schema of its arguments."""
    is_strict: bool = False
    """Whether they have to fit it even if nothing has to be called."""


def quoted(text: str) -> str:
    """Return a text as a grammar writes it."""
    return msgspec.json.encode(text).decode()


HERMES: Final = Family(name="hermes", begin="<tool_call>", ends=("</tool_call>",))
LLAMA3: Final = Family(name="llama3", begin="<|python_tag|>", between=";", is_bare=True, arguments_key="parameters")
MISTRAL: Final = Family(
    name="mistral",
    begin="[TOOL_CALLS]",
    ends=("]",),
    opening="[",
    between=",",
    names_first=True,
    before_arguments="[ARGS]",
    new_id=_short_id,
)
FAMILIES: Final[dict[FamilyName, Family]] = {family.name: family for family in (HERMES, LLAMA3, MISTRAL)}
