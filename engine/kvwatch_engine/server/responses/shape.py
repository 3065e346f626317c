"""The shape of responses and of their streams."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from kvwatch_engine.server.choice import ChoiceDelta
from kvwatch_engine.server.errors import INVALID_REQUEST, GenerationFailed
from kvwatch_engine.server.protocol.reply import Usage
from kvwatch_engine.server.protocol.response_events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from kvwatch_engine.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from kvwatch_engine.server.responses.output import CUT_SHORT, ResponseOutput


class ResponseShape:
    """Responses and their events."""

    mark_of_end = b""

    def __init__(self, draft: Response, output: ResponseOutput, keep: Callable[[Response], None]) -> None:
        """Create the shape of one response.

        Args:
            draft: the response before anything was generated.
            output: takes what is generated.
            keep: takes a response that has ended, before its end is told.
        """
        self._draft = draft
        self._output = output
        self._keep = keep
        self._numbers = itertools.count()
        self._finish_reason: str | None = None

    def begin(self) -> list[Struct]:
        """See `Shape.begin`."""
        return self._numbered([ResponseCreated(response=self._draft), ResponseInProgress(response=self._draft)])

    def chunks(self, delta: ChoiceDelta) -> list[Struct]:
        """See `Shape.chunks`."""
        self._finish_reason = delta.finish_reason or self._finish_reason
        return self._numbered(self._output.push(delta))

    def text_event(self, _delta: ChoiceDelta) -> None:
        """See `Shape.text_event`: every event has a number of its own."""

    def end(self, usage: Usage) -> list[Struct]:
        """See `Shape.end`."""
        response = self._ended(usage)
        event = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        return self._numbered([event(response=response)])

    def failed(self, error: GenerationFailed, usage: Usage) -> list[Struct]:
        """See `Shape.failed`; a response that failed is not kept."""
        code: Literal["invalid_prompt", "server_error"] = (
            "invalid_prompt" if error.type == INVALID_REQUEST else "server_error"
        )
        self._output.cut_short()
        response = msgspec.structs.replace(
            self._draft,
            status="failed",
            error=ResponseError(code, str(error)),
            output=self._output.items,
            usage=_usage(usage),
        )
        return self._numbered([ResponseFailed(response=response)])

    def answer(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Struct:
        """See `Shape.answer`."""
        for choice in choices:
            self.chunks(choice)
        return self._ended(usage)

    def _ended(self, usage: Usage) -> Response:
        is_cut = self._finish_reason == CUT_SHORT
        response = msgspec.structs.replace(
            self._draft,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._output.items,
            usage=_usage(usage),
        )
        self._keep(response)
        return response

    def _numbered(self, events: Iterable[ResponseEvent]) -> list[Struct]:
        numbered: list[Struct] = []
        for event in events:
            event.sequence_number = next(self._numbers)
            numbered.append(event)
        return numbered


def _usage(usage: Usage) -> ResponseUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached, usage.prompt_tokens - cached),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(0),
        total_tokens=usage.total_tokens,
    )
