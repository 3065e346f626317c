"""What a request offers to be called: its tools and `tool_choice`, checked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

import msgspec

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance import GuidanceLimits
from kvwatch_engine.guidance.grammar import check_schema
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.protocol.tools import FunctionDefinition, NamedTool, Tool
from kvwatch_engine.server.tools.families import OfferedTool

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GUIDED: Final = "x-guidance"
"""A key of schemas by which the grammar library could be told to take them less seriously."""
_NO_ARGUMENTS: Final[dict[str, object]] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Final[dict[str, object]] = {"type": "object"}
_JSON_OPTIONS: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Arguments are written as Python's json module writes them, which is how the models have seen them."""

Choice = Literal["none", "auto", "required"]
Described = tuple[FunctionDefinition, str]
"""A function, and where it stands in the request."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a `tool_choice` asks for."""

    choice: Choice
    names: frozenset[str] | None = None
    """Functions that may be called; none for all."""
    names_param: str = "tool_choice"
    """Where their names stand in the request."""
    is_one: bool = False
    """Whether one call is asked for, and no other beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Functions that the model may call, or has to."""

    functions: tuple[FunctionDefinition, ...]
    """Those that stand in the prompt."""
    callable: tuple[OfferedTool, ...]
    """Those that may be called: all, or the one that was asked for."""
    choice: Choice = "auto"
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Names of those that may be called."""
        return frozenset(tool.name for tool in self.callable)

    def for_template(self) -> list[dict[str, object]]:
        """Return the functions as chat templates take them."""
        return [{"type": "function", "function": _plain(function)} for function in self.functions]


def offer_of(
    tools: list[Tool] | None,
    tool_choice: str | NamedTool | None,
    parallel_tool_calls: bool | None,  # noqa: FBT001 - OpenAI's field
    limits: GuidanceLimits,
) -> Offer | None:
    """Return what a request offers; none if nothing may be called.

    Raises:
        RequestInvalid: a function is not described as it must be, or the choice names none of them.
    """
    described = _described(tools or [])
    return offer_functions(described, _wanted(tool_choice), parallel_tool_calls, limits)


def offer_functions(
    described: Sequence[Described],
    wanted: Wanted,
    parallel_tool_calls: bool | None,  # noqa: FBT001 - OpenAI's field
    limits: GuidanceLimits,
) -> Offer | None:
    """Return what functions that were described somehow, and a choice among them, offer; none if nothing may be called.

    Raises:
        RequestInvalid: a function is not described as it must be, or the choice names none of them.
    """
    if not described:
        if wanted.choice == "required" or wanted.names is not None:
            raise RequestInvalid("tool_choice needs tools; send the functions that may be called", param="tool_choice")
        return None
    if len(described) > MAX_TOOLS:
        raise RequestInvalid(f"tools has {len(described)} functions, the limit is {MAX_TOOLS}", param="tools")
    functions = [_checked(function, param, limits) for function, param in described]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise RequestInvalid("tools names a function twice; give each a name of its own", param="tools")
    num_bytes = len(msgspec.json.encode(functions))
    if num_bytes > limits.max_bytes:
        raise RequestInvalid(f"tools has {num_bytes} bytes, the limit is {limits.max_bytes}", param="tools")
    if wanted.choice == "none":
        return None
    for name in wanted.names or ():
        if name not in names:
            raise RequestInvalid(
                f"tool_choice asks for {shorten(name)!r}, which is not in tools", param=wanted.names_param
            )
    return Offer(
        functions=tuple(functions),
        callable=tuple(
            _offered(function, is_required=wanted.choice == "required")
            for function in functions
            if wanted.names is None or function.name in wanted.names
        ),
        choice=wanted.choice,
        is_parallel=parallel_tool_calls is not False and not wanted.is_one,
    )


def wanted_by_word(word: str) -> Wanted:
    """Return what a `tool_choice` means that is a word.

    Raises:
        RequestInvalid: it is no known one.
    """
    if word not in ("none", "auto", "required"):
        raise RequestInvalid(
            f"tool_choice is {shorten(word)!r}; it may be none, auto, required or a function of tools",
            param="tool_choice",
        )
    return Wanted(cast("Choice", word))


def check_tool_type(kind: str, param: str) -> None:
    """Refuse tools that are no functions.

    Raises:
        RequestInvalid: so.
    """
    if kind != "function":
        raise RequestInvalid(
            f"{param}.type is {shorten(kind)!r}; only functions are supported by this server",
            param=f"{param}.type",
            code="unsupported",
        )


def _wanted(tool_choice: str | NamedTool | None) -> Wanted:
    if tool_choice is None:
        return Wanted("auto")
    if isinstance(tool_choice, str):
        return wanted_by_word(tool_choice)
    if tool_choice.type != "function" or tool_choice.function is None:
        raise RequestInvalid("tool_choice must be {'type': 'function', 'function': {'name': ...}}", param="tool_choice")
    name = tool_choice.function.name
    return Wanted("required", frozenset({name}), "tool_choice.function.name", is_one=True)


def _described(tools: Sequence[Tool]) -> list[Described]:
    described: list[Described] = []
    for place, tool in enumerate(tools):
        param = f"tools[{place}]"
        check_tool_type(tool.type, param)
        if tool.function is None:
            raise RequestInvalid(f"{param}.function is missing", param=f"{param}.function")
        described.append((tool.function, f"{param}.function"))
    return described


def _checked(function: FunctionDefinition, param: str, limits: GuidanceLimits) -> FunctionDefinition:
    if not _NAME.fullmatch(function.name):
        raise RequestInvalid(
            f"{param}.name is {shorten(function.name)!r}; it may have 1 to 64 letters, digits, _, - and .",
            param=f"{param}.name",
        )
    if function.parameters is not None:
        check_schema(function.parameters, f"{param}.parameters", limits)
    return function


def _offered(function: FunctionDefinition, *, is_required: bool) -> OfferedTool:
    """Return a function as it may be called: what is neither required nor strict takes any object."""
    is_kept = is_required or function.strict
    parameters = (function.parameters or _NO_ARGUMENTS) if is_kept else _ANY_ARGUMENTS
    schema = {**parameters, _GUIDED: _JSON_OPTIONS}
    return OfferedTool(function.name, msgspec.json.encode(schema).decode(), bool(function.strict))


def _plain(function: FunctionDefinition) -> dict[str, object]:
    described: dict[str, object] = {"name": function.name, "description": function.description or ""}
    return {**described, "parameters": function.parameters or {"type": "object", "properties": {}}}
