"""Bodies of `/v1/responses`: what is asked, and the response."""

from typing import Final, Literal

from msgspec import Raw, Struct

from kvwatch_engine.server.protocol.chat import TokenLogprobs
from kvwatch_engine.server.protocol.request import GenerationFields

INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""


class InputPart(Struct, kw_only=True, omit_defaults=True):
    """One part of an item's content. Text of the user and the assistant, and images, are implemented."""

    type: str
    text: str | None = None
    image_url: str | None = None
    detail: str | None = None
    refusal: str | None = None
    annotations: list[object] | None = None
    file_id: object = None


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """One item of a conversation, of which messages, calls of functions and their results are implemented.

    Unknown fields have no place in chat templates and are ignored.
    """

    id: str | None = None
    type: str | None = None
    """A message if it is not given."""
    status: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class TextFormat(Struct, kw_only=True):
    """`text.format`."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseTool(Struct, kw_only=True):
    """An entry of `tools`; functions are implemented."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ResponseToolChoice(Struct, kw_only=True, omit_defaults=True):
    """`tool_choice` that asks for one function, or allows some of them."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list["ResponseToolChoice"] | None = None


class ResponseRequest(GenerationFields, kw_only=True):
    """Request of a response.

    Fields of type `object` are not implemented, or no answer depends on them.
    """

    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, object] | None = None
    chat_template_kwargs: dict[str, object] | None = None

    # Told again in the response.
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    """Calls of hosted tools only, of which there are none."""
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    # Not implemented.
    add_generation_prompt: object = None
    background: object = None
    chat_template: object = None
    context_management: object = None
    continue_final_message: object = None
    conversation: object = None
    documents: object = None
    echo: object = None
    image: object = None
    moderation: object = None
    prompt: object = None

    # Names that other APIs have for what this one has as well.
    logprobs: object = None
    max_completion_tokens: object = None
    messages: object = None


class OutputText(Struct, kw_only=True, tag="output_text", tag_field="type"):
    """Text that the model wrote."""

    text: str
    annotations: list[object] = []
    logprobs: list[TokenLogprobs] = []
    """Empty unless they were asked for."""


class OutputMessage(Struct, kw_only=True, tag="message", tag_field="type"):
    """A message of the assistant."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCall(Struct, kw_only=True, tag="function_call", tag_field="type"):
    """A call that the model makes."""

    id: str
    call_id: str
    name: str
    arguments: str
    """JSON; cut short while `status` is not `completed`."""
    status: Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(Struct):
    """Where the input's tokens came from."""

    cached_tokens: int
    """Input tokens whose keys and values were found in the prefix cache."""
    cache_write_tokens: int
    """Input tokens whose keys and values were computed and written to the cache: all others."""


class OutputTokensDetails(Struct):
    """What the output's tokens are."""

    reasoning_tokens: int
    """Always 0: what a model thinks is part of its text."""


class ResponseUsage(Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    """Why a response failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Struct):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ReasoningEcho(Struct, frozen=True):
    """`reasoning` of a response: there is none."""

    effort: None = None
    summary: None = None


class FormatEcho(Struct, omit_defaults=True):
    """`text.format` of a response."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class TextEcho(Struct):
    """`text` of a response."""

    format: FormatEcho
    verbosity: Literal["medium"] = "medium"


class Response(Struct, kw_only=True):
    """A response: what was generated, and with which settings."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    completed_at: int | None = None
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | FunctionCall] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho = ReasoningEcho()
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    system_fingerprint: str
    temperature: float
    text: TextEcho
    tool_choice: str | ResponseToolChoice
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


class ResponseDeleted(Struct, kw_only=True):
    """Says that a response is kept no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Struct, kw_only=True):
    """Items of the conversation that a response answers."""

    object: Literal["list"] = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
