import math

from kvwatch_engine.contracts.request import PositionLogprobs, TokenLogprob
from kvwatch_engine.server.choice import TokenRecord
from kvwatch_engine.server.logprobs import chat_logprobs, completion_logprobs

BYTES = {1: b"a", 2: " größer".encode(), 3: b"\xf0\x9f", 4: b"\xf0\x98", 5: b"\\xf0\\x9f", 6: b""}


def bytes_of(token_id: int) -> bytes:
    return BYTES[token_id]


def record(chosen: int, *top: int, offset: int = 0, logprob: float = -0.5) -> TokenRecord:
    likely = tuple(TokenLogprob(token, -0.25 * place) for place, token in enumerate(top))
    return TokenRecord(PositionLogprobs(TokenLogprob(chosen, logprob), likely), offset)


def test_chat_gives_text_bytes_and_alternatives_of_each_token() -> None:
    [entry] = chat_logprobs([record(2, 1, 2)], bytes_of).content

    assert (entry.token, entry.logprob, bytes(entry.bytes)) == (" größer", -0.5, " größer".encode())
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("a", 0), (" größer", -0.25)]


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    [entry] = chat_logprobs([record(3)], bytes_of).content

    assert entry.token == "\\xf0\\x9f"
    assert bytes(entry.bytes) == b"\xf0\x9f"


def test_completions_keep_different_parts_of_characters_apart() -> None:
    found = completion_logprobs([record(3, 3, 4, 5)], bytes_of, has_top=True)

    assert found.tokens == ["bytes:\\xf0\\x9f"]
    assert found.top_logprobs == [{"bytes:\\xf0\\x9f": 0, "bytes:\\xf0\\x98": -0.25, "\\xf0\\x9f": -0.5}]


def test_completions_give_the_chosen_token_beside_the_likely_ones() -> None:
    found = completion_logprobs([record(1, 2, offset=7)], bytes_of, has_top=True)

    assert found.top_logprobs == [{" größer": 0, "a": -0.5}]
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["a"], [-0.5], [7])


def test_without_alternatives_there_are_none() -> None:
    assert completion_logprobs([record(1)], bytes_of, has_top=False).top_logprobs is None


def test_an_impossible_token_has_a_finite_log_probability() -> None:
    [entry] = chat_logprobs([record(1, logprob=-math.inf)], bytes_of).content

    assert entry.logprob == -9999.0
