"""Log-probabilities of prompts: vLLM's `prompt_logprobs`, and what OpenAI's completions say of an echoed prompt.

The first token of a prompt follows nothing: null stands in its place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvwatch_engine.contracts.request import PromptLogprobs, TokenLogprob
from kvwatch_engine.server.detokenizer import Detokenizer
from kvwatch_engine.server.logprobs import BytesOf, finite, name_of, text_of
from kvwatch_engine.server.protocol.completions import CompletionLogprobs
from kvwatch_engine.server.protocol.reply import PromptTokenLogprob


class _Place(NamedTuple):
    """One token of a prompt."""

    token: TokenLogprob
    rank: int
    top: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class PromptForm:
    """vLLM's form."""

    num_top: int
    """Likely tokens that were asked for at each place."""
    bytes_of: BytesOf

    def of(self, scored: Sequence[PromptLogprobs]) -> list[dict[int, PromptTokenLogprob] | None]:
        """Return for each token of a prompt itself and the likely ones by their ids; itself comes first."""
        found: list[dict[int, PromptTokenLogprob] | None] = [None]
        for place in _places(scored, self.num_top):
            entries = {place.token.token_id: self._entry(place.token, place.rank)}
            for rank, likely in enumerate(place.top, 1):
                if likely.token_id not in entries:
                    entries[likely.token_id] = self._entry(likely, rank)
            found.append(entries)
        return found

    def _entry(self, entry: TokenLogprob, rank: int) -> PromptTokenLogprob:
        return PromptTokenLogprob(finite(entry.logprob), rank, text_of(self.bytes_of(entry.token_id)))


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that stands before the generated text."""

    text: str
    token_ids: Sequence[int]

    def logprobs(
        self, scored: Sequence[PromptLogprobs], num_top: int, bytes_of: BytesOf, detokenizer: Detokenizer
    ) -> CompletionLogprobs:
        """Return its log-probabilities as completions give those of generated tokens.

        Args:
            scored: of all of its tokens but the first.
            num_top: likely tokens that were asked for; with 0 there is no list of them.
            bytes_of: gives a token's bytes.
            detokenizer: a fresh one.
        """
        offsets: list[int] = []
        num_chars = 0
        for token_id in self.token_ids:
            offsets.append(min(num_chars, len(self.text)))
            num_chars += len(detokenizer.push(token_id))
        logprobs: list[float | None] = [None]
        alternatives: list[dict[str, float] | None] = [None]
        for place in _places(scored, num_top):
            logprobs.append(finite(place.token.logprob))
            likely: dict[str, float] = {}
            for entry in (*place.top, place.token):
                likely.setdefault(name_of(entry, bytes_of), finite(entry.logprob))
            alternatives.append(likely)
        return CompletionLogprobs(
            tokens=[name_of(TokenLogprob(token_id, 0.0), bytes_of) for token_id in self.token_ids],
            token_logprobs=logprobs,
            top_logprobs=alternatives if num_top else None,
            text_offset=offsets,
        )


def _places(scored: Sequence[PromptLogprobs], num_top: int) -> Iterator[_Place]:
    for part in scored:
        columns = (part.token_ids, part.logprobs, part.ranks, part.top_token_ids, part.top_logprobs)
        for token_id, logprob, rank, top_ids, top in zip(*(column.tolist() for column in columns), strict=True):
            likely = [TokenLogprob(*entry) for entry in zip(top_ids[:num_top], top[:num_top], strict=True)]
            yield _Place(TokenLogprob(token_id, logprob), rank, likely)
