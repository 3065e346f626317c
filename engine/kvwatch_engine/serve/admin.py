"""What `kvwatch serve` tells its admin API: where each setting comes from, and how texts become tokens."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvwatch.admin.engines import DeclaredSetting
from kvwatch.config import Resolved, declared_settings
from kvwatch_engine.contracts.model import ModelInfo

S = TypeVar("S", bound=msgspec.Struct)


def declared(resolved: Resolved[S]) -> tuple[DeclaredSetting, ...]:
    """Return all settings as text with the source of each; secrets are hidden."""
    return tuple(
        DeclaredSetting(
            key=each.name,
            value=each.shown(getattr(resolved.settings, each.name)),
            source=resolved.sources[each.name],
            brief=each.spec.brief,
        )
        for each in declared_settings(type(resolved.settings))
    )


def tokenize_as_completions(model: ModelInfo) -> Callable[[str], list[int]]:
    """Return what turns a text into the tokens that it has as the prompt of a completion.

    The tokenizer is loaded when it is first asked for, which takes a second or so.
    """
    loaded: list[Callable[[str], tuple[int, ...]]] = []

    def tokenize(text: str) -> list[int]:
        if not loaded:
            from kvwatch_engine.server.tokenizer import Tokenizer

            tokenizer = Tokenizer.of_model(model)
            loaded.append(lambda words: tokenizer.encode(words, add_special_tokens=True))
        return list(loaded[0](text))

    return tokenize
