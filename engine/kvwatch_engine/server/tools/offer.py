"""What a request offers to be called: its tools and `tool_choice`, checked."""

import re
from dataclasses import dataclass
from typing import Final, Literal

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

Choice = Literal["auto", "required"]


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
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise RequestInvalid("tool_choice needs tools; send the functions that may be called", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestInvalid(f"tools has {len(tools)} functions, the limit is {MAX_TOOLS}", param="tools")
    functions = [_function(tool, f"tools[{place}]", limits) for place, tool in enumerate(tools)]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise RequestInvalid("tools names a function twice; give each a name of its own", param="tools")
    num_bytes = len(msgspec.json.encode(functions))
    if num_bytes > limits.max_bytes:
        raise RequestInvalid(f"tools has {num_bytes} bytes, the limit is {limits.max_bytes}", param="tools")
    if tool_choice == "none":
        return None
    wanted = _wanted(tool_choice, names)
    choice: Choice = "auto" if tool_choice in (None, "auto") else "required"
    return Offer(
        functions=tuple(functions),
        callable=tuple(
            _offered(function, is_required=choice == "required")
            for function in functions
            if wanted in (None, function.name)
        ),
        choice=choice,
        is_parallel=parallel_tool_calls is not False and wanted is None,
    )


def _wanted(tool_choice: str | NamedTool | None, names: list[str]) -> str | None:
    """Return the one function that was asked for; none if all may be called."""
    if tool_choice in (None, "auto", "required"):
        return None
    if isinstance(tool_choice, str):
        raise RequestInvalid(
            f"tool_choice is {shorten(tool_choice)!r}; it may be none, auto, required or a function of tools",
            param="tool_choice",
        )
    assert tool_choice is not None, "none was looked at"
    if tool_choice.type != "function" or tool_choice.function is None:
        raise RequestInvalid("tool_choice must be {'type': 'function', 'function': {'name': ...}}", param="tool_choice")
    if tool_choice.function.name not in names:
        raise RequestInvalid(
            f"tool_choice asks for {shorten(tool_choice.function.name)!r}, which is not in tools",
            param="tool_choice.function.name",
        )
    return tool_choice.function.name


def _function(tool: Tool, param: str, limits: GuidanceLimits) -> FunctionDefinition:
    if tool.type != "function":
        raise RequestInvalid(
            f"{param}.type is {shorten(tool.type)!r}; only functions are supported by this server",
            param=f"{param}.type",
            code="unsupported",
        )
    function = tool.function
    if function is None:
        raise RequestInvalid(f"{param}.function is missing", param=f"{param}.function")
    if not _NAME.fullmatch(function.name):
        raise RequestInvalid(
            f"{param}.function.name is {shorten(function.name)!r}; it may have 1 to 64 letters, digits, _, - and .",
            param=f"{param}.function.name",
        )
    if function.parameters is not None:
        check_schema(function.parameters, f"{param}.function.parameters", limits)
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
