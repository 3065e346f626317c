"""Compiled grammars for tests: the real library, a real tokenizer, no server."""

import asyncio
from collections.abc import Sequence

from openai_server import END, PATIENT, byte_level_tokenizer
from tokenizers import Tokenizer

from kvwatch_engine.guidance import Grammar, GuidanceLimits, GuideCompiler
from kvwatch_engine.guidance.grammar import GrammarKind
from kvwatch_engine.guidance.matching import CompiledGuide

VOCAB_SIZE = 400


def make_compiler(tokenizer: Tokenizer | None = None, limits: GuidanceLimits | None = None) -> GuideCompiler:
    """Return a compiler for the byte-level tokenizer of `openai_server`, whose end token has number 3."""
    tokenizer = tokenizer or byte_level_tokenizer(VOCAB_SIZE)
    end = tokenizer.token_to_id(END)
    assert end is not None
    return GuideCompiler(tokenizer.to_str(), VOCAB_SIZE, (end,), limits or PATIENT)


def compile_all(grammars: Sequence[Grammar], compiler: GuideCompiler | None = None) -> list[CompiledGuide]:
    """Compile grammars with a compiler that is closed afterwards."""

    async def compiled() -> list[CompiledGuide]:
        used = compiler or make_compiler()
        try:
            return [await used.compile(grammar) for grammar in grammars]
        finally:
            await used.close()

    return asyncio.run(compiled())


def compile_one(kind: GrammarKind, text: str) -> CompiledGuide:
    """Compile one grammar."""
    [guide] = compile_all([Grammar(kind, text, "test")])
    return guide


def allowed_after(guide: CompiledGuide, tokens: Sequence[int]) -> set[int]:
    """Return the tokens that may follow these."""
    sequence = guide.start()
    for count in range(len(tokens) + 1):
        sequence.prepare(tokens, count)
        allowed = sequence.allowed()
    return {int(token) for token in allowed.nonzero()[0]}
