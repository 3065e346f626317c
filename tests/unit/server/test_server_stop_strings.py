from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from kvwatch_engine.server.stop_strings import StopMatcher, StopStrings

texts = st.text(alphabet="abc😀", max_size=40)
stops = st.lists(st.text(alphabet="abc😀", min_size=1, max_size=6), max_size=4)


def cut(text: str, stops: list[str], first_end: int = 0) -> str:
    """The truth: look at every prefix in turn, end before the first stop string that completes."""
    for end in range(first_end + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def run(pieces: list[str], stops: list[str]) -> str:
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.is_stopped:
            return shown
    return shown + matcher.flush()


@given(texts, stops, st.lists(st.integers(0, 40), max_size=12))
@example("abcabcabd", ["abcabd"], [3, 6])  # falls back to a shorter border
@example("abcd", ["abcd", "bc"], [])
@example("aaab", ["aab"], [1, 2, 3])
@example("ab", ["b", "ab"], [])
def test_any_split_of_a_text_ends_before_the_first_complete_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    assert run(split(text, cuts), stops) == cut(text, stops)


@given(texts, stops, st.lists(st.integers(0, 40), max_size=12))
def test_text_is_shown_as_soon_as_it_cannot_belong_to_a_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    so_far = ""
    for piece in split(text, cuts):
        so_far += piece
        shown += matcher.push(piece)
        if matcher.is_stopped:
            return
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((len(begin) for begin in beginnings if so_far.endswith(begin)), default=0)
        assert shown == so_far[: len(so_far) - held]


def test_a_stop_string_across_three_pieces_is_not_shown_even_in_part() -> None:
    matcher = StopMatcher(StopStrings(["</answer>"]))

    shown = [matcher.push(piece) for piece in ["42</", "answ", "er> and more"]]

    assert shown == ["42", "", ""]
    assert matcher.is_stopped


def test_what_only_began_like_a_stop_string_is_shown_at_the_end() -> None:
    matcher = StopMatcher(StopStrings(["</answer>"]))

    assert matcher.push("42</answ") == "42"
    assert matcher.flush() == "</answ"
    assert not matcher.is_stopped


def test_a_stop_string_that_may_not_stop_yet_is_shown_and_a_later_one_stops() -> None:
    matcher = StopMatcher(StopStrings(["END"]))

    shown = matcher.push("a END b", may_stop=False) + matcher.push(" c EN") + matcher.push("D d")

    assert shown == "a END b c "
    assert matcher.is_stopped
