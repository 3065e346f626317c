"""What the endpoint asks of an API's shape, and the plan that a body becomes."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.server.choice import ChoiceDelta
from kvwatch_engine.server.errors import GenerationFailed
from kvwatch_engine.server.events import TextEvent
from kvwatch_engine.server.generation import Job
from kvwatch_engine.server.protocol.reply import Error, ErrorBody, Usage
from kvwatch_engine.server.protocol.request import GenerationFields


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every body and every chunk of one answer repeats."""

    id: str
    model: str
    fingerprint: str
    """Equal seeds give equal texts while it stays the same."""
    include_usage: bool
    """Whether a stream shall end with its usage."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""

    @property
    def chunk_usage(self) -> UnsetType | None:
        """`usage` of all chunks but the last: null if there will be one, else absent."""
        return None if self.include_usage else UNSET


class Shape(Protocol):
    """Writes generated text in the form of one API."""

    @property
    def mark_of_end(self) -> bytes:
        """What a stream ends with, after its last event."""
        ...

    def begin(self) -> list[Struct]:
        """Return the events of a stream that come before anything was generated."""
        ...

    def chunks(self, delta: ChoiceDelta) -> list[Struct]:
        """Return the events of a stream that tell `delta`."""
        ...

    def text_event(self, delta: ChoiceDelta) -> bytes | None:
        """Return the event that tells `delta`, if that is one of text alone; otherwise none: ask for `chunks`.

        What almost every token of every stream becomes, and much cheaper than they are.
        """
        ...

    def end(self, usage: Usage) -> list[Struct]:
        """Return the last events of a stream that is complete."""
        ...

    def failed(self, error: GenerationFailed, usage: Usage) -> list[Struct]:
        """Return the last events of a stream that the engine could not complete."""
        ...

    def answer(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Struct:
        """Return the whole answer; `choices` are complete and in order."""
        ...


class ChunkShape(ABC):
    """What the streams of chats and completions have in common: equal chunks, then `[DONE]`."""

    mark_of_end = b"data: [DONE]\n\n"

    def __init__(self, head: Head) -> None:
        """Create the shape of one answer; `head` is what every chunk repeats."""
        self.head = head
        self._text_events: dict[int, TextEvent] = {}

    @abstractmethod
    def text_chunk(self, index: int) -> tuple[Struct, str] | None:
        """Return the chunk that adds an empty text to a choice, and the name of the field that holds the text.

        None where chunks of further text hold more than that text.
        """

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Struct:
        """Return the chunk without choices that carries the usage."""

    def begin(self) -> list[Struct]:
        """See `Shape.begin`."""
        return []

    def text_event(self, delta: ChoiceDelta) -> bytes | None:
        """See `Shape.text_event`."""
        if delta.is_first or delta.finish_reason is not None or not delta.text:
            return None
        written = self._text_events.get(delta.index)
        if written is None:
            found = self.text_chunk(delta.index)
            if found is None:
                return None
            written = self._text_events[delta.index] = TextEvent(*found)
        return written.of(delta.text)

    def end(self, usage: Usage) -> list[Struct]:
        """See `Shape.end`."""
        return [self.usage_chunk(usage)] if self.head.include_usage else []

    def failed(self, error: GenerationFailed, _usage: Usage) -> list[Struct]:
        """Return an event that OpenAI's client raises as `APIError`."""
        return [ErrorBody(Error(str(error), error.type, None, error.code))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request that was found valid: what to generate, and how to tell it."""

    job: Job
    shape: Shape
    is_stream: bool


def wants_usage(request: GenerationFields) -> bool:
    """Return whether a stream shall end with its usage.

    Raises:
        RequestInvalid: `stream_options` without `stream`.
    """
    if request.stream_options is not None and not request.stream:
        raise RequestInvalid("stream_options is only allowed when stream is true", param="stream_options")
    return request.stream_options is not None and bool(request.stream_options.include_usage)
