"""Bodies of `/v1/completions`."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from kvwatch_engine.server.protocol.reply import PromptTokenLogprob, Usage
from kvwatch_engine.server.protocol.request import GenerationFields


class CompletionRequest(GenerationFields, kw_only=True):
    """Request of a completion."""

    prompt: str | list[str | int | list[int]]
    """One text, texts, one list of token ids, or lists of token ids."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    # Not implemented.
    suffix: object = None


class CompletionLogprobs(Struct):
    """Log-probabilities in the four parallel lists of the completions API."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which follows nothing."""
    top_logprobs: list[dict[str, float] | None] | None
    """Null when no alternatives were asked for."""
    text_offset: list[int]
    """Characters of the choice's text that were complete before each token."""


class CompletionChoice(Struct):
    """One text, or its part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    score: float | UnsetType = UNSET
    """Of a beam search; see `length_penalty`."""
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | UnsetType = UNSET
    """Of each token of its prompt by token ids, if asked for."""


class Completion(Struct, kw_only=True):
    """Answer of a completion, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    """In a stream absent unless asked for; then null in every chunk but the last."""
