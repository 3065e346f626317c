from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_server import TEXTS, byte_fallback_tokenizer, byte_level_tokenizer, save_tokenizer
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.server.chat_template import ChatMessage, ChatTemplate
from kvwatch_engine.server.detokenizer import ByteLevelDetokenizer, WindowDetokenizer
from kvwatch_engine.server.tokenizer import Tokenizer

KINDS = {"byte_level": byte_level_tokenizer, "byte_fallback": byte_fallback_tokenizer}


class NoTemplate:
    """A tokenizer without a chat template."""

    chat_template = None

    def apply_chat_template(self, conversation: list[ChatMessage], **options: object) -> str:
        raise NotImplementedError


@cache
def rust(kind: str) -> RustTokenizer:
    return KINDS[kind]()


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(rust(kind), ChatTemplate(NoTemplate()))


def pieces(kind: str, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer(kind).detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@given(data=st.data())
@settings(max_examples=300)
def test_pieces_joined_are_the_decoding_of_all_tokens_whatever_the_tokens(kind: str, data: st.DataObject) -> None:
    size = rust(kind).get_vocab_size()
    token_ids = data.draw(st.lists(st.integers(0, size + 3), max_size=40))  # also ids outside the vocabulary

    assert "".join(pieces(kind, token_ids)) == rust(kind).decode(token_ids, skip_special_tokens=True)


@kinds
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_no_piece_of_a_valid_text_breaks_a_character(kind: str, text: str) -> None:
    token_ids = rust(kind).encode(text, add_special_tokens=False).ids

    for piece in pieces(kind, token_ids):
        assert piece.count("\ufffd") <= text.count("\ufffd")


@given(text=st.sampled_from(TEXTS) | st.text(alphabet="abä日😀", max_size=30))
def test_a_byte_level_text_comes_out_as_it_went_in(text: str) -> None:
    token_ids = rust("byte_level").encode(text, add_special_tokens=False).ids

    assert "".join(pieces("byte_level", token_ids)) == text


@kinds
def test_an_emoji_of_several_tokens_comes_in_one_piece(kind: str) -> None:
    token_ids = rust(kind).encode("a👋🏽 b", add_special_tokens=False).ids

    with_emoji = [piece for piece in pieces(kind, token_ids) if "👋" in piece]

    assert len(token_ids) > 5
    assert len(with_emoji) == 1


@kinds
def test_what_is_left_of_a_character_at_the_end_is_flushed_as_the_full_decoding_shows_it(kind: str) -> None:
    token_ids = rust(kind).encode("ok 😀", add_special_tokens=False).ids[:-1]

    *shown, rest = pieces(kind, token_ids)

    assert "\ufffd" not in "".join(shown)
    assert rest.strip("\ufffd") == ""
    assert "".join([*shown, rest]) == rust(kind).decode(token_ids)


@kinds
def test_special_tokens_have_no_text_but_bytes_for_log_probabilities(kind: str) -> None:
    special = {"byte_level": "<|end|>", "byte_fallback": "</s>"}[kind]
    token_id = rust(kind).token_to_id(special)
    assert token_id is not None

    assert "".join(pieces(kind, [token_id])) == ""
    assert tokenizer(kind).token_bytes(token_id) == special.encode()


@kinds
@given(text=st.text(alphabet="abc ä日😀", min_size=1, max_size=20))
def test_the_bytes_of_tokens_joined_are_the_bytes_of_the_text(kind: str, text: str) -> None:
    token_ids = rust(kind).encode(text, add_special_tokens=False).ids

    joined = b"".join(map(tokenizer(kind).token_bytes, token_ids))

    assert joined.removeprefix(b" " if kind == "byte_fallback" else b"") == text.encode()


def test_a_long_run_of_bytes_that_are_no_text_does_not_hold_back_a_byte_level_text() -> None:
    [bad] = [number for number in range(400) if tokenizer("byte_level").token_bytes(number) == b"\xff"]

    shown = pieces("byte_level", [bad] * 1000)

    assert shown == ["\ufffd"] * 1000 + [""]


def test_each_kind_of_tokenizer_gets_its_detokenizer() -> None:
    assert isinstance(tokenizer("byte_level").detokenizer(), ByteLevelDetokenizer)
    assert isinstance(tokenizer("byte_fallback").detokenizer(), WindowDetokenizer)


@kinds
def test_a_saved_tokenizer_encodes_and_decodes_like_transformers(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), rust(kind))
    loaded, reference = Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder))

    for text in TEXTS:
        token_ids = loaded.encode(text, add_special_tokens=True)
        assert list(token_ids) == reference(text).input_ids
        assert loaded.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        Tokenizer.load(tmp_path_factory.mktemp("empty"))
