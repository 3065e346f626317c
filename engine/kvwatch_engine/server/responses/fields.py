"""Fields that only responses have: checked, refused by name, or made into what all APIs have in common."""

from typing import Final

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.guidance import Grammar, GuidanceLimits
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.guided import format_grammars
from kvwatch_engine.server.protocol.guided import JsonSchemaFormat, ResponseFormat
from kvwatch_engine.server.protocol.responses import INCLUDE_LOGPROBS, ResponseRequest, ResponseTool, ResponseToolChoice
from kvwatch_engine.server.protocol.tools import FunctionDefinition
from kvwatch_engine.server.tools.offer import (
    Described,
    Offer,
    Wanted,
    check_tool_type,
    offer_functions,
    wanted_by_word,
)

_INCLUDABLE: Final = (
    INCLUDE_LOGPROBS,
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""All but the first ask for what is always there, or for parts of what never is."""
_NOT_SUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "image": ({},),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
}
"""Fields that would change the answer, and values of them that ask for nothing, beside null."""
_OTHER_NAMES: Final[dict[str, str]] = {
    "logprobs": f"top_logprobs, and {INCLUDE_LOGPROBS} in include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Names of other APIs, and what stands for them here."""
NEVER_TAKEN: Final = frozenset(_OTHER_NAMES) | {
    "prompt_logprobs",
    "beam_width",
    "early_stopping",
    "length_penalty",
    "n",
    "use_beam_search",
}
"""Fields that all requests have and that ask for nothing here, or are refused."""
MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_CHARS: Final = 512
MAX_ECHO_CHARS: Final = 512
"""Longest of the names that a response tells again, and that are kept with it."""
_ECHOES: Final = ("prompt_cache_key", "safety_identifier", "user")


def check_fields(request: ResponseRequest) -> None:
    """Check the fields that only responses have.

    Raises:
        RequestInvalid: one is not supported, too long, or has another name here.
    """
    for name, here in _OTHER_NAMES.items():
        if getattr(request, name) is not None:
            raise RequestInvalid(f"{name} is no parameter of responses; send {here}", param=name, code="unsupported")
    for name, harmless in _NOT_SUPPORTED.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise RequestInvalid(
                f"{name} is not supported for responses by this server; remove it, or set it to null",
                param=name,
                code="unsupported",
            )
    _check_include(request)
    _check_reasoning(request.reasoning or {})
    _check_metadata(request.metadata or {})
    for name in _ECHOES:
        value = getattr(request, name)
        if value is not None and len(value) > MAX_ECHO_CHARS:
            raise RequestInvalid(f"{name} has {len(value)} characters, the limit is {MAX_ECHO_CHARS}", param=name)
    verbosity = request.text.verbosity if request.text is not None else None
    if verbosity not in (None, "medium"):
        raise RequestInvalid(
            f"text.verbosity is {shorten(str(verbosity))!r}; this server cannot set it, say in instructions how long "
            "the answer shall be",
            param="text.verbosity",
            code="unsupported",
        )


def _check_include(request: ResponseRequest) -> None:
    for place, wanted in enumerate(request.include or ()):
        if wanted not in _INCLUDABLE:
            raise RequestInvalid(
                f"include[{place}] is {shorten(wanted)!r}; known are {', '.join(_INCLUDABLE)}", param="include"
            )


def _check_reasoning(reasoning: dict[str, object]) -> None:
    effort = reasoning.get("effort")
    if effort not in (None, "none"):
        raise RequestInvalid(
            f"reasoning.effort is {shorten(str(effort))!r}; this server cannot set it: remove it, and where the "
            "model's template can switch thinking, use chat_template_kwargs.enable_thinking",
            param="reasoning.effort",
            code="unsupported",
        )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise RequestInvalid(f"metadata has {len(metadata)} entries, the limit is {MAX_METADATA}", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_CHARS:
            raise RequestInvalid(
                f"metadata has a key of {len(key)} characters with a value of {len(value)}; the limits are "
                f"{MAX_METADATA_KEY_CHARS} and {MAX_METADATA_CHARS}",
                param="metadata",
            )


def response_format(request: ResponseRequest, limits: GuidanceLimits) -> list[Grammar]:
    """Return what `text.format` says that the text must be; nothing if it is free.

    Raises:
        RequestInvalid: it is of an unknown type, or its schema is missing or too large.
    """
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return []
    schema = JsonSchemaFormat(wanted.name, wanted.description, wanted.schema, wanted.strict)
    is_schema = wanted.type == "json_schema"
    return list(
        format_grammars(
            ResponseFormat(wanted.type, schema if is_schema else None), limits, "text.format", "text.format.schema"
        )
    )


def response_offer(request: ResponseRequest, limits: GuidanceLimits) -> Offer | None:
    """Return the functions that may be called; none if nothing may.

    Raises:
        RequestInvalid: a tool is no function or not described as it must be, the choice names none of them, or
            log-probabilities are asked for as well.
    """
    described = [_described(tool, f"tools[{place}]") for place, tool in enumerate(request.tools or ())]
    offer = offer_functions(described, _wanted(request.tool_choice), request.parallel_tool_calls, limits)
    if offer is not None and wants_logprobs(request):
        raise RequestInvalid(
            f"include has {INCLUDE_LOGPROBS}, which does not go together with tools: tokens of calls are in no text; "
            "remove one, or set tool_choice to none",
            param="include",
            code="unsupported",
        )
    return offer


def wants_logprobs(request: ResponseRequest) -> bool:
    """Return whether log-probabilities are asked for."""
    return INCLUDE_LOGPROBS in (request.include or ())


def _described(tool: ResponseTool, param: str) -> Described:
    check_tool_type(tool.type, param)
    if tool.name is None:
        raise RequestInvalid(f"{param}.name is missing", param=f"{param}.name")
    return FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict), param


def _wanted(choice: str | ResponseToolChoice | None) -> Wanted:
    if choice is None:
        return Wanted("auto")
    if isinstance(choice, str):
        return wanted_by_word(choice)
    if choice.type == "function" and choice.name is not None:
        return Wanted("required", frozenset({choice.name}), "tool_choice.name", is_one=True)
    if choice.type == "allowed_tools" and choice.mode in ("auto", "required") and choice.tools:
        for place, tool in enumerate(choice.tools):
            check_tool_type(tool.type, f"tool_choice.tools[{place}]")
        names = frozenset(tool.name or "" for tool in choice.tools)
        return Wanted("auto" if choice.mode == "auto" else "required", names, "tool_choice.tools")
    raise RequestInvalid(
        "tool_choice must be none, auto, required, {'type': 'function', 'name': ...} or {'type': 'allowed_tools', "
        "'mode': 'auto' or 'required', 'tools': [...]}",
        param="tool_choice",
    )
