"""Which of the oldest turns of a conversation must go so that the rest fits. Pure."""

from collections.abc import Callable, Sequence

from kvwatch_engine.server.conversation import Turn

_BEGINNINGS = ("user", "system")
"""Roles with which what is left may begin: an answer or a result without what it answers makes no sense, and many
templates refuse it."""


def first_that_fits(
    turns: Sequence[Turn], num_tokens: Callable[[Turn], int], limit: int, fits: Callable[[int], bool]
) -> int | None:
    """Return how many of the oldest turns must go, as few as possible; None if no rest fits that may stand alone.

    Looks at no more turns than can fit by their own tokens, and asks `fits` a logarithmic number of times.

    Args:
        turns: the conversation, the oldest first.
        num_tokens: gives the tokens of a turn alone, which are not more than it adds to a prompt.
        limit: most tokens of a prompt.
        fits: whether the prompt fits without so many of the oldest turns.
    """
    begin, room = len(turns), limit
    while begin > 0 and room >= 0:
        begin -= 1
        room -= num_tokens(turns[begin])
    cuts = [place for place in range(begin, len(turns)) if place == 0 or turns[place].role in _BEGINNINGS]
    if cuts and fits(cuts[0]):
        return cuts[0]
    low, high = 1, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if fits(cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return cuts[low] if low < len(cuts) else None
