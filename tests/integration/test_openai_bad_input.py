"""Whatever is sent, the answer is a 4xx in OpenAI's shape that says the limit, and nothing stays behind."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from builders import NullModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer

from kvwatch_engine.server import ServerSettings

MAX_BODY_BYTES = 200_000
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    limits = ServerSettings(max_body_bytes=MAX_BODY_BYTES, body_seconds=1.0)
    with arithmetic_server(folder, NullModel(401), limits) as running:
        yield running


def assert_error(answer: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """Check the shape of an error and return its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert isinstance(error["type"], str)
    message = error["message"]
    assert isinstance(message, str)
    assert 10 < len(message) < 400
    assert "/tmp" not in message
    assert "Traceback" not in message
    return message


def post_raw(server: RunningServer, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=30)


# ---------------------------------------------------------------- the official client's classes


def test_the_official_client_raises_its_own_classes(server: RunningServer) -> None:
    with server.openai() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=[], max_tokens=1)
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], modalities=["text", "audio"]
            )

    assert (bad.value.param, bad.value.type) == ("messages", "invalid_request_error")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    assert (refused.value.param, refused.value.code) == ("modalities", "unsupported")


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'"text"',
        b"nul",
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    ],
    ids=repr,
)
def test_a_body_that_is_no_request_is_a_400(server: RunningServer, body: bytes) -> None:
    assert post_raw(server, body).status_code == 400
    assert set(post_raw(server, body).json()["error"]) == {"message", "type", "param", "code"}


def test_a_deeply_nested_body_is_a_400(server: RunningServer) -> None:
    nested = b'{"model":"m","messages":[],"metadata":' + b"[" * 90_000 + b"]" * 90_000 + b"}"

    message = assert_error(post_raw(server, nested), 400, code="invalid_json")

    assert "nested too deeply" in message


def test_duplicate_keys_are_harmless(server: RunningServer) -> None:
    body = json.dumps({"model": MODEL, "messages": HI, "max_tokens": 1}).replace("{", '{"max_tokens": 400, ', 1)

    answer = post_raw(server, body.encode())

    assert answer.json()["usage"]["completion_tokens"] == 1


def test_a_body_over_the_limit_is_a_413_that_says_the_limit(server: RunningServer) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * MAX_BODY_BYTES}]}).encode()

    message = assert_error(post_raw(server, body), 413)

    assert str(MAX_BODY_BYTES) in message


def test_a_body_without_a_length_is_measured_while_it_comes_in(server: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 10_000

    answer = httpx.post(
        f"{server.url}/v1/completions", content=pieces(), headers={"content-type": "application/json"}, timeout=30
    )

    assert_error(answer, 413)
    assert answer.headers["connection"] == "close"


def test_a_body_without_an_end_is_not_read_for_ever(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(20)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        num_sent = 0
        try:
            while num_sent < 10_000:
                connection.sendall(piece)
                num_sent += 1
        except OSError:
            pass

    assert num_sent * 0x10000 < MAX_BODY_BYTES * 100
    assert server.get("/health").status_code == 200


def test_a_body_that_does_not_arrive_is_a_408(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(20)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        begin = time.monotonic()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))  # until the server closes

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"message"' in answer
    assert 0.9 < time.monotonic() - begin < 15


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_what_any_web_page_could_send_is_a_415(server: RunningServer, kind: str) -> None:
    body = json.dumps({"model": MODEL, "messages": HI}).encode()

    message = assert_error(post_raw(server, body, content_type=kind), 415)

    assert "application/json" in message


def test_huge_headers_are_refused_and_the_server_goes_on(server: RunningServer) -> None:
    """CVE-2025-48956: a huge header."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(10)
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 10_000_000)
            answer = connection.recv(100)
        except ConnectionError:
            answer = b"HTTP/1.1 400 "  # refused before all of it was sent

    assert answer.startswith(b"HTTP/1.1 4")
    assert server.get("/health").status_code == 200


# ---------------------------------------------------------------- paths and methods


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/v2/models", "/health/x", "/docs"])
def test_an_unknown_path_is_a_404(server: RunningServer, path: str) -> None:
    assert_error(server.get(path), 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/completions"), ("PUT", "/v1/chat/completions"), ("DELETE", "/v1/models"), ("POST", "/health")],
)
def test_a_wrong_method_is_a_405_that_names_the_right_one(server: RunningServer, method: str, path: str) -> None:
    answer = httpx.request(method, f"{server.url}{path}")

    message = assert_error(answer, 405)

    assert answer.headers["allow"].split(", ")[0] in message


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["ok", ""]])
def test_an_empty_prompt_is_refused(server: RunningServer, prompt: object) -> None:
    message = assert_error(server.post("/v1/completions", prompt=prompt), 400, "prompt")

    assert "at least one token" in message


@pytest.mark.parametrize("token", [-1, 401, 2**31, 2**63, 10**30])
def test_token_ids_outside_the_vocabulary_are_refused(server: RunningServer, token: int) -> None:
    message = assert_error(server.post("/v1/completions", prompt=[5, token]), 400, "prompt")

    assert "0 to 400" in message


@pytest.mark.parametrize("prompt", [[True], [1.5], [[1, "a"]], [[[1]]], {"a": 1}, 5, None], ids=str)
def test_a_prompt_of_another_type_is_refused(server: RunningServer, prompt: object) -> None:
    answer = server.post("/v1/completions", prompt=prompt)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("prompt", "unit"), [("word " * 600, "tokens"), ("a b " * 40_000, "characters"), ([7] * 600, "tokens")]
)
def test_a_prompt_that_is_too_long_is_refused_with_openais_code(
    server: RunningServer, prompt: object, unit: str
) -> None:
    answer = server.post("/v1/completions", prompt=prompt)

    message = assert_error(answer, 400, "prompt", "context_length_exceeded")
    assert "512 tokens" in message
    assert unit in message


def test_messages_and_parts_that_are_too_many_are_refused(server: RunningServer) -> None:
    parts = [{"type": "text", "text": ""}] * 600
    messages = server.post("/v1/chat/completions", messages=[{"role": "user", "content": ""}] * 3000)
    in_one = server.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}])

    assert "3000 messages" in assert_error(messages, 400, "messages", "context_length_exceeded")
    assert "600 parts" in assert_error(in_one, 400, "messages", "context_length_exceeded")


def test_messages_that_the_template_refuses_are_a_400_in_the_templates_words(server: RunningServer) -> None:
    answer = server.post("/v1/chat/completions", messages=[{"role": "assistant", "content": "I begin"}])

    assert "an answer cannot come first" in assert_error(answer, 400, "messages")


def test_a_model_without_a_template_says_what_to_use_instead(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, byte_level_tokenizer(), chat_template=None)
    with arithmetic_server(folder, NullModel(401)) as server:
        message = assert_error(server.post("/v1/chat/completions", messages=HI), 400, "messages")

    assert "/v1/completions" in message
    assert "--chat-template" in message


def test_a_prompt_larger_than_the_pool_is_refused_at_once(folder: Path) -> None:
    with arithmetic_server(folder, NullModel(401), num_blocks=11, max_model_len=512) as server:
        too_long = server.post("/v1/completions", prompt=[7] * 41, max_tokens=1)
        too_many = server.post("/v1/completions", prompt=[7] * 20, max_tokens=12, n=8)

        assert_error(too_long, 400, "prompt", "context_length_exceeded")
        message = assert_error(too_many, 400, "max_tokens", "context_length_exceeded")
        assert "8 choices" in message
        assert server.post("/v1/completions", prompt=[7] * 30, max_tokens=9).status_code == 200
        server.wait_idle()


def test_more_choices_than_can_run_are_refused(server: RunningServer) -> None:
    assert_error(server.post("/v1/completions", prompt="a", n=17), 400, "n")
    assert_error(server.post("/v1/completions", prompt="a", n=9, max_tokens=1), 400, "n")  # 8 sequences can run
    assert_error(server.post("/v1/completions", prompt=["a"] * 129), 400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"), ({"best_of": 1, "n": 2}, "best_of"), ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"), ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"suffix": "end"}, "suffix"), ({"cache_salt": "x" * 129}, "cache_salt"), ({"prompt": [0] * 10_000}, "prompt"),
    ],
    ids=str,
)  # fmt: skip
def test_what_completions_cannot_do_is_refused_by_name(
    server: RunningServer, fields: dict[str, object], param: str
) -> None:
    answer = server.post("/v1/completions", **{"prompt": "a", **fields})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


def test_best_of_that_equals_n_is_n(server: RunningServer) -> None:
    answer = server.post("/v1/completions", prompt="a", n=2, best_of=2, max_tokens=2)

    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]


def test_if_one_prompt_of_many_is_refused_none_runs(server: RunningServer) -> None:
    answer = server.post("/v1/completions", prompt=[[7], [7] * 300, [7] * 600])

    assert_error(answer, 400, "prompt", "context_length_exceeded")
    server.wait_idle()


def test_a_long_prompt_does_not_stop_the_server_while_it_is_tokenised(folder: Path) -> None:
    """vllm#765, #1026, #10635: tokenising a long prompt blocked the event loop."""
    limits = ServerSettings(max_body_bytes=32_000_000)
    with arithmetic_server(folder, NullModel(401), limits, num_blocks=500_000, max_model_len=1_000_000) as server:
        done = threading.Event()
        answers: list[httpx.Response] = []

        def send() -> None:
            answers.append(server.post("/v1/completions", prompt="some words and more of them " * 200_000))
            done.set()

        thread = threading.Thread(target=send)
        begin = time.monotonic()
        thread.start()
        slowest = 0.0
        with httpx.Client(base_url=server.url) as client:
            while not done.is_set():
                asked = time.monotonic()
                assert client.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - asked)
                time.sleep(0.01)
        thread.join()
        took = time.monotonic() - begin

    assert_error(answers[0], 400, "prompt", "context_length_exceeded")
    assert took > 1
    assert slowest < took / 3


# ---------------------------------------------------------------- anything at all

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.sampled_from([2**31, 2**64, -(2**70)])
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("0x", max_size=2), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
FIELDS = [
    "n", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop",
    "stop_token_ids", "ignore_eos", "cache_salt", "logprobs", "top_logprobs", "echo", "best_of", "messages", "prompt",
    "tools", "user", "model", "chat_template_kwargs", "use_beam_search", "beam_width", "length_penalty",
    "early_stopping",
]  # fmt: skip


@given(st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
       st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))  # fmt: skip
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_request_is_answered_or_refused_and_leaves_nothing_behind(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": MODEL, "messages": HI, "prompt": "hi", "max_tokens": 4, **fields}

    answer = post_raw(server, json.dumps(body).encode("utf-8", "surrogatepass"), path)

    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    server.wait_idle()
