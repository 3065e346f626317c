"""Which turns go: as few as possible, and only so that what is left makes sense."""

from hypothesis import given
from hypothesis import strategies as st

from kvwatch_engine.server.conversation import TextPart, Turn
from kvwatch_engine.server.truncation import first_that_fits

ROLES = st.sampled_from(["user", "assistant", "tool", "system"])
TURNS = st.lists(st.tuples(ROLES, st.integers(0, 12)), max_size=30)


def made(described: list[tuple[str, int]]) -> list[Turn]:
    return [Turn(role, (TextPart("x" * length, ""),)) for role, length in described]


@given(TURNS, st.integers(0, 150), st.integers(0, 3))
def test_as_few_turns_go_as_possible(described: list[tuple[str, int]], limit: int, around: int) -> None:
    turns = made(described)

    def fits(num_dropped: int) -> bool:
        left = turns[num_dropped:]
        return sum(turn.num_chars + around for turn in left) <= limit

    found = first_that_fits(turns, lambda turn: turn.num_chars, limit, fits)

    may_begin = [place for place, turn in enumerate(turns) if place == 0 or turn.role in ("user", "system")]
    assert found == next((place for place in may_begin if fits(place)), None)


def test_a_long_history_costs_no_more_than_what_can_fit() -> None:
    turns = made([("user", 10)] * 100_000)
    counted, rendered = [], []

    def num_tokens(turn: Turn) -> int:
        counted.append(turn)
        return turn.num_chars

    def fits(num_dropped: int) -> bool:
        rendered.append(num_dropped)
        return (len(turns) - num_dropped) * 12 <= 1200

    assert first_that_fits(turns, num_tokens, 1200, fits) == len(turns) - 100
    assert len(counted) <= 130
    assert len(rendered) <= 10
