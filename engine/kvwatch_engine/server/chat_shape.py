"""The shape of chat completions and of their chunks."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from kvwatch_engine.server.choice import ChoiceDelta, TokenRecord
from kvwatch_engine.server.logprobs import BytesOf, chat_logprobs
from kvwatch_engine.server.prompt_logprobs import PromptForm
from kvwatch_engine.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from kvwatch_engine.server.protocol.reply import Usage
from kvwatch_engine.server.shapes import ChunkShape, Head


class ChatShape(ChunkShape):
    """Chat completions and their chunks."""

    def __init__(self, head: Head, bytes_of: BytesOf | None, prompt_form: PromptForm | None = None) -> None:
        """Create the shape of one answer.

        Args:
            head: what every chunk repeats.
            bytes_of: gives the bytes of a token; none when no log-probabilities were asked for.
            prompt_form: how those of the prompt are told; none when they were not asked for.
        """
        super().__init__(head)
        self._bytes_of = bytes_of
        self._prompt_form = prompt_form

    def chunks(self, delta: ChoiceDelta) -> list[Struct]:
        """Return the role before the first text, the text, and the reason after the last."""
        choices: list[ChunkChoice] = []
        if delta.is_first:
            choices.append(ChunkChoice(delta.index, Delta(role="assistant", content="")))
        choices += self.deltas(delta)
        if delta.finish_reason is not None:
            choices.append(ChunkChoice(delta.index, Delta(), None, self.finish_reason(delta), _score(delta)))
        return [self._chunk([choice]) for choice in choices]

    def text_chunk(self, index: int) -> tuple[Struct, str] | None:
        """See `ChunkShape.text_chunk`."""
        if self._bytes_of is not None:
            return None
        return self._chunk([ChunkChoice(index, Delta(content=""))]), "content"

    def deltas(self, delta: ChoiceDelta) -> list[ChunkChoice]:
        """Return what is told of the text that was added."""
        if not delta.text and not delta.records:
            return []
        return [ChunkChoice(delta.index, Delta(content=delta.text), self.logprobs(delta.records))]

    def finish_reason(self, delta: ChoiceDelta) -> str:
        """Return why a choice ended, which `delta` says, once its text was told."""
        return delta.finish_reason or "stop"

    def message(self, choice: ChoiceDelta) -> AnswerMessage:
        """Return a whole text as a message."""
        return AnswerMessage(choice.text)

    def usage_chunk(self, usage: Usage) -> Struct:
        """See `ChunkShape.usage_chunk`."""
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def answer(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Struct:
        """Return the whole completion."""
        return ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=[
                ChatChoice(
                    choice.index,
                    self.message(choice),
                    self.logprobs(choice.records),
                    self.finish_reason(choice),
                    _score(choice),
                )
                for choice in choices
            ],
            usage=usage,
            prompt_logprobs=UNSET if self._prompt_form is None else self._prompt_form.of(choices[0].prompt),
        )

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=choices,
            usage=self.head.chunk_usage,
        )

    def logprobs(self, records: Sequence[TokenRecord]) -> ChatLogprobs | None:
        """Return log-probabilities, if they were asked for."""
        return None if self._bytes_of is None else chat_logprobs(records, self._bytes_of)


def _score(delta: ChoiceDelta) -> float | UnsetType:
    return UNSET if delta.score is None else delta.score
