"""Server-sent events are lines for every client, and those of text alone are what their chunks would be."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_server import byte_level_tokenizer, make_model_info, save_tokenizer

from kvwatch_engine.contracts.request import PositionLogprobs, TokenLogprob
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.server.chat_shape import ChatShape
from kvwatch_engine.server.choice import ChoiceDelta, TokenRecord
from kvwatch_engine.server.completions import CompletionShape
from kvwatch_engine.server.events import TextEvent, event, joined
from kvwatch_engine.server.shapes import Head
from kvwatch_engine.server.tokenizer import Tokenizer

ODD = "".join(map(chr, range(0x0250))) + "\u2027\u2028\u2029\u202a\U0001f98a"
NAMES = st.sampled_from(["m", 'of "text":"" and {"content":""}', '"', "\\", ODD]) | st.text(max_size=20)
TEXTS = st.text(min_size=1) | st.sampled_from([ODD, '"text":""', " word", "\x85", "\u2028"])


class Chunk(msgspec.Struct):
    text: str


def test_an_event_is_one_line_whatever_its_text_holds() -> None:
    sent = event(Chunk(ODD)).decode()

    line, *rest = sent.splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": ODD}


@given(text=TEXTS)
def test_an_event_written_around_a_text_is_that_of_the_chunk_with_it(text: str) -> None:
    assert TextEvent(Chunk(""), "text").of(text) == event(Chunk(text))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.of_model(make_model_info(save_tokenizer(folder, byte_level_tokenizer()), 401))


def shapes(head: Head, tokenizer: Tokenizer) -> list[ChatShape | CompletionShape]:
    return [ChatShape(head, None), CompletionShape(head, SamplingParams(max_tokens=1, n=3), tokenizer)]


@given(name=NAMES, text=TEXTS, index=st.integers(0, 2), wants_usage=st.booleans())
def test_an_event_of_text_alone_is_byte_for_byte_that_of_its_chunks(
    tokenizer: Tokenizer, name: str, text: str, index: int, wants_usage: bool
) -> None:
    head = Head(id=f"cmpl-{name}", model=name, fingerprint=name, include_usage=wants_usage)
    for shape in shapes(head, tokenizer):
        for each in (text, "b", text):  # the first one makes the form that the others fill in
            delta = ChoiceDelta(index, each, (), None, is_first=False)
            assert shape.text_event(delta) == joined(shape.chunks(delta))


def test_what_is_more_than_text_has_no_event_of_text_alone(tokenizer: Tokenizer) -> None:
    head = Head(id="i", model="m", fingerprint="f", include_usage=False)
    plain = ChoiceDelta(0, "a", (), None, is_first=False)
    more = [
        msgspec.structs.replace(plain, is_first=True),
        msgspec.structs.replace(plain, finish_reason="stop"),
        msgspec.structs.replace(plain, text=""),
    ]
    for shape in shapes(head, tokenizer):
        assert [shape.text_event(delta) for delta in more] == [None] * 3

    record = TokenRecord(PositionLogprobs(TokenLogprob(5, -0.5), ()), 0)
    scored = msgspec.structs.replace(plain, records=(record,))
    with_logprobs: list[ChatShape | CompletionShape] = [
        ChatShape(head, tokenizer.token_bytes),
        CompletionShape(head, SamplingParams(max_tokens=1, logprobs=0), tokenizer),
    ]
    assert [shape.text_event(delta) for shape in with_logprobs for delta in (plain, scored)] == [None] * 4
