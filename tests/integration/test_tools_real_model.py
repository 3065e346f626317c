"""Calls that a tiny random model is held to: valid arguments, the same streamed, log-probabilities of every token."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from model_server import model_server
from openai import OpenAI
from random_schemas import random_schema
from tiny_models import make_tiny_model

NUM_TOOLS = 6


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    with model_server(folder, num_blocks=1500) as server, server.openai() as made:
        yield made


def ask(client: OpenAI, seed: int, **more: Any) -> Any:
    schemas = {f"tool_{number}": random_schema(Random(seed * NUM_TOOLS + number)) for number in range(NUM_TOOLS)}
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()
    ]
    answer = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "Call one."}], tools=tools, tool_choice="required",
        parallel_tool_calls=False, seed=seed, logprobs=True, **more,
    )  # fmt: skip
    return answer, schemas


@pytest.mark.parametrize("seed", range(6))
def test_required_calls_have_valid_arguments_and_logprobs_of_every_token(client: OpenAI, seed: int) -> None:
    answer, schemas = ask(client, seed)

    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert jsonschema_rs.is_valid(schemas[call.function.name], json.loads(call.function.arguments))
    assert len(choice.logprobs.content) == answer.usage.completion_tokens

    chunks, _ = ask(client, seed, stream=True)
    arguments, num_logprobs = "", 0
    for chunk in chunks:
        for part in chunk.choices:
            num_logprobs += len(part.logprobs.content) if part.logprobs else 0
            arguments += "".join(each.function.arguments or "" for each in part.delta.tool_calls or [])
    assert arguments == call.function.arguments
    assert num_logprobs == answer.usage.completion_tokens
