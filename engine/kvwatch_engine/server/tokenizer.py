"""The model's tokenizer: text to ids, ids to text, and the bytes of a single token.

Only the Rust tokenizer inside transformers' is used: transformers' own `__call__` changes shared padding state and is
not safe from several threads.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.server.chat_template import ChatTemplate
from kvwatch_engine.server.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    ShowingDetokenizer,
    WindowDetokenizer,
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"
"""What sentencepiece writes for a space."""


class Tokenizer:
    """A loaded tokenizer. Every method may be called from any thread."""

    def __init__(self, rust: RustTokenizer, chat_template: ChatTemplate) -> None:
        self._rust = rust
        self.chat_template = chat_template
        decoders = _decoder_types(rust)
        self._is_byte_level = decoders == {"ByteLevel"}
        self._has_byte_fallback = "ByteFallback" in decoders
        added = rust.get_added_tokens_decoder()
        self._special_ids = frozenset(number for number, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.max_token_chars = max((len(token) for token in rust.get_vocab()), default=1)
        """Characters of the longest token, so that a text's least number of tokens is known before tokenising it."""

    @classmethod
    def of_model(cls, model: ModelInfo) -> "Tokenizer":
        """Load the tokenizer of a model, or the one that was given instead.

        Raises:
            ModelError: there is none, it exists in Python only, or one that was given has tokens that the model lacks.
        """
        found = cls.load(model.tokenizer_folder, model.texts.chat_template)
        highest = max(found._rust.get_vocab().values(), default=0)
        # Of its own tokenizer a model may lack some on purpose: they are those that it never saw.
        if model.texts.tokenizer is not None and highest >= model.vocab_size:
            raise ModelError(
                f"the tokenizer that was given has tokens up to {highest}, but the model's vocabulary ends at "
                f"{model.vocab_size - 1}; give one that belongs to this model with --tokenizer"
            )
        return found

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> "Tokenizer":
        """Load the tokenizer of a folder.

        Args:
            folder: with its files.
            chat_template: to take instead of the folder's; none takes that.

        Raises:
            ModelError: the folder has none, or one that exists in Python only.
        """
        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # damaged files make its readers raise every kind
            raise ModelError(
                f"the model's tokenizer cannot be loaded: {error}; give another with --tokenizer"
            ) from error
        rust = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(rust, RustTokenizer):
            raise ModelError(
                f"the model's tokenizer {type(loaded).__name__} has no tokenizer.json form; save it as a fast tokenizer"
            )
        if chat_template is not None:
            loaded.chat_template = chat_template
        elif not loaded.chat_template:
            loaded.chat_template = _older_template(folder)
        return cls(rust, ChatTemplate(loaded))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of a text.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: whether the tokenizer adds its own begin token; rendered templates have it already.
        """
        # The batch form gives up the interpreter lock while it works, the single form holds it.
        [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, special ones left out unless they are asked for."""
        return self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def id_of(self, text: str) -> int | None:
        """Return the id of the token that is written like this in the vocabulary; none if there is none."""
        return self._rust.token_to_id(text)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written like this; none if there is none."""
        token_id = self.id_of(text)
        return token_id if token_id in self._special_ids else None

    def detokenizer(self, shown: Mapping[int, str] | None = None) -> Detokenizer:
        """Return a fresh incremental decoder whose pieces joined equal `decode` of all tokens.

        Args:
            shown: special tokens that have a text all the same.
        """
        if shown:
            return ShowingDetokenizer(self.detokenizer, shown)
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._text_bytes)
        return WindowDetokenizer(self.decode, is_silent=self._is_silent, is_byte=self._is_byte)

    def to_json(self) -> str:
        """Return it as tokenizer.json, without what it does to many texts at once."""
        copy = RustTokenizer.from_str(self._rust.to_str())
        copy.no_padding()
        copy.no_truncation()
        return copy.to_str()

    def name_of(self, token_id: int) -> str:
        """Return how a token is written in the vocabulary.

        Raises:
            ModelError: there is no such token.
        """
        name = self._rust.id_to_token(token_id)
        if name is None:
            raise ModelError(f"the model's tokenizer has no token {token_id}; are its files complete?")
        return name

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token stands for; of a special token its name, of an unknown id none."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self._rust.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special_ids:
            return piece.encode()
        if self._is_byte_level:
            if all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
            return piece.encode()
        byte = _BYTE_TOKEN.fullmatch(piece) if self._has_byte_fallback else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        return piece.replace(_WORD_START, " ").encode()

    def _is_silent(self, token_id: int) -> bool:
        return token_id in self._special_ids or self._rust.id_to_token(token_id) is None

    def _is_byte(self, token_id: int) -> bool:
        piece = self._rust.id_to_token(token_id)
        return self._has_byte_fallback and piece is not None and _BYTE_TOKEN.fullmatch(piece) is not None


def _older_template(folder: Path) -> str | None:
    """Return the chat template from where older processors of images and text keep it.

    Raises:
        ModelError: the file is damaged.
    """
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_bytes())["chat_template"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is not a chat template: {error!r}") from error


def _decoder_types(rust: RustTokenizer) -> set[str]:
    """Return the types of the decoders in the tokenizer's chain."""
    decoder: dict[str, Any] = json.loads(rust.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    return {step["type"] for step in steps if "type" in step}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of the byte-level alphabet: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
