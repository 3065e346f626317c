"""Chat completions in which functions may be called: what the model writes becomes `tool_calls`."""

from collections.abc import Callable, Sequence

from kvwatch_engine.server.chat_shape import ChatShape
from kvwatch_engine.server.choice import ChoiceDelta, TokenRecord
from kvwatch_engine.server.logprobs import BytesOf
from kvwatch_engine.server.prompt_logprobs import PromptForm
from kvwatch_engine.server.protocol.chat import AnswerMessage, ChunkChoice, Delta
from kvwatch_engine.server.protocol.tools import CalledFunction, FunctionDelta, ToolCall, ToolCallDelta
from kvwatch_engine.server.shapes import Head
from kvwatch_engine.server.tools.reader import CallDelta, Read, ToolReader

TOOL_CALLS = "tool_calls"


class ToolShape(ChatShape):
    """Chat completions with calls in them."""

    def __init__(
        self,
        head: Head,
        bytes_of: BytesOf | None,
        make_reader: Callable[[], ToolReader],
        prompt_form: PromptForm | None = None,
    ) -> None:
        """Create the shape of one answer; `make_reader` begins with a text, the other arguments are `ChatShape`'s."""
        super().__init__(head, bytes_of, prompt_form)
        self._make_reader = make_reader
        self._readers: dict[int, ToolReader] = {}
        self._records: dict[int, tuple[TokenRecord, ...]] = {}
        """Log-probabilities of tokens whose text is not certain yet."""

    def text_chunk(self, _index: int) -> None:
        """See `ChunkShape.text_chunk`: a text may become a call."""

    def deltas(self, delta: ChoiceDelta) -> list[ChunkChoice]:
        """See `ChatShape.deltas`."""
        index = delta.index
        reader = self._readers.setdefault(index, self._make_reader())
        read = reader.push(delta.text)
        if delta.finish_reason is not None:
            read = Read(read.parts + reader.flush().parts)
        records = self._records.pop(index, ()) + delta.records
        added = [Delta(content=read.content)] if read.content else []
        added += [Delta(tool_calls=[_call_delta(call)]) for call in read.calls]
        if not added and records and delta.finish_reason is not None:
            added = [Delta(content="")]
        if not added:
            self._records[index] = records
            return []
        first, *others = added
        return [ChunkChoice(index, first, self.logprobs(records)), *(ChunkChoice(index, each) for each in others)]

    def finish_reason(self, delta: ChoiceDelta) -> str:
        """See `ChatShape.finish_reason`."""
        reason = super().finish_reason(delta)
        reader = self._readers.get(delta.index)
        return TOOL_CALLS if reason == "stop" and reader is not None and reader.num_calls else reason

    def message(self, choice: ChoiceDelta) -> AnswerMessage:
        """See `ChatShape.message`."""
        reader = self._readers[choice.index] = self._make_reader()
        read = Read(reader.push(choice.text).parts + reader.flush().parts)
        content, calls = read.content, _joined(read.calls)
        if not calls:
            return AnswerMessage(content)
        return AnswerMessage(content if content.strip() else None, tool_calls=calls)


def _call_delta(call: CallDelta) -> ToolCallDelta:
    function = FunctionDelta(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, type="function" if call.id else None, function=function)


def _joined(deltas: Sequence[CallDelta]) -> list[ToolCall]:
    """Return whole calls."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None:
            calls.append(ToolCall(id=delta.id, function=CalledFunction(delta.name or "", "")))
        calls[-1].function.arguments += delta.arguments
    return calls
