"""Events of a stream of `/v1/responses`; the tag of each is its name."""

from kvwatch_engine.server.protocol.chat import TokenLogprobs
from kvwatch_engine.server.protocol.reply import NamedEvent
from kvwatch_engine.server.protocol.responses import FunctionCall, OutputMessage, OutputText, Response


class ResponseEvent(NamedEvent, kw_only=True):
    """An event; they are numbered from 0 in the order in which they are sent."""

    sequence_number: int = 0


class ResponseCreated(ResponseEvent, kw_only=True, tag="response.created"):
    """The request was found valid."""

    response: Response


class ResponseInProgress(ResponseEvent, kw_only=True, tag="response.in_progress"):
    """It waits for the engine, or is computed."""

    response: Response


class ResponseCompleted(ResponseEvent, kw_only=True, tag="response.completed"):
    """The end of a complete response."""

    response: Response


class ResponseIncomplete(ResponseEvent, kw_only=True, tag="response.incomplete"):
    """The end of a response that was cut short."""

    response: Response


class ResponseFailed(ResponseEvent, kw_only=True, tag="response.failed"):
    """The engine could not complete it."""

    response: Response


class OutputItemAdded(ResponseEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputMessage | FunctionCall


class OutputItemDone(ResponseEvent, kw_only=True, tag="response.output_item.done"):
    """An item has ended."""

    output_index: int
    item: OutputMessage | FunctionCall


class ContentEvent(ResponseEvent, kw_only=True):
    """Says something of a part of an item."""

    item_id: str
    output_index: int
    content_index: int = 0


class ContentPartAdded(ContentEvent, kw_only=True, tag="response.content_part.added"):
    """A part begins."""

    part: OutputText


class ContentPartDone(ContentEvent, kw_only=True, tag="response.content_part.done"):
    """A part has ended."""

    part: OutputText


class OutputTextDelta(ContentEvent, kw_only=True, tag="response.output_text.delta"):
    """Text was added."""

    delta: str
    logprobs: list[TokenLogprobs]


class OutputTextDone(ContentEvent, kw_only=True, tag="response.output_text.done"):
    """A text has ended."""

    text: str
    logprobs: list[TokenLogprobs]


class ArgumentsDelta(ResponseEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """Arguments of a call were added."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(ResponseEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """Arguments of a call have ended."""

    item_id: str
    output_index: int
    name: str
    arguments: str
