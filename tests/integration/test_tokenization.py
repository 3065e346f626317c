"""`/tokenize` and `/detokenize`: the tokens are those that generation computes, by transformers' word."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from builders import NullModel
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvwatch_engine.server import ServerSettings

TEXT = "Blöcke und 日本語 😀, also def f(x): pass"
MESSAGES = [{"role": "system", "content": "Kurz."}, {"role": "user", "content": TEXT}]
MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


@pytest.fixture(scope="module")
def truth(folder: Path) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(str(folder))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    settings = ServerSettings(max_body_bytes=2**20)
    with arithmetic_server(folder, NullModel(401), settings, max_model_len=MAX_MODEL_LEN) as running:
        yield running


def post(server: RunningServer, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_a_text_has_the_tokens_that_transformers_gives_it(
    server: RunningServer, truth: PreTrainedTokenizerFast
) -> None:
    answer = post(server, "/tokenize", prompt=TEXT).json()

    expected = truth(TEXT).input_ids
    assert answer == {
        "count": len(expected),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": expected,
        "token_strs": None,
    }
    named = post(server, "/tokenize", model=MODEL, prompt=TEXT, return_token_strs=True).json()
    assert named["token_strs"] == truth.convert_ids_to_tokens(expected)


@pytest.mark.parametrize("opens_answer", [True, False])
def test_a_conversation_has_the_tokens_of_its_template(
    server: RunningServer, truth: PreTrainedTokenizerFast, opens_answer: bool
) -> None:
    expected = truth.apply_chat_template(MESSAGES, add_generation_prompt=opens_answer, return_dict=False)

    answer = post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=opens_answer)

    assert answer.json()["tokens"] == expected


def test_a_conversation_counts_what_its_completion_counts(server: RunningServer) -> None:
    counted = post(server, "/tokenize", messages=MESSAGES).json()["count"]

    used = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()["usage"]["prompt_tokens"]

    assert counted == used


def test_tokens_become_the_text_again_special_ones_included(server: RunningServer) -> None:
    tokens = post(server, "/tokenize", prompt=f"<|start|>{TEXT}<|end|>").json()["tokens"]

    answer = post(server, "/detokenize", tokens=tokens)

    assert answer.json() == {"prompt": f"<|start|>{TEXT}<|end|>"}
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "a" * 500_000}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 600}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, 400,
         "chat_template_kwargs.tokenize"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"prompt": "a" * 2_000_000}, 413, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, 401]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * 513}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_by_name(
    server: RunningServer, path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    answer = post(server, path, **body)

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
