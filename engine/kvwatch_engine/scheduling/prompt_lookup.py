"""Finds drafts by prompt lookup: what followed when the sequence's last tokens occurred in it before. Pure.

Copying is what language models often do: code that is edited, quotations, names, lists. No second model is needed, and
a wrong draft costs a few more tokens in a step. Knows nothing of requests, blocks and steps.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvwatch_engine.contracts.step import Int32Array

MAX_SEARCHED_TOKENS: Final = 16_384
"""Newest tokens of a sequence that are searched: a bound on the time of a search, some 10 us."""

_FIRST_CAPACITY: Final = 256


class TokenHistory:
    """The tokens of one sequence as an array that grows with it."""

    __slots__ = ("_num_tokens", "_tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Begin with these tokens."""
        self._tokens: Int32Array = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._num_tokens = 0
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that have come since then."""
        start, end = self._num_tokens, self._num_tokens + len(token_ids)
        if end > len(self._tokens):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start:end] = token_ids
        self._num_tokens = end

    def newest(self) -> Int32Array:
        """Return i32[at most MAX_SEARCHED_TOKENS]: the newest tokens. Not to be written."""
        return self._tokens[max(0, self._num_tokens - MAX_SEARCHED_TOKENS) : self._num_tokens]


def find_draft(tokens: Int32Array, max_tokens: int, min_ngram: int, max_ngram: int) -> tuple[int, ...]:
    """Return what the tokens may go on with, as they did after the longest earlier match of their end.

    Of several places the last is taken that `max_tokens` tokens follow; if there is none, the first, which most follow.
    All work is done by array operations over the tokens.

    Args:
        tokens: i32[num_tokens].
        max_tokens: most tokens of the draft.
        min_ngram: tokens at the end that must match, at least 1.
        max_ngram: most tokens that are compared.

    Returns:
        1 to `max_tokens` tokens; none when nothing matches.
    """
    last = len(tokens) - 1
    if last < min_ngram or max_tokens < 1:
        return ()
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # where a match of one token ends
    for length in range(2, min(max_ngram, last) + 1):
        longer = ends[ends >= length - 1]
        longer = longer[tokens[longer - (length - 1)] == tokens[last - (length - 1)]]
        if not len(longer):
            if length <= min_ngram:
                return ()
            break
        ends = longer
    if not len(ends):
        return ()
    followed = ends[ends + max_tokens <= last]
    end = int(followed[-1] if len(followed) else ends[0])
    draft: list[int] = tokens[end + 1 : end + 1 + max_tokens].tolist()
    return tuple(draft)
