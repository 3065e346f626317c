"""From text that arrives in pieces to the items of a response, and the events that tell of them.

A message or a call begins with the first piece that belongs to it and ends where the next one begins, so that items and
their contents do not depend on how the text was cut. Knows neither the response around them nor HTTP.
"""

import secrets
from collections.abc import Iterator, Sequence

import msgspec

from kvwatch_engine.server.choice import ChoiceDelta, TokenRecord
from kvwatch_engine.server.logprobs import BytesOf, chat_logprobs
from kvwatch_engine.server.protocol.chat import TokenLogprobs
from kvwatch_engine.server.protocol.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ResponseEvent,
)
from kvwatch_engine.server.protocol.responses import FunctionCall, OutputMessage, OutputText
from kvwatch_engine.server.tools.reader import CallDelta, ToolReader

CUT_SHORT = "length"
"""Why a choice ended whose tokens were used up."""


class ResponseOutput:
    """The items of one response. Event loop only."""

    def __init__(self, reader: ToolReader | None, bytes_of: BytesOf | None) -> None:
        """Begin without any.

        Args:
            reader: reads calls in the text; none where nothing may be called.
            bytes_of: gives the bytes of a token; none when no log-probabilities were asked for.
        """
        self.items: list[OutputMessage | FunctionCall] = []
        self._reader = reader
        self._bytes_of = bytes_of
        self._is_open = False
        """Whether more may come of the last item."""
        self._blank = ""
        """Blanks that belong to a message only if it says something else, too."""

    def push(self, delta: ChoiceDelta) -> list[ResponseEvent]:
        """Take what was added to the text; return what is to be told."""
        return list(self._push(delta))

    def cut_short(self) -> None:
        """Let the item that has begun be incomplete: nothing more will come of it."""
        if self._is_open:
            self._is_open = False
            self.items[-1].status = "incomplete"

    def _push(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        if self._reader is None:
            if delta.text or delta.records:
                yield from self._say(delta.text, self._logprobs(delta.records))
        else:
            parts = self._reader.push(delta.text).parts
            if delta.finish_reason is not None:
                parts += self._reader.flush().parts
            for part in parts:
                yield from self._hold_or_say(part) if isinstance(part, str) else self._call(part)
        if delta.finish_reason is not None:
            if not self.items:
                yield from self._say(self._blank, [])
            yield from self._close(is_cut=delta.finish_reason == CUT_SHORT)

    # ------------------------------------------------------------------ messages

    def _hold_or_say(self, text: str) -> Iterator[ResponseEvent]:
        """Add content beside which there may be calls: what stands around those is often nothing but blank."""
        held, self._blank = self._blank + text, ""
        if held.strip() or self._message() is not None:
            yield from self._say(held, [])
        else:
            self._blank = held

    def _say(self, text: str, logprobs: list[TokenLogprobs]) -> Iterator[ResponseEvent]:
        message = self._message()
        if message is None:
            yield from self._close()
            message = OutputMessage(id=_new_id("msg"), status="in_progress", content=[])
            yield from self._open(message)
            yield ContentPartAdded(item_id=message.id, output_index=self._place, part=OutputText(text=""))
            message.content.append(OutputText(text=""))
        [part] = message.content
        part.text += text
        part.logprobs += logprobs
        yield OutputTextDelta(item_id=message.id, output_index=self._place, delta=text, logprobs=logprobs)

    def _message(self) -> OutputMessage | None:
        """Return the message to which more may be added."""
        last = self.items[-1] if self._is_open else None
        return last if isinstance(last, OutputMessage) else None

    def _logprobs(self, records: Sequence[TokenRecord]) -> list[TokenLogprobs]:
        return [] if self._bytes_of is None else chat_logprobs(records, self._bytes_of).content

    # ------------------------------------------------------------------ calls

    def _call(self, delta: CallDelta) -> Iterator[ResponseEvent]:
        if delta.id is not None:
            self._blank = ""
            yield from self._close()
            yield from self._open(
                FunctionCall(
                    id=_new_id("fc"), call_id=delta.id, name=delta.name or "", arguments="", status="in_progress"
                )
            )
        call = self.items[-1]
        assert isinstance(call, FunctionCall), "the first delta of a call names it"
        call.arguments += delta.arguments
        yield ArgumentsDelta(item_id=call.id, output_index=self._place, delta=delta.arguments)

    # ------------------------------------------------------------------ items

    @property
    def _place(self) -> int:
        return len(self.items) - 1

    def _open(self, item: OutputMessage | FunctionCall) -> Iterator[ResponseEvent]:
        self.items.append(item)
        self._is_open = True
        yield OutputItemAdded(output_index=self._place, item=_as_it_is(item))

    def _close(self, *, is_cut: bool = False) -> Iterator[ResponseEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item, place = self.items[-1], self._place
        if isinstance(item, OutputMessage):
            item.status = "incomplete" if is_cut else "completed"
            [part] = item.content
            yield OutputTextDone(item_id=item.id, output_index=place, text=part.text, logprobs=part.logprobs)
            yield ContentPartDone(item_id=item.id, output_index=place, part=part)
        else:
            item.status = "completed" if _is_object(item.arguments) else "incomplete"
            yield ArgumentsDone(item_id=item.id, output_index=place, name=item.name, arguments=item.arguments)
        yield OutputItemDone(output_index=place, item=item)


def _as_it_is(item: OutputMessage | FunctionCall) -> OutputMessage | FunctionCall:
    """Return a copy that stays as it is now: an event is written after the next ones were made."""
    if isinstance(item, OutputMessage):
        return msgspec.structs.replace(item, content=list(item.content))
    return msgspec.structs.replace(item)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _is_object(json: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(json), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
