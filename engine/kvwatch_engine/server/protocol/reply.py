"""Bodies that several endpoints answer with."""

from typing import Literal

from msgspec import Struct


class PromptTokensDetails(Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Prompt tokens whose keys and values were found in the prefix cache."""


class PromptTokenLogprob(Struct):
    """One token in one place of a prompt."""

    logprob: float
    rank: int
    """1 for the most likely token of all."""
    decoded_token: str


class Usage(Struct):
    """Token counts of a request. A prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Model(Struct, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvwatch"
    max_model_len: int
    """Longest sequence in tokens, prompt and answer together."""
    parent: str | None = None
    """Of a LoRA adapter: the model that it adapts."""
    input_modalities: list[str]
    """What prompts may hold: `text`, and `image` where the model takes images."""


class ModelList(Struct, kw_only=True):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


class Status(Struct):
    """State of the server."""

    status: Literal["ok", "ready"]


class Version(Struct):
    """Version of kvwatch."""

    version: str


class NamedEvent(Struct, tag_field="type"):
    """An event of a stream whose `type` is its name as well."""


class Error(Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """OpenAI's error envelope."""

    error: Error
