"""`/v1/responses` on real, if tiny, models: the text, log-probabilities and images are those of chat completions."""

from collections.abc import Iterator
from typing import Any

import pytest
from image_oracle import NUM_NEW_TOKENS, Oracle
from image_stage import NAME, Stage, data_url, serving
from model_server import model_server
from openai import OpenAI
from openai.types.responses import ResponseOutputMessage
from response_stage import client_of
from tiny_models import make_tiny_model
from tiny_vision_model import IMAGE, NUM_IMAGE_TOKENS, make_tiny_vision_model, picture

LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("tiny"))
    with model_server(folder) as server, client_of(server, "none") as made:
        yield made


def logprobs_of(message: Any) -> list[tuple[str, float, list[tuple[str, float]]]]:
    return [(entry.token, entry.logprob, [(top.token, top.logprob) for top in entry.top_logprobs]) for entry in message]


def test_log_probabilities_are_those_of_chat_completions_streamed_or_not(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "Hi"}], seed=1, max_tokens=12, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    asked: dict[str, Any] = {
        "model": "model", "input": "Hi", "max_output_tokens": 12, "include": LOGPROBS, "top_logprobs": 3,
        "extra_body": {"seed": 1},
    }  # fmt: skip

    whole = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))

    assert chat.choices[0].logprobs is not None
    expected = logprobs_of(chat.choices[0].logprobs.content)
    [message] = whole.output
    assert isinstance(message, ResponseOutputMessage)
    assert whole.output_text == chat.choices[0].message.content
    assert logprobs_of(message.content[0].logprobs) == expected  # type: ignore[union-attr]
    assert len(expected) == whole.usage.output_tokens
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert logprobs_of(streamed) == expected
    assert logprobs_of(events[-1].response.output[0].content[0].logprobs) == expected


def test_a_conversation_that_continues_finds_its_beginning_in_the_prefix_cache(client: OpenAI) -> None:
    first = client.responses.create(model="model", input="word " * 40, max_output_tokens=20)
    second = client.responses.create(model="model", input="So?", previous_response_id=first.id, max_output_tokens=2)

    assert first.usage is not None
    assert second.usage is not None
    details = second.usage.input_tokens_details
    assert details.cached_tokens >= first.usage.input_tokens // 8 * 8 - 8
    assert details.cached_tokens + details.cache_write_tokens == second.usage.input_tokens


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = make_tiny_vision_model(tmp_path_factory.mktemp("llava"))
    with serving(folder) as server:
        yield Stage(server, Oracle(folder))


def shown(seed: int, **more: object) -> dict[str, object]:
    return {"type": "input_image", "image_url": data_url(picture(seed)), **more}


def ask(stage: Stage, given: object, **more: object) -> dict[str, Any]:
    body = {"max_output_tokens": NUM_NEW_TOKENS, "temperature": 0, "ignore_eos": True, **more}
    answer = stage.server.post("/v1/responses", model=NAME, input=given, **body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert isinstance(told, dict)
    return told


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["output"][0]["content"][0]["text"])


def test_images_are_seen_as_transformers_sees_them_and_stay_in_the_conversation(images: Stage) -> None:
    given = [{"role": "user", "content": [shown(1, detail="low"), {"type": "input_text", "text": "what is this?"}]}]
    prompt = images.prompt(f"{IMAGE}what is this?", 1)

    first = ask(images, given)
    second = ask(images, "and now?", previous_response_id=first["id"])

    assert text_of(first) == images.expected(prompt)
    assert first["usage"]["input_tokens"] == len(prompt.token_ids)
    assert second["usage"]["input_tokens"] > len(prompt.token_ids) + NUM_NEW_TOKENS
    [item, _, _] = images.server.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
    assert item["content"][0] == shown(1, detail="low")


def test_images_go_with_the_turns_that_are_cut(images: Stage) -> None:
    given = [{"role": "user", "content": [shown(seed), {"type": "input_text", "text": "look"}]} for seed in (1, 2, 3)]
    room = NUM_IMAGE_TOKENS * 2 + 60

    answer = ask(images, given, truncation="auto", max_output_tokens=400 - room)

    assert NUM_IMAGE_TOKENS < answer["usage"]["input_tokens"] <= room


def test_an_image_that_is_none_is_refused_where_it_stands(images: Stage) -> None:
    refused = [
        images.server.post("/v1/responses", model=NAME, input=[{"role": "user", "content": [part]}])
        for part in (
            {"type": "input_image", "image_url": "https://example.com/a.png"},
            {"type": "input_image", "file_id": "file-1"},
            {"type": "input_image"},
            shown(1, detail="ultra"),
        )
    ]

    assert [answer.status_code for answer in refused] == [400] * 4
    assert [answer.json()["error"]["param"] for answer in refused] == [
        f"input[0].content[0].{name}" for name in ("image_url", "file_id", "image_url", "detail")
    ]
