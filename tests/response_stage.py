"""A server of a scripted model and the official client, which checks that answers have the shape of its types."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from openai.types.responses import Response
from openai_server import MODEL, RunningServer, arithmetic_server, save_tokenizer
from tool_stage import CHAT_TEMPLATES, ScriptedModel, TemplateName, tool_tokenizer

from kvwatch_engine.server import ServerSettings
from kvwatch_engine.server.api_keys import ApiKeys

OPEN = "<|start|>assistant\n"
"""What the template ends a prompt with."""


def turn(role: str, text: str) -> str:
    """Return what the template makes of a message."""
    return f"<|start|>{role}\n{text}<|end|>\n"


class ResponseStage:
    """The server, its model and its client."""

    def __init__(self, server: RunningServer, model: ScriptedModel, client: OpenAI) -> None:
        self.server = server
        self.model = model
        self.client = client

    def ask(self, given: Any = "Hi", says: str | None = None, **more: Any) -> Response:
        """Return the response to an input; the model answers `says`, or what it said last."""
        if says is not None:
            self.model.say(says)
        answer = self.client.responses.create(model=MODEL, input=given, **more)
        assert isinstance(answer, Response)
        return answer

    def stream(self, given: Any = "Hi", says: str | None = None, **more: Any) -> list[Any]:
        """Return the events of a response."""
        if says is not None:
            self.model.say(says)
        return list(self.client.responses.create(model=MODEL, input=given, stream=True, **more))

    def post(self, **body: object) -> httpx.Response:
        """Send a body without any client in between."""
        return self.server.post("/v1/responses", **{"input": "Hi", **body})


@contextmanager
def response_stage(
    folder: Path,
    template: TemplateName = "hermes",
    settings: ServerSettings | None = None,
    api_keys: ApiKeys | None = None,
    key: str = "none",
    max_model_len: int = 2048,
) -> Iterator[ResponseStage]:
    """Serve a scripted model with the template of a family of tool calls."""
    tokenizer = tool_tokenizer()
    model = ScriptedModel(tokenizer)
    save_tokenizer(folder, tokenizer, CHAT_TEMPLATES[template])
    with (
        arithmetic_server(
            folder, model, settings, api_keys=api_keys, num_blocks=1025, max_model_len=max_model_len
        ) as server,
        client_of(server, key) as client,
    ):
        yield ResponseStage(server, model, client)


@contextmanager
def client_of(server: RunningServer, key: str) -> Iterator[OpenAI]:
    """Give the official client, which refuses answers that are not of its types."""
    with OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=180, _strict_response_validation=True
    ) as client:
        yield client
