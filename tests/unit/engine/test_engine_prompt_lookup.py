"""Drafts are what followed the longest earlier match of a text's end."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch_engine.scheduling.prompt_lookup import MAX_SEARCHED_TOKENS, TokenHistory, find_draft


def naive_draft(tokens: Sequence[int], max_tokens: int, min_ngram: int, max_ngram: int) -> tuple[int, ...]:
    """Look at every place and every length, one by one."""
    for length in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        ends = [
            end for end in range(length - 1, len(tokens) - 1)
            if tokens[end - length + 1 : end + 1] == tokens[len(tokens) - length :]
        ]  # fmt: skip
        if ends:
            followed = [end for end in ends if end + max_tokens < len(tokens)]
            end = followed[-1] if followed else ends[0]
            return tuple(tokens[end + 1 : end + 1 + max_tokens])
    return ()


@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    max_tokens=st.integers(1, 6),
    min_ngram=st.integers(1, 4),
    further=st.integers(0, 4),
)
def test_a_draft_is_what_a_search_place_by_place_finds(
    tokens: list[int], max_tokens: int, min_ngram: int, further: int
) -> None:
    found = find_draft(np.array(tokens, dtype=np.int32), max_tokens, min_ngram, min_ngram + further)

    assert found == naive_draft(tokens, max_tokens, min_ngram, min_ngram + further)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 9, 1, 2], (3, 9, 1)),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (4, 9, 1)),  # the later of two equal matches
        ([5, 1, 2, 3, 9, 1, 2, 4, 9, 5, 1, 2], (3, 9, 1)),  # the longer of two
        ([1, 2, 1, 2, 1, 2, 1, 2], (1, 2, 1)),  # the last that enough follows
        ([7, 7, 7], (7,)),
        ([1, 2, 3, 4, 3], ()),  # one token is no match
        ([1, 2], ()),
    ],
)
def test_examples(tokens: list[int], draft: tuple[int, ...]) -> None:
    assert find_draft(np.array(tokens, dtype=np.int32), 3, 2, 4) == draft


@given(parts=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=300), max_size=6))
def test_a_history_holds_all_tokens_however_they_came(parts: list[list[int]]) -> None:
    history = TokenHistory(parts[0] if parts else [])
    for part in parts[1:]:
        history.extend(part)

    expected = [token for part in parts for token in part]
    assert len(history) == len(expected)
    assert history.newest().tolist() == expected


def test_only_the_newest_tokens_are_searched() -> None:
    history = TokenHistory([1, 2, 3, *range(10, 10 + MAX_SEARCHED_TOKENS), 1, 2])

    assert len(history.newest()) == MAX_SEARCHED_TOKENS
    assert find_draft(history.newest(), 3, 2, 4) == ()
