"""Structured output over HTTP with the official client: a tiny random model, whose texts are valid all the same."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import jsonschema_rs
import openai
import pytest
from model_server import model_server
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from openai_server import RunningServer
from random_schemas import Schema, random_schema
from tiny_models import make_tiny_model

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Answer in JSON."}]
SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "year": {"type": "integer", "minimum": 1, "maximum": 2030},
    },
    "required": ["name", "year"],
    "additionalProperties": False,
}  # fmt: skip
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    with model_server(folder, num_blocks=1500) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.openai() as made:
        yield made


def strict(schema: Schema) -> object:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def chat(client: OpenAI, seed: int = 0, **more: object) -> tuple[str, str]:
    """Return text and finish reason of a chat."""
    answer = client.chat.completions.create(model="model", messages=ASK, seed=seed, **more)  # type: ignore[call-overload]
    [choice] = answer.choices
    return choice.message.content, choice.finish_reason


def streamed(client: OpenAI, seed: int = 0, **more: object) -> tuple[str, str]:
    """The same, streamed."""
    chunks = client.chat.completions.create(model="model", messages=ASK, seed=seed, stream=True, **more)  # type: ignore[call-overload]
    text, reason = "", ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def assert_valid(client: OpenAI, seed: int) -> None:
    schema = random_schema(Random(seed))
    ask = streamed if seed % 3 == 0 else chat

    text, reason = ask(client, seed, response_format=strict(schema), temperature=1.0 if seed % 2 else 0.0)

    assert reason == "stop", (seed, schema, text)
    assert jsonschema_rs.is_valid(schema, json.loads(text)), (seed, schema, text)


def test_texts_are_valid_for_random_schemas(client: OpenAI) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: assert_valid(client, seed), range(30)))


@pytest.mark.slow
def test_texts_are_valid_for_two_hundred_random_schemas(client: OpenAI) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: assert_valid(client, seed), range(1000, 1200)))


def test_the_clients_own_parser_gets_its_model(client: OpenAI) -> None:
    from pydantic import BaseModel, Field

    class Part(BaseModel):
        label: str = Field(max_length=5)
        count: int = Field(ge=0, le=9)

    class Order(BaseModel):
        parts: list[Part] = Field(max_length=3)
        is_urgent: bool

    answer = client.chat.completions.parse(model="model", messages=ASK, response_format=Order, seed=3)

    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Order)


def test_json_object_gives_objects(client: OpenAI) -> None:
    found = [
        chat(client, seed, response_format={"type": "json_object"}, max_tokens=300, temperature=1.5)
        for seed in range(12)
    ]

    assert all(text.startswith("{") for text, _ in found)
    complete = [text for text, reason in found if reason == "stop"]
    assert complete, "some end by themselves"
    assert all(isinstance(json.loads(text), dict) for text in complete)


@pytest.mark.parametrize("is_newer", [False, True])
def test_vllms_fields_in_both_spellings(client: OpenAI, is_newer: bool) -> None:
    def wanted(name: str, value: object) -> dict[str, object]:
        return {"structured_outputs": {name: value}} if is_newer else {f"guided_{name}": value}

    for seed in range(5):
        text, _ = chat(client, seed, extra_body=wanted("regex", DATE))
        assert re.fullmatch(DATE, text)
        text, _ = streamed(client, seed, extra_body=wanted("choice", ["positive", "negative", "größer 日本"]))
        assert text in ("positive", "negative", "größer 日本")
        text, _ = chat(client, seed, extra_body=wanted("json", SCHEMA))
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text))
        text, _ = chat(client, seed, extra_body=wanted("json", json.dumps(SCHEMA)))
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text))
        text, _ = chat(client, seed, extra_body=wanted("grammar", 'start: "(" start ")" | "x"\n'), max_tokens=500)
        assert re.fullmatch(r"(\(*)x(\)*)", text)
        assert text.count("(") == text.count(")")
        text, _ = chat(client, seed, extra_body=wanted("grammar", 'root ::= "a" [0-9] [0-9]?\n'))
        assert re.fullmatch("a[0-9]{1,2}", text)


def test_completions_keep_to_a_grammar_for_every_prompt_and_choice(client: OpenAI) -> None:
    answer = client.completions.create(
        model="model", prompt=["One", "Two words", "3"], n=3, max_tokens=64, seed=5, extra_body={"guided_regex": DATE}
    )

    texts = [choice.text for choice in answer.choices]
    assert len(texts) == 9
    assert all(re.fullmatch(DATE, text) for text in texts)
    assert len(set(texts)) > 1


def test_the_same_seed_gives_the_same_guided_text_and_another_one_another(client: OpenAI) -> None:
    texts = [chat(client, seed, response_format=strict(SCHEMA))[0] for seed in (1, 1, 2, 3)]

    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_a_stop_string_ends_a_guided_text_before_its_grammar_does(client: OpenAI) -> None:
    text, reason = chat(client, extra_body={"guided_regex": "[0-9]{4}-[a-z]{30}"}, stop="-")

    assert re.fullmatch("[0-9]{4}", text)
    assert reason == "stop"


def test_too_few_tokens_cut_a_guided_text(client: OpenAI) -> None:
    text, reason = chat(client, response_format=strict(SCHEMA), max_tokens=3)

    assert reason == "length"
    assert text.startswith("{")


def test_logprobs_of_a_guided_text_are_the_models_own_and_cover_every_token(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="model", messages=ASK, seed=1, logprobs=True, top_logprobs=3, extra_body={"guided_regex": DATE}
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    assert all(-100 < entry.logprob <= 0 for entry in logprobs.content)
    tops = [{top.token for top in entry.top_logprobs} for entry in logprobs.content]
    assert any(entry.token not in top for entry, top in zip(logprobs.content, tops, strict=True)), (
        "the model would rather have said something else"
    )


@pytest.mark.parametrize(
    ("more", "param", "reason"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "textual"}}}},
         "response_format.json_schema.schema", "textual"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "textual"}}}, "response_format", "textual"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}}},
         "response_format.json_schema.schema", "not"),
        ({"guided_json": {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]}},
         "guided_json", "use anyOf"),
        ({"guided_regex": "[a"}, "guided_regex", "regex"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_json": "[1]"}, "guided_json", "object"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_choice": ["x"] * 1001}, "guided_choice", "1000"),
        ({"guided_grammar": "start: none"}, "guided_grammar", "none"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex", "regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"guided_choice": ["a"]}}, "structured_outputs", "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "one of them"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one of them"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "use_beam_search", "guided_regex"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend", "not supported"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_cannot_be_kept_is_refused_by_name_with_the_reason(
    server: RunningServer, path: str, more: dict[str, object], param: str, reason: str
) -> None:
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": ASK}

    answer = server.post(path, **{"model": "model", **prompt, **more})

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}},
        {"structured_outputs": None, "guided_json": None}, {"guided_decoding_backend": "auto"},
        {"structured_outputs": {"json_object": False, "disable_any_whitespace": False}},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_leaves_the_text_free(server: RunningServer, more: dict[str, object]) -> None:
    free = {"model": "model", "prompt": "x", "max_tokens": 8, "temperature": 0}

    plain = server.post("/v1/completions", **free).json()["choices"][0]["text"]

    assert server.post("/v1/completions", **free, **more).json()["choices"][0]["text"] == plain


@pytest.mark.parametrize(
    "more",
    [
        {"guided_json": {"$ref": "#"}},
        {"guided_grammar": "start: a\na: b\nb: a\n"},
        {"guided_regex": r"[^\x00-\U0010ffff]"},
        {"guided_grammar": 'start: "x" a\na: b\nb: a\n'},  # known only once there is an x
    ],
)
def test_a_grammar_that_no_text_fulfils_is_refused_with_what_to_change(
    server: RunningServer, more: dict[str, object]
) -> None:
    refused = server.post("/v1/completions", model="model", prompt="x", max_tokens=8, temperature=0, **more)

    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "invalid_grammar"
    assert "no text can go on" in error["message"]
    assert "give it one that ends" in error["message"]
    server.wait_idle()


def test_a_grammar_that_dies_on_the_way_is_the_requests_own_error(server: RunningServer, client: OpenAI) -> None:
    dying = 'start: a{1000000}\na: "x" | "xx"\n'

    with pytest.raises(openai.BadRequestError, match="too much work") as error:
        chat(client, extra_body={"guided_grammar": dying})
    with pytest.raises(openai.APIError, match="too much work"):
        streamed(client, extra_body={"guided_grammar": dying})

    assert error.value.code == "invalid_grammar"
    server.wait_idle()
