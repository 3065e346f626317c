"""Bodies become sampling parameters, or are refused by name; nothing else ever happens."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_server import MODEL, make_model_info

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.sampling import BeamParams, SamplingParams
from kvwatch_engine.server.bodies import decode_body
from kvwatch_engine.server.completions import split_prompts
from kvwatch_engine.server.conversation import conversation
from kvwatch_engine.server.protocol.chat import ChatRequest
from kvwatch_engine.server.protocol.completions import CompletionRequest
from kvwatch_engine.server.refusals import refuse_unsupported, template_variables
from kvwatch_engine.server.sampling import Bounds, sampling_params, stop_strings
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.shapes import wants_usage

SETTINGS = ServerSettings()
VOCAB_SIZE = 400
MAX_MODEL_LEN = 128


def bounds(**defaults: float) -> Bounds:
    return Bounds(
        settings=SETTINGS,
        model=make_model_info(Path(), VOCAB_SIZE, **defaults),
        max_model_len=MAX_MODEL_LEN,
        max_new_tokens=lambda num_prompt_tokens, _n: MAX_MODEL_LEN - num_prompt_tokens,
    )


def chat_body(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def completion_body(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode()


def parse_chat(body: bytes, **defaults: float) -> SamplingParams:
    request = decode_body(body, ChatRequest)
    refuse_unsupported(request)
    wants_usage(request)
    stop_strings(request, SETTINGS)
    conversation(request.messages, takes_images=False, max_model_len=MAX_MODEL_LEN)
    template_variables(request.chat_template_kwargs)
    return sampling_params(request, 10, bounds(**defaults))


def parse_completion(body: bytes, **defaults: float) -> SamplingParams:
    request = decode_body(body, CompletionRequest)
    refuse_unsupported(request)
    wants_usage(request)
    stop_strings(request, SETTINGS)
    split_prompts(request.prompt)
    return sampling_params(request, 10, bounds(**defaults))


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2, 20, 21, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([-0.0, 1e-300, 1e300, 0.5, 2.000001])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc01", max_size=3), inner, max_size=3),
    max_leaves=5,
)
chat_fields = sorted(set(get_type_hints(ChatRequest)) - {"model"})
completion_fields = sorted(set(get_type_hints(CompletionRequest)) - {"model"})


def assert_sane(params: SamplingParams) -> None:
    assert params.temperature == 0 or 1e-5 <= params.temperature <= 2
    assert 0 < params.top_p <= 1
    assert 0 <= params.top_k < VOCAB_SIZE
    assert 0 <= params.min_p <= 1
    assert abs(params.presence_penalty) <= 2
    assert abs(params.frequency_penalty) <= 2
    assert 0.1 <= params.repetition_penalty <= 10
    assert params.seed is None or 0 <= params.seed < 2**64
    assert all(0 <= token < VOCAB_SIZE and abs(bias) <= 100 for token, bias in params.logit_bias)
    assert params.logprobs is None or 0 <= params.logprobs <= SETTINGS.max_logprobs
    assert all(0 <= token < VOCAB_SIZE for token in params.stop_token_ids)
    assert 0 <= params.min_tokens <= params.max_tokens
    assert 1 <= params.max_tokens <= MAX_MODEL_LEN - 10
    assert 1 <= params.n <= SETTINGS.max_n
    assert all(math.isfinite(value) for value in (params.temperature, params.top_p, params.min_p))


def assert_sane_or_refused(parse: Callable[[bytes], SamplingParams], body: bytes) -> None:
    try:
        found: SamplingParams | RequestInvalid = parse(body)
    except RequestInvalid as error:
        found = error
    if isinstance(found, RequestInvalid):
        assert 10 < len(str(found)) < 700
    else:
        assert_sane(found)


@given(st.dictionaries(st.sampled_from(chat_fields), json_values, max_size=4))
@settings(max_examples=600)
def test_any_json_in_any_chat_field_is_accepted_in_range_or_refused(fields: dict[str, Any]) -> None:
    assert_sane_or_refused(parse_chat, chat_body(**fields))


@given(st.dictionaries(st.sampled_from(completion_fields), json_values, max_size=4))
@settings(max_examples=600)
def test_any_json_in_any_completion_field_is_accepted_in_range_or_refused(fields: dict[str, Any]) -> None:
    assert_sane_or_refused(parse_completion, completion_body(**fields))


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_request_or_refused(body: bytes) -> None:
    with pytest.raises(RequestInvalid):  # none of them names a model
        decode_body(body, ChatRequest)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"model": "m"} x',
        b'{"model": "m", "messages": [], "temperature": NaN}',
        b'{"model": "m", "messages": [], "temperature": Infinity}',
        b'{"model": "m", "messages": [], "temperature": 1e999}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800 and more text"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\udc00\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "m", "messages": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "m", "messages": [], "n": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_is_not_a_request_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(RequestInvalid) as caught:
        decode_body(body, ChatRequest)

    assert len(str(caught.value)) > 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", -1), ("n", 17), ("n", 10**30), ("n", True), ("n", 1.5), ("n", "1"),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", 1e300), ("temperature", "hot"),
        ("temperature", True),
        ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.5), ("top_k", -2),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("repetition_penalty", -1), ("repetition_penalty", 11),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 119), ("max_tokens", 10**400),
        ("max_completion_tokens", 0), ("max_completion_tokens", 10**9),
        ("min_tokens", -1), ("min_tokens", 119),
        ("stop", ""), ("stop", [""]), ("stop", ["x"] * 17), ("stop", "x" * 257), ("stop", [1]), ("stop", 1),
        ("stop_token_ids", [400]), ("stop_token_ids", [-1]), ("stop_token_ids", [0] * 65),
        ("stop_token_ids", [True]), ("stop_token_ids", "3"),
        ("seed", 2**63), ("seed", 1.5), ("seed", "1"),
        ("logit_bias", {"400": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"x": 1}), ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"٣": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {str(token): 1 for token in range(1025)}), ("logit_bias", [1]),
        ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("prompt_logprobs", True), ("prompt_logprobs", "1"),
        ("top_logprobs", 5), ("stream", "yes"), ("ignore_eos", 1), ("stream_options", {"include_usage": True}),
    ],
    ids=lambda value: repr(value)[:24],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    """vllm#6521, #10432: max_tokens 0 and extreme sampling values reached the engine."""
    with pytest.raises(RequestInvalid) as caught:
        parse_chat(chat_body(**{field: value}))

    assert (caught.value.param or "").split("[")[0].split(".")[0] == field
    assert field in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("logprobs", "top"), [(True, -1), (True, 21), (True, 10**9), (True, True)])
def test_the_number_of_log_probabilities_is_bounded_and_minus_one_is_no_way_around(logprobs: bool, top: object) -> None:
    """vllm#264, #266: -1 asked for the whole vocabulary."""
    with pytest.raises(RequestInvalid, match="top_logprobs"):
        parse_chat(chat_body(logprobs=logprobs, top_logprobs=top))
    with pytest.raises(RequestInvalid, match="logprobs"):
        parse_completion(completion_body(logprobs=top))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None), ({"echo": True}, None), ({"logprobs": 3}, None), ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 0}, 0), ({"prompt_logprobs": 2}, 2), ({"prompt_logprobs": 0}, 0),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 4}, 4), ({"logprobs": 9, "prompt_logprobs": 4}, 4),
        ({"echo": True, "logprobs": 5, "prompt_logprobs": 4, "stream": False}, 5),
        ({"echo": True, "logprobs": 5, "stream": True}, 5),
    ],
    ids=str,
)  # fmt: skip
def test_log_probabilities_of_the_prompt_are_those_of_the_field_that_asks_for_more(
    fields: dict[str, object], expected: int | None
) -> None:
    assert parse_completion(completion_body(**fields)).prompt_logprobs == expected


def test_no_answer_but_the_echoed_prompt_is_one_token_for_the_engine() -> None:
    assert parse_completion(completion_body(echo=True, max_tokens=0)).max_tokens == 1
    with pytest.raises(RequestInvalid, match="max_tokens is 0, it must be at least 1, or 0 together with echo"):
        parse_completion(completion_body(max_tokens=0))


def test_a_beam_search_takes_its_own_parameters_and_none_of_the_models_recommendations_for_draws() -> None:
    params = parse_chat(
        chat_body(use_beam_search=True, n=2, beam_width=4, length_penalty=-0.5, early_stopping="never", temperature=1),
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1,
    )  # fmt: skip

    assert params.beams == BeamParams(width=4, length_penalty=-0.5, early_stopping="never")
    assert (params.n, params.num_sequences, params.repetition_penalty) == (2, 4, 1.1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_a_beam_search_keeps_n_beams_if_nobody_says_how_many() -> None:
    assert parse_completion(completion_body(use_beam_search=True, n=3)).beams == BeamParams(width=3)
    assert (
        parse_completion(completion_body(use_beam_search=False, early_stopping=False, length_penalty=1)).beams is None
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"), ({"stop": "a"}, "stop"), ({"stop": ["a"]}, "stop"), ({"n": 3}, "beam_width"),
        ({"beam_width": 0}, "beam_width"), ({"beam_width": 17}, "beam_width"), ({"n": 17}, "n"),
        ({"length_penalty": 11}, "length_penalty"), ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False}, "beam_width"),
        ({"use_beam_search": False, "beam_width": None, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": None, "beam_width": None, "early_stopping": True}, "early_stopping"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_together_with_a_beam_search_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        parse_completion(completion_body(**{"use_beam_search": True, "beam_width": 2, **fields}))

    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]), ("function_call", {"name": "f"}), ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]), ("prediction", {"type": "content"}), ("web_search_options", {}),
        ("guided_decoding_backend", "outlines"), ("guided_whitespace_pattern", " "),
        ("bad_words", ["a"]), ("allowed_token_ids", [1]),
        ("logits_processors", ["a"]), ("truncate_prompt_tokens", 5), ("prompt_embeds", "a"),
        ("include_stop_str_in_output", True), ("skip_special_tokens", False), ("add_generation_prompt", False),
        ("continue_final_message", True), ("documents", [{}]), ("echo", True), ("add_special_tokens", True),
        ("chat_template", "{{ 1 }}"), ("chat_template_kwargs.chat_template", "{{ 1 }}"),
        ("chat_template_kwargs.tokenize", True), ("chat_template_kwargs.enable_thinking", "no"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_what_is_not_implemented_and_would_change_the_answer_is_refused_by_name(field: str, value: object) -> None:
    """CVE-2025-61620, CVE-2025-62426: a chat template, or arguments of its renderer, came from the request."""
    outer, _, inner = field.partition(".")

    with pytest.raises(RequestInvalid) as caught:
        parse_chat(chat_body(**{outer: {inner: value} if inner else value}))

    assert caught.value.param == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}}, {"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"},
        {"modalities": ["text"]}, {"functions": []}, {"chat_template_kwargs": {}}, {"chat_template": None},
        {"store": True, "metadata": {"a": "b"}, "user": "me", "parallel_tool_calls": True, "service_tier": "auto"},
        {"reasoning_effort": "low", "verbosity": "low", "safety_identifier": "x", "prompt_cache_key": "y"},
        {"n": None, "temperature": None, "top_p": None, "stop": None, "max_tokens": None, "seed": None,
         "logit_bias": None, "logprobs": None, "top_logprobs": None, "stream": None, "stream_options": None},
        {"stop": []}, {"logprobs": False, "top_logprobs": 0}, {"skip_special_tokens": True},
        {"max_tokens": 5, "max_completion_tokens": 5}, {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=lambda fields: ",".join(fields)[:40],
)  # fmt: skip
def test_what_is_harmless_is_accepted_as_openai_accepts_it(fields: dict[str, object]) -> None:
    assert_sane(parse_chat(chat_body(**fields)))


def test_suffix_is_refused_by_name_for_completions() -> None:
    with pytest.raises(RequestInvalid, match="suffix") as caught:
        parse_completion(completion_body(suffix="end"))

    assert caught.value.param == "suffix"
    assert_sane(parse_completion(completion_body(suffix="")))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            "messages[0].tool_calls",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ("x", "messages[0]"),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_rendered_is_refused_with_its_place(message: object, param: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        parse_chat(chat_body(messages=[message]))

    assert caught.value.param == param


def test_text_parts_become_lines_and_developer_becomes_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = chat_body(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])

    turns = conversation(decode_body(body, ChatRequest).messages, takes_images=False, max_model_len=MAX_MODEL_LEN)

    assert [(turn.role, turn.as_lines()) for turn in turns] == [("system", "be brief"), ("user", "one\ntwo")]


def test_the_models_defaults_apply_where_the_request_is_silent_and_only_there() -> None:
    silent = parse_chat(chat_body(), temperature=0.6, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)
    loud = parse_chat(
        chat_body(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1),
        temperature=0.6, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1,
    )  # fmt: skip

    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p, silent.repetition_penalty) == (
        0.6, 0.9, 40, 0.05, 1.1,
    )  # fmt: skip
    assert (loud.temperature, loud.top_p, loud.top_k, loud.min_p, loud.repetition_penalty) == (0, 1, 0, 0, 1)


def test_without_any_default_openais_apply() -> None:
    params = parse_chat(chat_body())

    assert (params.temperature, params.top_p, params.n, params.logprobs) == (1.0, 1.0, 1, None)
    assert params.max_tokens == MAX_MODEL_LEN - 10
    assert parse_completion(completion_body()).max_tokens == 16


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert parse_chat(chat_body(temperature=1e-300)).is_greedy
    assert not parse_chat(chat_body(temperature=0.01)).is_greedy


def test_top_p_of_zero_leaves_the_most_likely_token() -> None:
    params = parse_chat(chat_body(top_p=0, top_k=40))

    assert (params.top_k, params.top_p) == (1, 1.0)


@pytest.mark.parametrize("top_k", [-1, 0, 400, 10**30])
def test_a_top_k_that_keeps_every_token_is_none(top_k: int) -> None:
    assert parse_chat(chat_body(top_k=top_k)).top_k == 0


def test_negative_seeds_are_seeds_of_their_own() -> None:
    seeds = {parse_chat(chat_body(seed=seed)).seed for seed in (-1, 1, -(2**63), 2**63 - 1)}

    assert len(seeds) == 4


def test_max_tokens_and_max_completion_tokens_may_not_disagree() -> None:
    with pytest.raises(RequestInvalid, match="differ"):
        parse_chat(chat_body(max_tokens=5, max_completion_tokens=6))
    assert parse_chat(chat_body(max_completion_tokens=6)).max_tokens == 6


def test_an_answer_that_cannot_fit_is_refused_with_openais_code() -> None:
    with pytest.raises(RequestInvalid, match=r"with a prompt of 10 tokens at most 118 fit.*128 tokens") as caught:
        parse_chat(chat_body(max_tokens=119))

    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_was_not_tokenised_yet_is_not_told_to_have_one_token() -> None:
    with pytest.raises(RequestInvalid, match=r"with the shortest prompt at most 127 fit"):
        sampling_params(decode_body(chat_body(max_tokens=500), ChatRequest), 1, bounds())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([""], [""]),
        (["a", [1]], ["a", [1]]),
    ],
)  # fmt: skip
def test_prompts_are_texts_or_token_ids_one_or_many(prompt: Any, expected: list[object]) -> None:
    assert split_prompts(prompt) == expected


@pytest.mark.parametrize("prompt", [[], [1, "a"], [1, [2]], ["a", 1]])
def test_no_prompt_and_mixed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestInvalid, match="prompt"):
        split_prompts(prompt)
