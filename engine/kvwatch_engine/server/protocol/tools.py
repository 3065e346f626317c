"""Functions that a request offers to the model, calls of them in messages and answers."""

from typing import Literal

from msgspec import Struct


class FunctionDefinition(Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    """JSON Schema of its arguments; none takes any object."""
    strict: bool | None = None


class Tool(Struct):
    """An entry of `tools`."""

    type: str
    function: FunctionDefinition | None = None


class NamedFunction(Struct):
    """Names a function."""

    name: str


class NamedTool(Struct):
    """`tool_choice` that asks for one function."""

    type: str
    function: NamedFunction | None = None


class CalledFunction(Struct):
    """A call: which function, and its arguments as JSON."""

    name: str
    arguments: str


class MessageToolCall(Struct):
    """A call that the assistant made, in a message of a request."""

    id: str
    function: CalledFunction
    type: str = "function"


class ToolCall(Struct, kw_only=True):
    """A call that the model makes, in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDelta(Struct, omit_defaults=True):
    """What a chunk adds to a call: its name once, its arguments piece by piece."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to one of the calls."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta
