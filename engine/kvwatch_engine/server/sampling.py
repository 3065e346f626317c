"""From a request's fields to the engine's `SamplingParams`: the one place where their ranges are checked.

A field that the request leaves out takes the model's own default (generation_config), then OpenAI's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.server.beams import beam_params
from kvwatch_engine.server.errors import shorten
from kvwatch_engine.server.protocol.chat import ChatRequest
from kvwatch_engine.server.protocol.completions import CompletionRequest
from kvwatch_engine.server.protocol.request import GenerationFields
from kvwatch_engine.server.protocol.responses import INCLUDE_LOGPROBS, ResponseRequest
from kvwatch_engine.server.settings import ServerSettings

GREEDY_BELOW = 1e-5
"""A lower temperature divides logits into overflow; what it asks for is the most likely token."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions. Chat's default is what fits."""
_MAX_KEY_CHARS = 20
_TOO_LONG = "context_length_exceeded"

Number = TypeVar("Number", int, float)
AnyRequest = ChatRequest | CompletionRequest | ResponseRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a request is measured against."""

    settings: ServerSettings
    model: ModelInfo
    max_model_len: int
    """Longest sequence in tokens, prompt and answer together."""
    max_new_tokens: Callable[[int, int], int]
    """(tokens of a prompt, sequences) -> the largest `max_tokens` that can run; see `EngineClient.max_new_tokens`."""


def sampling_params(request: AnyRequest, num_prompt_tokens: int, bounds: Bounds) -> SamplingParams:
    """Return the checked sampling parameters of a request.

    Args:
        request: the decoded body.
        num_prompt_tokens: tokens of its longest prompt.
        bounds: limits of server and model.

    Raises:
        RequestInvalid: a value is out of its range, or the answer cannot fit.
    """
    defaults = bounds.model.sampling_defaults
    n = num_choices(request, bounds.settings)
    beams = beam_params(request, n, bounds.settings)
    max_tokens = _max_tokens(request, num_prompt_tokens, n if beams is None else beams.width, bounds)
    temperature = _within("temperature", _first(request.temperature, defaults.temperature, 1.0), 0.0, 2.0)
    top_p = _within("top_p", _first(request.top_p, defaults.top_p, 1.0), 0.0, 1.0)
    top_k = _top_k(_first(request.top_k, defaults.top_k, 0), bounds.model.vocab_size)
    params = SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=top_p or 1.0,
        top_k=top_k if top_p else 1,  # the smallest set of tokens that reaches 0 is the most likely one
        min_p=_within("min_p", _first(request.min_p, defaults.min_p, 0.0), 0.0, 1.0),
        presence_penalty=_within("presence_penalty", request.presence_penalty or 0.0, -2.0, 2.0),
        frequency_penalty=_within("frequency_penalty", request.frequency_penalty or 0.0, -2.0, 2.0),
        repetition_penalty=_within(
            "repetition_penalty", _first(request.repetition_penalty, defaults.repetition_penalty, 1.0), 0.1, 10.0
        ),
        seed=_seed(request.seed),
        logit_bias=_logit_bias(request.logit_bias or {}, bounds),
        logprobs=_num_logprobs(request, bounds.settings.max_logprobs),
        prompt_logprobs=_num_prompt_logprobs(request, bounds.settings.max_logprobs),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], bounds),
        min_tokens=_within("min_tokens", request.min_tokens or 0, 0, max_tokens),
        max_tokens=max_tokens,
        ignore_eos=bool(request.ignore_eos),
        n=n,
        beams=beams,
    )
    # What the model recommends for draws means nothing in a search.
    return params if beams is None else replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def num_choices(request: GenerationFields, settings: ServerSettings) -> int:
    """Return `n`, checked.

    Raises:
        RequestInvalid: it is out of range.
    """
    return _within("n", 1 if request.n is None else request.n, 1, settings.max_n)


def wants_prompt_only(request: AnyRequest) -> bool:
    """Return whether a completion is to be its echoed prompt and nothing else, as who rates texts asks for it."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def stop_strings(request: GenerationFields, settings: ServerSettings) -> tuple[str, ...]:
    """Return the stop strings, checked.

    Raises:
        RequestInvalid: too many, too long, or an empty one.
    """
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _at_most("stop", "strings", stops, settings.max_stop_strings)
    for stop in stops:
        if not stop:
            raise RequestInvalid("stop holds an empty string, which would stop everything; remove it", param="stop")
        if len(stop) > settings.max_stop_chars:
            raise RequestInvalid(
                f"stop holds a string of {len(stop)} characters, the limit is {settings.max_stop_chars}", param="stop"
            )
    return tuple(stops)


def check_prompt_length(num_tokens: int, max_model_len: int, param: str) -> None:
    """Refuse a prompt that is empty or leaves no room for one token.

    Raises:
        RequestInvalid: so.
    """
    if num_tokens == 0:
        raise RequestInvalid(f"{param} is empty; send at least one token", param=param)
    if num_tokens >= max_model_len:
        raise too_long(f"{param} has {num_tokens} tokens", max_model_len, param)


def too_long(what: str, max_model_len: int, param: str) -> RequestInvalid:
    """Return the error for a prompt, or a prompt and answer, that cannot fit."""
    return RequestInvalid(
        f"{what}; this server's maximum context length is {max_model_len} tokens, prompt and answer together; "
        "shorten the prompt or ask for fewer tokens",
        param=param,
        code=_TOO_LONG,
    )


def is_too_long(error: RequestInvalid) -> bool:
    """Whether an error is one of `too_long`."""
    return error.code == _TOO_LONG


def _max_tokens(request: AnyRequest, num_prompt_tokens: int, num_sequences: int, bounds: Bounds) -> int:
    name, asked = _asked_tokens(request)
    if wants_prompt_only(request):
        asked = 1  # the least that an engine does; nobody is shown it
    if asked is not None and asked < 1:
        prompt_alone = ", or 0 together with echo" if isinstance(request, CompletionRequest) else ""
        raise RequestInvalid(f"{name} is {_show(asked)}, it must be at least 1{prompt_alone}", param=name)
    room = bounds.max_new_tokens(num_prompt_tokens, num_sequences)
    what, param = ("beams", "beam_width") if request.use_beam_search else ("choices", "n")
    has_many = num_sequences > 1
    # A prompt that is not tokenised yet counts as the shortest one, which must not be told as what was sent.
    prompt = "the shortest prompt" if num_prompt_tokens == 1 else f"a prompt of {num_prompt_tokens} tokens"
    prompt += f" and {num_sequences} {what}" if has_many else ""
    if room < 1:
        raise too_long(
            f"with {prompt} there is no room for an answer", bounds.max_model_len, param if has_many else name
        )
    if asked is None:
        return min(room, COMPLETION_MAX_TOKENS) if isinstance(request, CompletionRequest) else room
    if asked > room:
        raise too_long(f"{name} is {_show(asked)}, and with {prompt} at most {room} fit", bounds.max_model_len, name)
    return asked


def _asked_tokens(request: AnyRequest) -> tuple[str, int | None]:
    """Return the name and value of the field that limits the answer."""
    if isinstance(request, ResponseRequest):
        return "max_output_tokens", request.max_output_tokens
    if isinstance(request, CompletionRequest) or request.max_completion_tokens is None:
        return "max_tokens", request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise RequestInvalid("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
    return "max_completion_tokens", request.max_completion_tokens


def _num_logprobs(request: AnyRequest, limit: int) -> int | None:
    if isinstance(request, CompletionRequest):
        return None if request.logprobs is None else _within("logprobs", request.logprobs, 0, limit)
    if isinstance(request, ResponseRequest):
        is_wanted, needed = INCLUDE_LOGPROBS in (request.include or ()), f"{INCLUDE_LOGPROBS} in include"
    else:
        is_wanted, needed = bool(request.logprobs), "logprobs to be true"
    if request.top_logprobs is not None:
        _within("top_logprobs", request.top_logprobs, 0, limit)
        if not is_wanted and request.top_logprobs:
            raise RequestInvalid(f"top_logprobs needs {needed}", param="top_logprobs")
    return (request.top_logprobs or 0) if is_wanted else None


def _num_prompt_logprobs(request: AnyRequest, limit: int) -> int | None:
    """Return how many likely tokens are wanted in each place of the prompt, whichever field asks for more of them."""
    asked = request.prompt_logprobs
    if asked is not None:
        _within("prompt_logprobs", asked, 0, limit)
        if request.stream:
            raise RequestInvalid(
                "prompt_logprobs is not part of a stream; remove it or stream (a completion streams those of a prompt "
                "with echo and logprobs)",
                param="prompt_logprobs",
            )
    if not isinstance(request, CompletionRequest) or not request.echo or request.logprobs is None:
        return asked
    return max(request.logprobs, asked or 0)


def _top_k(value: int, vocab_size: int) -> int:
    if value < -1:
        raise RequestInvalid(
            f"top_k is {_show(value)}, it must be at least 1, or 0 or -1 for all tokens", param="top_k"
        )
    return value if 0 < value < vocab_size else 0


def _seed(value: int | None) -> int | None:
    if value is None:
        return None
    _within("seed", value, -(2**63), 2**63 - 1)
    return value % 2**64  # the same bits without a sign


def _logit_bias(entries: dict[str, float], bounds: Bounds) -> tuple[tuple[int, float], ...]:
    _at_most("logit_bias", "entries", entries, bounds.settings.max_logit_bias)
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_KEY_CHARS):
            raise RequestInvalid(
                f"logit_bias has the key {key[:_MAX_KEY_CHARS]!r}; keys are token ids in decimal", param="logit_bias"
            )
        token_id = check_token_id(int(key), bounds.model.vocab_size, "logit_bias")
        biases[token_id] = _within("logit_bias", bias, -100.0, 100.0)
    return tuple(biases.items())


def _stop_token_ids(token_ids: Sequence[int], bounds: Bounds) -> tuple[int, ...]:
    _at_most("stop_token_ids", "ids", token_ids, bounds.settings.max_stop_token_ids)
    return tuple(check_token_id(number, bounds.model.vocab_size, "stop_token_ids") for number in token_ids)


def check_token_id(token_id: int, vocab_size: int, param: str) -> int:
    """Return a token id of the vocabulary.

    Raises:
        RequestInvalid: it is outside the vocabulary.
    """
    if not 0 <= token_id < vocab_size:
        raise RequestInvalid(
            f"{param} has the token id {_show(token_id)}, the vocabulary is 0 to {vocab_size - 1}", param=param
        )
    return token_id


def _at_most(name: str, things: str, values: Sequence[object] | dict[str, float], limit: int) -> None:
    if len(values) > limit:
        raise RequestInvalid(f"{name} has {len(values)} {things}, the limit is {limit}", param=name)


def _within(name: str, value: Number, low: Number, high: Number) -> Number:
    if not low <= value <= high:  # written so that NaN, which is within nothing, is refused
        raise RequestInvalid(f"{name} is {_show(value)}, it must be {_show(low)} to {_show(high)}", param=name)
    return value


def _first(asked: Number | None, recommended: Number | None, fallback: Number) -> Number:
    if asked is not None:
        return asked
    return fallback if recommended is None else recommended


def _show(value: float) -> str:
    """Return a number for a message; a huge integer must not fill it."""
    return shorten(str(value), 20) if isinstance(value, int) else f"{value:.6g}"
