"""From tokens to text, one token at a time: the pieces joined are exactly the decoding of all tokens at once.

A character may be spread over several tokens; it is given out when it is complete. What can never become a character
is U+FFFD, as in the full decoding.

Why not `tokenizers.DecodeStream`: it has no end (the last incomplete character is lost), decodes everything held back
again for each token, and raises when bytes that looked like a character turn out not to be one.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16
"""More tokens than this never belong to one character."""


class Detokenizer(Protocol):
    """Text of one sequence. Special tokens have no text."""

    def push(self, token_id: int) -> str:
        """Add a token and return the characters that became complete, often none."""
        ...

    def flush(self) -> str:
        """Return what is left; the sequence has ended."""
        ...


class ByteLevelDetokenizer:
    """For byte-level tokenizers, where the text is the UTF-8 decoding of the tokens' bytes laid end to end.

    Constant work for each token.
    """

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """Take a function that gives the bytes of a token, none for special ones."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decodes a window of the last tokens and gives out what it says beyond the tokens known.

    Some decoders treat the first token of a text in their own way (they drop its leading space), so the window always
    begins with tokens that were given out already. A run of byte tokens (`<0xE2>`) is decoded when it is over, since
    one bad byte changes the text of the whole run.
    """

    __slots__ = ("_context", "_context_text", "_decode", "_held", "_is_byte", "_is_silent")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        is_silent: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        """Take the tokenizer's decoding and two questions about a token.

        Args:
            decode: decodes tokens as one text, without special tokens.
            is_silent: whether a token has no text at all (special, or not in the vocabulary).
            is_byte: whether a token stands for one byte.
        """
        self._decode = decode
        self._is_silent = is_silent
        self._is_byte = is_byte
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        if self._is_silent(token_id):
            return ""
        self._held.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        if not self._held:
            return ""
        return self._give_out(self._decode(self._context + self._held))

    def _give_out(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._context, self._held = self._held, []
        self._context_text = self._decode(self._context)
        return new


class ShowingDetokenizer:
    """Shows certain special tokens by their names; what stands before and after one are texts of their own."""

    __slots__ = ("_inner", "_make", "_shown")

    def __init__(self, make: Callable[[], Detokenizer], shown: Mapping[int, str]) -> None:
        """Take what makes a decoder of a text, and the names of the tokens that are shown."""
        self._make = make
        self._shown = shown
        self._inner = make()

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        name = self._shown.get(token_id)
        if name is None:
            return self._inner.push(token_id)
        text = self._inner.flush() + name
        self._inner = self._make()
        return text

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._inner.flush()
