"""Bodies of `/tokenize` and `/detokenize`, by vLLM's names."""

from msgspec import Struct

from kvwatch_engine.server.protocol.chat import Message
from kvwatch_engine.server.protocol.tools import Tool


class TokenizeRequest(Struct, kw_only=True):
    """Asks for the tokens of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own begin token: by default to a text, and not to what a template wrote."""
    add_generation_prompt: bool | None = None
    """Whether the template opens the assistant's answer; it does by default."""
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[Tool] | None = None

    # Not implemented.
    chat_template: object = None
    continue_final_message: object = None
    mm_processor_kwargs: object = None


class TokenizeAnswer(Struct, kw_only=True):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """As the vocabulary writes them, if asked for."""


class DetokenizeRequest(Struct, kw_only=True):
    """Asks for the text of tokens."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(Struct, kw_only=True):
    """The text, special tokens included."""

    prompt: str
