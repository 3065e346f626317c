"""What the run's requests would have wasted without blocks: each reserving room for its longest possible sequence."""

from collections.abc import Iterable

import msgspec

from kvwatch.bench.outcome import RequestOutcome


class ReservationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The baseline that paging is compared with, computed from the lengths and times of this run.

    A ratio is the part of the reserved slots that holds no token, slots weighted by how long they are reserved: from
    the first token to the end, while the answer grows evenly. Nothing is shared.
    """

    limit_waste_ratio: float
    """Each sequence reserves the longest that the target takes."""
    own_waste_ratio: float
    """Each sequence reserves its prompt and its `max_tokens`."""
    mean_length_tokens: float
    """Mean length of a sequence at its end, prompt and answer."""


def reservation_report(outcomes: Iterable[RequestOutcome], limit_tokens: int) -> ReservationReport | None:
    """Return the baseline over all answers that came whole and whose tokens were counted; None if there are none."""
    filled = own = at_limit = 0.0
    lengths: list[float] = []
    for outcome in outcomes:
        if outcome.status != "ok" or outcome.first_token_seconds is None or outcome.prompt_tokens is None:
            continue
        num_sequences = max(1, len(outcome.texts))
        answer = outcome.num_output_tokens / num_sequences
        slot_seconds = num_sequences * (outcome.end_seconds - outcome.first_token_seconds)
        filled += slot_seconds * (outcome.prompt_tokens + answer / 2)
        own += slot_seconds * (outcome.prompt_tokens + outcome.max_tokens)
        at_limit += slot_seconds * limit_tokens
        lengths += [outcome.prompt_tokens + answer] * num_sequences
    if not own:
        return None
    return ReservationReport(
        limit_waste_ratio=1 - filled / at_limit,
        own_waste_ratio=1 - filled / own,
        mean_length_tokens=sum(lengths) / len(lengths),
    )
