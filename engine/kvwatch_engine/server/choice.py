"""One choice of an answer: the text, log-probabilities and end of one sequence of the engine."""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from kvwatch_engine.contracts.request import FinishReason, PositionLogprobs, PromptLogprobs, SequenceOutput
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.server.detokenizer import Detokenizer
from kvwatch_engine.server.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Log-probabilities of one generated token, and how many characters of the choice were complete before it."""

    position: PositionLogprobs
    text_offset: int


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """What was added to a choice."""

    index: int
    text: str
    records: tuple[TokenRecord, ...]
    finish_reason: str | None
    is_first: bool
    score: float | None = None
    """Of a whole sequence that a beam search found."""
    prompt: tuple[PromptLogprobs, ...] = ()
    """Log-probabilities of its prompt, if they were asked for and it is the choice's first."""


class Choice:
    """Turns the outputs of one sequence into text. Event loop only.

    Text, and with it the log-probabilities, may be held back: because a character is incomplete, or because it may be
    the beginning of a stop string.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        matcher: StopMatcher,
        sampling: SamplingParams,
        end_token_ids: Collection[int],
    ) -> None:
        """Begin a choice.

        Args:
            index: its place in the answer.
            detokenizer: a fresh one.
            matcher: a fresh one.
            sampling: the request's parameters.
            end_token_ids: tokens that end a sequence; the last token has no text if it is one and the reason is `stop`.
        """
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = sampling.min_tokens
        self._end_token_ids = end_token_ids
        self._num_chars = 0
        self._records: list[TokenRecord] = []
        self._is_first = True

    @property
    def is_stopped_by_string(self) -> bool:
        """Whether a stop string ended it, which the engine does not know by itself."""
        return self._matcher.is_stopped

    def add(self, output: SequenceOutput) -> ChoiceDelta | None:
        """Add what a step brought; return what can be shown of it, None when there is nothing yet."""
        if self.finish_reason is not None:
            return None  # steps that were under way when a stop string was found
        text = self._add_tokens(output)
        if self._matcher.is_stopped:
            self.finish_reason = FinishReason.STOP.value
        elif output.finish_reason is not None:
            text += self._end(output.finish_reason)
        if not text and self.finish_reason is None:
            return None
        records, self._records = tuple(self._records), []
        is_first, self._is_first = self._is_first, False
        return ChoiceDelta(self.index, text, records, self.finish_reason, is_first, output.score)

    def _add_tokens(self, output: SequenceOutput) -> str:
        shown = ""
        has_stopped = output.finish_reason is FinishReason.STOP
        last = len(output.token_ids) - 1
        for place, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.logprobs:
                self._records.append(TokenRecord(output.logprobs[place], self._num_chars))
            if has_stopped and place == last and token_id in self._end_token_ids:
                break  # it ended the text and is not part of it
            text = self._detokenizer.push(token_id)
            self._num_chars += len(text)
            shown += self._matcher.push(text, may_stop=self.num_tokens >= self._min_tokens)
            if self._matcher.is_stopped:
                break
        return shown

    def _end(self, reason: FinishReason) -> str:
        rest = self._matcher.push(self._detokenizer.flush())
        if self._matcher.is_stopped:
            self.finish_reason = FinishReason.STOP.value
            return rest
        self.finish_reason = reason.value
        return rest + self._matcher.flush()


class PromptOnlyChoice(Choice):
    """A choice that is nothing but its echoed prompt: what is generated does not count."""

    def add(self, output: SequenceOutput) -> ChoiceDelta | None:
        """See `Choice.add`."""
        if self.finish_reason is not None or output.finish_reason is None:
            return None
        self.finish_reason = FinishReason.LENGTH.value
        return ChoiceDelta(self.index, "", (), self.finish_reason, is_first=True)
