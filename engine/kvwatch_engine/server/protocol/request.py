"""Fields that chat and completion requests share.

A field that OpenAI makes nullable may be null, which means its default. Fields that are unknown here are ignored, as
OpenAI ignores them. Fields of type `object` are not implemented: `refusals.py` says which values of them are harmless.
"""

from typing import Literal

from msgspec import Struct

from kvwatch_engine.server.protocol.guided import ResponseFormat, StructuredOutputs


class StreamOptions(Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """How to generate. Ranges are checked in `sampling.py`."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    """Search for the most likely sequences instead of drawing tokens."""
    beam_width: int | None = None
    """Beams of the search; `n` if it is not given."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: str | None = None
    """Prefix blocks are shared only between requests of equal salt."""
    priority: int | None = None
    """0 is served first."""
    deadline_seconds: float | None = None
    """The request ends with an error when it is not complete after this time."""
    response_format: ResponseFormat | None = None
    """What the text must be; at most one of this and the following."""
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json: str | dict[str, object] | None = None
    """JSON Schema, or a text that is one."""
    guided_regex: str | None = None
    structured_outputs: StructuredOutputs | None = None
    """The newer form of the four before."""

    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, and of so many of the most likely ones in each place."""

    # Not implemented: all of these would change the answer.
    add_special_tokens: object = None
    allowed_token_ids: object = None
    audio: object = None
    bad_words: object = None
    ebnf: object = None
    function_call: object = None
    functions: object = None
    guided_decoding_backend: object = None
    guided_whitespace_pattern: object = None
    include_stop_str_in_output: object = None
    json_schema: object = None
    logits_processors: object = None
    modalities: object = None
    prediction: object = None
    prompt_embeds: object = None
    regex: object = None
    return_tokens_as_token_ids: object = None
    skip_special_tokens: object = None
    spaces_between_special_tokens: object = None
    tool_choice: object = None
    tools: object = None
    truncate_prompt_tokens: object = None
    web_search_options: object = None
