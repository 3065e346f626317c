"""Answers over HTTP through the official client, on the real engine with an arithmetic model whose tokens are known."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from builders import NullModel
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer, wait_until
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvwatch_engine.server import ServerSettings

END_TOKEN = 3
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe? 😀"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(str(folder))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> NullModel:
    return NullModel(401)


@pytest.fixture(scope="module")
def server(folder: Path, model: NullModel) -> Iterator[RunningServer]:
    async def metrics(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("up 1\n")(scope, receive, send)

    with arithmetic_server(folder, model, metrics_app=metrics) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client
    server.wait_idle()


class Truth:
    """What the arithmetic model answers."""

    def __init__(self, model: NullModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def chat_prompt(self, messages: list[ChatCompletionMessageParam] = MESSAGES, **variables: object) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=False, **variables
        )
        assert isinstance(ids, list)
        return ids

    def text_prompt(self, text: str) -> list[int]:
        ids = self._tokenizer(text).input_ids
        assert isinstance(ids, list)
        return ids

    def tokens(self, prompt: list[int], seed: int, max_tokens: int, *, ends: bool = True) -> list[int]:
        found: list[int] = []
        while len(found) < max_tokens and not (ends and END_TOKEN in found):
            found.append(self._model.next_token(prompt, seed, len(found)))
        return found

    def text(self, prompt: list[int], seed: int, max_tokens: int) -> str:
        return self.decode(self.tokens(prompt, seed, max_tokens))

    def decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def seed_that_ends(self, prompt: list[int], max_tokens: int) -> int:
        """Return a seed whose text ends with the end token before `max_tokens`."""
        return next(seed for seed in range(1009) if 5 < len(self.tokens(prompt, seed, max_tokens)) < max_tokens)


@pytest.fixture(scope="module")
def truth(model: NullModel, tokenizer: PreTrainedTokenizerFast) -> Truth:
    return Truth(model, tokenizer)


def unique_text() -> str:
    """Return a prompt that no other test has put into the prefix cache."""
    return f"{uuid.uuid4().hex} and so on"


# ---------------------------------------------------------------- chat


def test_a_chat_answer_is_what_the_model_says_after_the_rendered_template(client: OpenAI, truth: Truth) -> None:
    prompt = truth.chat_prompt()

    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=7, max_tokens=24)

    [choice] = answer.choices
    assert choice.message.content == truth.text(prompt, 7, 24)
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    assert answer.usage.total_tokens == len(prompt) + 24


def test_an_answer_that_the_model_ends_says_stop_and_shows_no_end_token(client: OpenAI, truth: Truth) -> None:
    prompt = truth.chat_prompt()
    seed = truth.seed_that_ends(prompt, 100)
    tokens = truth.tokens(prompt, seed, 100)

    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=seed)

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == truth.decode(tokens)
    assert "<|end|>" not in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(tokens)


def test_ignore_eos_goes_on_to_max_tokens(client: OpenAI, truth: Truth) -> None:
    seed = truth.seed_that_ends(truth.chat_prompt(), 100)

    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=seed, max_tokens=100, extra_body={"ignore_eos": True}
    )

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 100


def test_without_max_tokens_a_chat_answer_may_fill_what_fits(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, extra_body={"ignore_eos": True})

    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_text_parts_are_joined_to_lines(client: OpenAI, truth: Truth) -> None:
    parts: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    ]

    answer = client.chat.completions.create(model=MODEL, messages=parts, seed=1, max_tokens=9)

    prompt = truth.chat_prompt([{"role": "user", "content": "one\ntwo"}])
    assert answer.choices[0].message.content == truth.text(prompt, 1, 9)


def test_the_one_template_variable_that_may_be_set_reaches_the_template(client: OpenAI, truth: Truth) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=1, max_tokens=9,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip

    quiet = truth.chat_prompt(enable_thinking=False)
    assert quiet != truth.chat_prompt()
    assert answer.choices[0].message.content == truth.text(quiet, 1, 9)


def test_a_chat_stream_has_the_role_first_the_reason_last_and_the_same_text(client: OpenAI, truth: Truth) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=7, max_tokens=40, stream=True))

    choices = [chunk.choices[0] for chunk in chunks]
    assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
    assert "".join(choice.delta.content or "" for choice in choices) == truth.text(truth.chat_prompt(), 7, 40)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert all(choice.delta.role is None for choice in choices[1:])
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_never_shows_half_a_character(client: OpenAI, truth: Truth) -> None:
    text = "👩‍👩‍👧‍👦 Größe 日本"
    stream = client.completions.create(
        model=MODEL, prompt=text, echo=True, seed=7, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )

    shown = "".join(chunk.choices[0].text for chunk in stream)

    assert shown == text + truth.decode(truth.tokens(truth.text_prompt(text), 7, 200, ends=False))


def test_usage_comes_in_a_chunk_of_its_own_and_is_null_before(server: RunningServer, truth: Truth) -> None:
    body = {"messages": MESSAGES, "seed": 7, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}

    answer = server.post("/v1/chat/completions", **body)

    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    num_prompt = len(truth.chat_prompt())
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (num_prompt, 5)
    assert chunks[-1]["choices"][0]["delta"] == {}


def test_without_the_option_chunks_have_no_usage_at_all(server: RunningServer) -> None:
    answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=3, stream=True)

    assert '"usage"' not in answer.text


def test_three_choices_have_their_indices_and_the_first_is_that_of_n_1(client: OpenAI, truth: Truth) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=5, max_tokens=12, n=3)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].message.content == truth.text(truth.chat_prompt(), 5, 12)
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(truth.chat_prompt())
    assert answer.usage.completion_tokens == 36


def test_three_streamed_choices_are_the_three_that_are_not_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=5, max_tokens=12, n=3)
    texts, reasons = ["", "", ""], ["", "", ""]
    for chunk in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=5, max_tokens=12, n=3, stream=True
    ):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += choice.finish_reason or ""

    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * 3


def test_the_same_seed_gives_the_same_text_and_another_one_another(client: OpenAI) -> None:
    def answer(seed: int) -> str | None:
        created = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=seed, max_tokens=20)
        return created.choices[0].message.content

    assert answer(-5) == answer(-5) != answer(6)


# ---------------------------------------------------------------- completions


def test_prompts_as_text_and_as_token_ids_give_the_same_answers_in_order(client: OpenAI, truth: Truth) -> None:
    texts = ["one block", "Größe", "x"]
    token_ids = [truth.text_prompt(text) for text in texts]
    expected = [truth.text(prompt, 3, 10) for prompt in token_ids]

    from_texts = client.completions.create(model=MODEL, prompt=texts, seed=3, max_tokens=10)
    from_ids = client.completions.create(model=MODEL, prompt=token_ids, seed=3, max_tokens=10)
    single = client.completions.create(model=MODEL, prompt=token_ids[1], seed=3, max_tokens=10)

    assert [choice.text for choice in from_texts.choices] == expected
    assert [choice.text for choice in from_ids.choices] == expected
    assert [choice.text for choice in single.choices] == [expected[1]]
    assert [choice.index for choice in from_texts.choices] == [0, 1, 2]
    assert from_texts.usage is not None
    assert from_texts.usage.prompt_tokens == sum(map(len, token_ids))
    assert from_texts.usage.completion_tokens == 30


def test_two_prompts_with_two_choices_each_are_numbered_prompt_by_prompt(client: OpenAI, truth: Truth) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=3, max_tokens=6, echo=True)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]
    assert answer.choices[2].text == "b" + truth.text(truth.text_prompt("b"), 3, 6)


def test_echo_puts_the_prompt_before_the_text_also_in_streams_and_for_token_ids(client: OpenAI, truth: Truth) -> None:
    prompt = truth.text_prompt("Größe 😀")

    whole = client.completions.create(model=MODEL, prompt=prompt, seed=3, max_tokens=10, echo=True)
    stream = client.completions.create(model=MODEL, prompt=prompt, seed=3, max_tokens=10, echo=True, stream=True)

    expected = "Größe 😀" + truth.text(prompt, 3, 10)
    assert whole.choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_a_completion_has_sixteen_tokens_unless_told_otherwise(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", seed=3, extra_body={"ignore_eos": True})

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert (answer.object, answer.id[:5], answer.choices[0].logprobs) == ("text_completion", "cmpl-", None)


# ---------------------------------------------------------------- stop


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_is_not_in_the_text_and_ends_the_work(client: OpenAI, truth: Truth, is_stream: bool) -> None:
    text = unique_text()
    full = truth.text(truth.text_prompt(text), 11, 300)
    stop = full[len(full) // 2 : len(full) // 2 + 5]

    if is_stream:
        chunks = list(client.completions.create(
            model=MODEL, prompt=text, seed=11, max_tokens=300, stop=[stop, "never"], stream=True
        ))  # fmt: skip
        shown, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(model=MODEL, prompt=text, seed=11, max_tokens=300, stop=stop)
        shown, reason = answer.choices[0].text, answer.choices[0].finish_reason

    assert shown == full[: full.index(stop)]
    assert reason == "stop"


def test_a_stop_string_ends_only_its_own_choice(client: OpenAI) -> None:
    prompt = unique_text()
    free = client.completions.create(model=MODEL, prompt=prompt, seed=2, max_tokens=60, n=3)
    stop = next(
        free.choices[1].text[begin : begin + 4]
        for begin in range(10, 50)
        if all(free.choices[1].text[begin : begin + 4] not in free.choices[other].text for other in (0, 2))
    )

    stopped = client.completions.create(model=MODEL, prompt=prompt, seed=2, max_tokens=60, n=3, stop=stop)

    assert [stopped.choices[place].text for place in (0, 2)] == [free.choices[place].text for place in (0, 2)]
    assert stopped.choices[1].text == free.choices[1].text[: free.choices[1].text.index(stop)]
    assert stopped.choices[1].finish_reason == "stop"


def test_a_stop_token_ends_the_text_before_it(client: OpenAI, truth: Truth) -> None:
    prompt = truth.text_prompt(unique_text())
    tokens = truth.tokens(prompt, 4, 40)
    stop = tokens[20]

    answer = client.completions.create(
        model=MODEL, prompt=prompt, seed=4, max_tokens=40, extra_body={"stop_token_ids": [stop]}
    )

    assert answer.choices[0].text == truth.decode(tokens[: tokens.index(stop)])
    assert answer.choices[0].finish_reason == "stop"


# ---------------------------------------------------------------- usage, models, service


def test_usage_tells_which_prompt_tokens_were_cached(client: OpenAI, truth: Truth) -> None:
    prompt = unique_text() * 3
    num_tokens = len(truth.text_prompt(prompt))

    def cached() -> int | None:
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    assert cached() == (num_tokens - 1) // 4 * 4  # full blocks of 4, the last token always computed anew


def test_a_cache_salt_keeps_prefixes_apart(client: OpenAI) -> None:
    """CVE-2025-46570: the time to the first token tells whether somebody else sent the same prefix."""
    prompt = unique_text() * 3

    def cached(salt: str) -> int | None:
        usage = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, extra_body={"cache_salt": salt}
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens

    assert [bool(cached(salt)) for salt in ("a", "b", "a", "")] == [False, False, True, False]


def test_the_model_is_listed_and_found_by_its_name_with_a_slash(client: OpenAI) -> None:
    [listed] = client.models.list().data

    assert client.models.retrieve(MODEL) == listed
    assert listed.id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("tests/other")
    assert caught.value.code == "model_not_found"


def test_health_readiness_version_and_metrics_answer(server: RunningServer) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/version").json()["version"]
    assert server.get("/metrics").text == "up 1\n"


def test_a_sane_request_id_of_the_client_is_kept_and_any_other_replaced(server: RunningServer) -> None:
    def answered(given: str) -> str:
        answer = httpx.get(f"{server.url}/health", headers={"x-request-id": given})
        return str(answer.headers["x-request-id"])

    assert answered("job-17/b:2") == "job-17/b:2"
    assert answered("a b").startswith("req_")
    assert answered("x" * 129).startswith("req_")
    assert answered("") != answered("")


def test_the_log_has_one_line_for_a_request_with_its_counts_and_no_text(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "kvwatch.server"):
        content = [{"role": "user", "content": "secret words"}]
        answer_id = server.post("/v1/chat/completions", messages=content, max_tokens=3).json()["id"]
        wait_until(lambda: answer_id in caplog.text)

    # The line of a request that another test streamed may come as late as this.
    [line] = [record.getMessage() for record in caplog.records if answer_id in record.getMessage()]
    assert "generated_tokens=3" in line
    assert "status=200" in line
    assert "secret" not in caplog.text


def test_the_log_line_of_a_refused_request_says_which_parameter_and_which_error_and_no_text(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    def line_with(part: str) -> str:
        wait_until(lambda: part in caplog.text)
        [line] = [record.getMessage() for record in caplog.records if part in record.getMessage()]
        return line

    with caplog.at_level("INFO", "kvwatch.server"):
        server.post("/v1/completions", prompt="secret words", temperature=3)
        hot = line_with("error_param='temperature'")
        server.post("/v1/completions", prompt="secret words", model="secret")
        unknown = line_with("error_param='model'")
        server.get("/v1/nothing")
        path = line_with("path='/v1/nothing'")

    assert "status=400" in hot
    assert "error_code" not in hot
    assert "status=404" in unknown
    assert "error_code='model_not_found'" in unknown
    assert "status=404" in path
    assert "error_" not in path
    assert "secret" not in caplog.text


def test_prompts_are_logged_only_when_asked_for_and_with_the_request_id(
    folder: Path, model: NullModel, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        arithmetic_server(folder, model, ServerSettings(log_prompts=True)) as server,
        caplog.at_level("INFO", "kvwatch.server"),
    ):
        server.post("/v1/completions", prompt="open words", max_tokens=3)
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "more words"}], max_tokens=3)

    assert "open words" in caplog.text
    assert "<|start|>user\\nmore words" in caplog.text
