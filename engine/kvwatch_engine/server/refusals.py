"""Parameters that are not implemented and would change the answer: refused by name, never ignored in silence.

A value that asks for nothing (null, an empty list, the default) is harmless and accepted.
"""

from collections.abc import Iterator

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.protocol.completions import CompletionRequest
from kvwatch_engine.server.protocol.request import GenerationFields

_HARMLESS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "regex": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}
"""Values that ask for nothing, beside null."""

_CONVERSATION_FIELDS = ("tools", "tool_choice")
"""Implemented for chats and responses."""

_TEMPLATE_VARIABLES = ("enable_thinking",)
"""Variables that `chat_template_kwargs` may set. Others could reach the arguments of the renderer itself."""


def refuse_unsupported(request: GenerationFields) -> None:
    """Refuse parameters that are not implemented.

    Raises:
        RequestInvalid: naming the parameter.
    """
    is_conversation = not isinstance(request, CompletionRequest)
    for name, harmless in _harmless_values(request):
        if is_conversation and name in _CONVERSATION_FIELDS:
            continue
        value = getattr(request, name, None)
        if value is not None and value not in harmless:
            raise RequestInvalid(
                f"{name} is not supported by this server; remove it from the request", param=name, code="unsupported"
            )


def _harmless_values(request: GenerationFields) -> Iterator[tuple[str, tuple[object, ...]]]:
    yield from _HARMLESS.items()
    # Rendered chat templates hold their special tokens already; plain prompts get the tokenizer's own.
    yield "add_special_tokens", (isinstance(request, CompletionRequest),)
    if not isinstance(request, CompletionRequest):
        yield "echo", (False,)


def template_variables(asked: dict[str, object] | None) -> dict[str, bool]:
    """Return the template variables that a request sets in `chat_template_kwargs`.

    Raises:
        RequestInvalid: a variable that may not be set from outside (`chat_template` among them).
    """
    variables: dict[str, bool] = {}
    for name, value in (asked or {}).items():
        param = f"chat_template_kwargs.{name[:64]}"
        if name not in _TEMPLATE_VARIABLES:
            allowed = ", ".join(_TEMPLATE_VARIABLES)
            raise RequestInvalid(f"{param} is not supported by this server; allowed: {allowed}", param=param)
        if not isinstance(value, bool):
            raise RequestInvalid(f"{param} must be true or false", param=param)
        variables[name] = value
    return variables
