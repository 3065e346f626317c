"""The model's tokens as llguidance sees them, and the bounds under which it works."""

from typing import Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Work that the library may do: some 10 ms at most for one token, some 40 MB for one sequence."""
_MAX_REASON_CHARS: Final = 300
_LIBRARY_DEAD_END: Final = "NoExtensionBias"
DEAD_END: Final = (
    "no text can go on: a part of it refers to itself without an end, or is impossible; give it one that ends"
)
"""What a matcher complains of where its grammar neither ends nor allows another token."""


class VocabularySource(msgspec.Struct, frozen=True):
    """What a vocabulary is made of; it is sent to the trial process."""

    tokenizer: str
    """tokenizer.json."""
    vocab_size: int
    """Of the model, whose logits may be more than its tokenizer has tokens."""
    eos_token_ids: tuple[int, ...]

    def build(self) -> LLTokenizer:
        """Return the tokens in the library's form. Takes tenths of a second, and holds the interpreter meanwhile.

        Raises:
            ValueError: the tokenizer is of a kind that the library does not know, or has no end token.
        """
        if not self.eos_token_ids:
            raise ValueError("the model has no end token")
        ends = list(self.eos_token_ids)
        try:
            return LLTokenizer(self.tokenizer, n_vocab=self.vocab_size, eos_token=ends)
        except ValueError:  # its tokens are more than the model's: those beyond are never sampled
            return LLTokenizer(self.tokenizer, eos_token=ends)


def make_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar in the library's own form; `matcher_error` says whether that worked."""
    return LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)


def matcher_error(matcher: LLMatcher) -> str:
    """Return what a matcher complains of, in one line; empty if nothing."""
    if not matcher.is_error():
        return ""
    reason = one_line(matcher.get_error())
    return DEAD_END if reason.startswith(_LIBRARY_DEAD_END) else reason


def one_line(text: str) -> str:
    """Return a message of the library in one line of bounded length; what it quotes may be long."""
    return " ".join(text.split())[:_MAX_REASON_CHARS]
