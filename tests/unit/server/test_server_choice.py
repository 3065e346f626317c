"""A choice turns outputs of the engine into text, whatever the steps were."""

from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from openai_server import TEXTS, byte_level_tokenizer, save_tokenizer

from kvwatch_engine.contracts.request import FinishReason, PositionLogprobs, SequenceOutput, TokenLogprob
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.server.choice import Choice, ChoiceDelta
from kvwatch_engine.server.stop_strings import StopMatcher, StopStrings
from kvwatch_engine.server.tokenizer import Tokenizer

END_TOKEN = 3


@cache
def tokenizer() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(save_tokenizer(Path(folder), byte_level_tokenizer()))


def make_choice(stops: list[str], **sampling: int) -> Choice:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Choice(0, tokenizer().detokenizer(), StopMatcher(StopStrings(stops)), params, {END_TOKEN})


def outputs(steps: list[list[int]], reason: FinishReason = FinishReason.LENGTH) -> list[SequenceOutput]:
    """Give each step's tokens; the last step ends the sequence."""
    return [
        SequenceOutput(
            request_id="r",
            sequence=0,
            token_ids=tuple(step),
            logprobs=tuple(PositionLogprobs(TokenLogprob(token, -1.0), ()) for token in step),
            finish_reason=reason if place == len(steps) - 1 else None,
        )
        for place, step in enumerate(steps)
    ]


def run(choice: Choice, outputs: list[SequenceOutput]) -> list[ChoiceDelta]:
    return [delta for output in outputs if (delta := choice.add(output)) is not None]


def text_of(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def group(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    steps, rest = [], list(token_ids)
    for size in sizes:
        steps.append(rest[:size])
        rest = rest[size:]
    return [*steps, rest]


def cut(text: str, stops: list[str]) -> str:
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, minus_length = min(ends)
    return text[: end + minus_length]


token_lists = st.lists(st.integers(4, 400), max_size=30) | st.sampled_from(TEXTS).map(
    lambda text: list(tokenizer().encode(text, add_special_tokens=False))
)


@given(token_lists, st.lists(st.integers(0, 5), max_size=10), st.data())
@settings(max_examples=300)
def test_any_split_into_steps_gives_the_full_decoding_cut_at_the_stop_string(
    token_ids: list[int], sizes: list[int], data: st.DataObject
) -> None:
    full = tokenizer().decode(token_ids)
    part = st.integers(0, max(0, len(full) - 1)).map(lambda begin: full[begin : begin + 3] or "x")
    stops = data.draw(st.lists(part | st.text("abe \ufffd", min_size=1, max_size=3), max_size=3))
    choice = make_choice(stops, max_tokens=100)

    deltas = run(choice, outputs(group(token_ids, sizes)))

    assert text_of(deltas) == cut(full, stops)
    assert choice.finish_reason == ("stop" if any(stop in full for stop in stops) else "length")
    assert [delta.is_first for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert sum(len(delta.records) for delta in deltas) == choice.num_tokens <= len(token_ids)


def test_only_tokens_up_to_the_stop_string_count() -> None:
    token_ids = [*tokenizer().encode("one two three", add_special_tokens=False)]
    choice = make_choice(["two"], max_tokens=100)

    deltas = run(choice, outputs([[token] for token in token_ids]))

    assert text_of(deltas) == "one "
    assert "two" in tokenizer().decode(token_ids[: choice.num_tokens])
    assert "two" not in tokenizer().decode(token_ids[: choice.num_tokens - 1])
    assert choice.is_stopped_by_string


def test_an_end_token_has_no_text_even_if_it_is_an_ordinary_word() -> None:
    [word] = tokenizer().encode("größer", add_special_tokens=False)
    choice = Choice(0, tokenizer().detokenizer(), StopMatcher(StopStrings([])), SamplingParams(max_tokens=9), {word})

    deltas = run(choice, outputs([[*tokenizer().encode("a", add_special_tokens=False)], [word]], FinishReason.STOP))

    assert text_of(deltas) == "a"
    assert choice.num_tokens == 2
    assert choice.finish_reason == "stop"


def test_a_stop_string_within_min_tokens_does_not_stop() -> None:
    token_ids = list(tokenizer().encode("0 1 2 3 4 5 0 1 2", add_special_tokens=False))
    choice = make_choice([" 1"], max_tokens=100, min_tokens=len(token_ids) // 2)

    deltas = run(choice, outputs([[token] for token in token_ids]))

    assert text_of(deltas) == "0 1 2 3 4 5 0"


def test_what_comes_after_the_end_is_ignored() -> None:
    choice = make_choice(["b"], max_tokens=100)
    steps = outputs([list(tokenizer().encode(text, add_special_tokens=False)) for text in ("ab", "cd", "e")])

    deltas = run(choice, steps)

    assert text_of(deltas) == "a"
    assert len(deltas) == 1


def test_a_sequence_that_ends_without_text_still_says_why() -> None:
    choice = make_choice([], max_tokens=100)

    [delta] = run(choice, outputs([[END_TOKEN]], FinishReason.STOP))

    assert (delta.text, delta.finish_reason, delta.is_first) == ("", "stop", True)
    assert choice.num_tokens == 1


def test_text_offsets_name_the_place_of_each_token_in_the_text() -> None:
    text = TEXTS[0]
    token_ids = list(tokenizer().encode(text, add_special_tokens=False))
    choice = make_choice([], max_tokens=100)

    records = [record for delta in run(choice, outputs([token_ids])) for record in delta.records]

    for record, token_id in zip(records, token_ids, strict=True):
        word = tokenizer().token_bytes(token_id).decode()
        assert text[record.text_offset :].startswith(word)


def test_a_stop_string_that_the_last_flush_completes_counts() -> None:
    token_ids = list(tokenizer().encode("a 😀", add_special_tokens=False))[:-1]  # the last character is incomplete
    choice = make_choice(["\ufffd"], max_tokens=100)

    deltas = run(choice, outputs([token_ids]))

    assert text_of(deltas) == "a "
    assert choice.finish_reason == "stop"
