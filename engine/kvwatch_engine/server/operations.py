"""What the API can be asked, declared once: bodies, answers and errors of each path; `openapi.py` tells it."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import Struct

from kvwatch_engine.server.protocol.adapters import AdapterUnloaded, LoadAdapterRequest, UnloadAdapterRequest
from kvwatch_engine.server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from kvwatch_engine.server.protocol.completions import Completion, CompletionRequest
from kvwatch_engine.server.protocol.reply import ErrorBody, Model, ModelList, Status, Version
from kvwatch_engine.server.protocol.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from kvwatch_engine.server.protocol.responses import ItemList, Response, ResponseDeleted, ResponseRequest
from kvwatch_engine.server.protocol.tokenization import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)

Tag = Literal["generate", "look", "adapters", "server"]
MAX_PARAMETER_CHARS: Final = 256

_BODY: Final = (400, 408, 413, 415)
_GENERATION: Final = (*_BODY, 404, 429, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """A parameter behind the question mark."""

    name: str
    brief: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOperation:
    """One method of one path."""

    name: str
    brief: str
    tag: Tag
    answer: type[Struct] | None
    """JSON of status 200; none if it is a text or never comes."""
    body: type[Struct] | None = None
    events: tuple[type[Struct], ...] = ()
    """What the events of a stream hold, where the answer may be one."""
    query: tuple[QueryParameter, ...] = ()
    errors: tuple[int, ...] = ()
    """Statuses of errors beside 401, where keys are asked for, and 500."""
    links: tuple[str, ...] = ()
    """Names of operations on what the answer's `id` names."""
    text_type: str = ""
    """Media type of an answer that is a text."""


_RESPONSE_EVENTS: Final = (
    ResponseCreated, ResponseInProgress, OutputItemAdded, ContentPartAdded, OutputTextDelta, OutputTextDone,
    ContentPartDone, ArgumentsDelta, ArgumentsDone, OutputItemDone, ResponseCompleted, ResponseIncomplete,
    ResponseFailed,
)  # fmt: skip
_PAGE: Final = (
    QueryParameter(
        name="limit", brief="Most items.", schema={"type": "integer", "minimum": 1, "maximum": 100, "default": 20}
    ),
    QueryParameter(name="order", brief="Newest or oldest first.", schema={"enum": ["asc", "desc"], "default": "desc"}),
    QueryParameter(name="after", brief="Id of the item before them.", schema={"type": "string", "minLength": 1}),
)
_RESPONSE: Final = "/v1/responses/{response_id}"

OPERATIONS: Final[dict[tuple[str, str], ApiOperation]] = {
    ("POST", "/v1/chat/completions"): ApiOperation(
        name="create_chat_completion",
        brief="Answers messages.",
        tag="generate",
        body=ChatRequest,
        answer=ChatCompletion,
        events=(ChatChunk, ErrorBody),
        errors=_GENERATION,
    ),
    ("POST", "/v1/completions"): ApiOperation(
        name="create_completion",
        brief="Continues texts.",
        tag="generate",
        body=CompletionRequest,
        answer=Completion,
        events=(Completion, ErrorBody),
        errors=_GENERATION,
    ),
    ("POST", "/v1/responses"): ApiOperation(
        name="create_response",
        brief="Answers a text or items, and keeps the answer.",
        tag="generate",
        body=ResponseRequest,
        answer=Response,
        events=_RESPONSE_EVENTS,
        links=("get_response", "list_input_items", "cancel_response", "delete_response"),
        errors=_GENERATION,
    ),
    ("GET", _RESPONSE): ApiOperation(
        name="get_response",
        brief="Returns a kept response.",
        tag="look",
        answer=Response,
        query=(
            QueryParameter(name="stream", brief="Only false: what has ended is no stream.", schema={"enum": ["false"]}),
        ),
        errors=(400, 404),
    ),
    ("DELETE", _RESPONSE): ApiOperation(
        name="delete_response", brief="Forgets a kept response.", tag="generate", answer=ResponseDeleted, errors=(404,)
    ),
    ("GET", f"{_RESPONSE}/input_items"): ApiOperation(
        name="list_input_items",
        brief="Returns the items that a kept response answers.",
        tag="look",
        answer=ItemList,
        query=_PAGE,
        errors=(400, 404),
    ),
    ("POST", f"{_RESPONSE}/cancel"): ApiOperation(
        name="cancel_response",
        brief="Is refused: there are no background responses.",
        tag="generate",
        answer=None,
        errors=(400, 404),
    ),
    ("POST", "/v1/embeddings"): ApiOperation(
        name="create_embedding", brief="Is refused.", tag="generate", answer=None, errors=(400,)
    ),
    ("GET", "/v1/models"): ApiOperation(
        name="list_models", brief="Returns what is served.", tag="look", answer=ModelList
    ),
    ("GET", "/v1/models/{name}"): ApiOperation(
        name="get_model", brief="Returns one of the models that are served.", tag="look", answer=Model, errors=(404,)
    ),
    ("POST", "/v1/load_lora_adapter"): ApiOperation(
        name="load_lora_adapter",
        brief="Loads a LoRA adapter.",
        tag="adapters",
        body=LoadAdapterRequest,
        answer=Model,
        errors=(*_BODY, 403, 404, 409),
    ),
    ("POST", "/v1/unload_lora_adapter"): ApiOperation(
        name="unload_lora_adapter",
        brief="Unloads a LoRA adapter.",
        tag="adapters",
        body=UnloadAdapterRequest,
        answer=AdapterUnloaded,
        errors=(*_BODY, 403, 404),
    ),
    ("POST", "/tokenize"): ApiOperation(
        name="tokenize",
        brief="Returns the tokens of a text or of messages.",
        tag="look",
        body=TokenizeRequest,
        answer=TokenizeAnswer,
        errors=(*_BODY, 404, 429),
    ),
    ("POST", "/detokenize"): ApiOperation(
        name="detokenize",
        brief="Returns the text of tokens.",
        tag="look",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
        errors=(*_BODY, 404, 429),
    ),
    ("GET", "/health"): ApiOperation(
        name="health", brief="Says whether the step loop makes progress.", tag="server", answer=Status, errors=(503,)
    ),
    ("GET", "/ready"): ApiOperation(
        name="ready", brief="Says whether requests are accepted.", tag="server", answer=Status, errors=(503,)
    ),
    ("GET", "/version"): ApiOperation(name="version", brief="Returns the version.", tag="server", answer=Version),
    ("GET", "/metrics"): ApiOperation(
        name="metrics", brief="Returns Prometheus metrics.", tag="server", answer=None, text_type="text/plain"
    ),
    ("GET", "/openapi.json"): ApiOperation(
        name="document", brief="Returns this document.", tag="server", answer=None, text_type="application/json"
    ),
}
