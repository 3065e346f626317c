"""Bodies of `/v1/chat/completions`."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from kvwatch_engine.server.protocol.reply import PromptTokenLogprob, Usage
from kvwatch_engine.server.protocol.request import GenerationFields
from kvwatch_engine.server.protocol.tools import MessageToolCall, NamedTool, Tool, ToolCall, ToolCallDelta


class ImageURL(Struct):
    """Where an image is, and how closely it is to be looked at."""

    url: str
    detail: str | None = None


class ContentPart(Struct):
    """One part of a message; `text` is implemented, and `image_url` where the model takes images."""

    type: str
    text: str | None = None
    image_url: ImageURL | None = None


class Message(Struct):
    """One message. Unknown fields, `name` among them, have no place in chat templates and are ignored."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[MessageToolCall] | None = None
    """Calls that the assistant made."""
    tool_call_id: str | None = None
    """Of a message of role `tool`: the call whose result it is."""
    function_call: object = None
    audio: object = None


class ChatRequest(GenerationFields, kw_only=True):
    """Request of a chat completion."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    # Not implemented.
    add_generation_prompt: object = None
    chat_template: object = None
    continue_final_message: object = None
    documents: object = None
    echo: object = None


class TopLogprob(Struct):
    """A likely token at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Struct):
    """The chosen token at one position, and likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of an answer."""

    content: list[TokenLogprobs]
    refusal: None = None


class AnswerMessage(Struct):
    """The assistant's answer."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    score: float | UnsetType = UNSET
    """Of a beam search; see `length_penalty`."""


class ChatCompletion(Struct, kw_only=True):
    """Answer of a chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | UnsetType = UNSET
    """Of each token of the prompt by token ids, if asked for."""


class Delta(Struct, omit_defaults=True):
    """What a chunk adds to an answer; what it does not add is absent."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Struct):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    score: float | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    """Absent unless asked for; then null in every chunk but the last."""
