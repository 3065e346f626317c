"""The served OpenAPI document: all that is served is in it, and requests made up from it find no server error."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from builders import NullModel
from openai_server import RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer
from schemathesis_runs import run_schemathesis
from starlette.routing import Route


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    folder = save_tokenizer(tmp_path / "model", byte_level_tokenizer())
    with arithmetic_server(folder, NullModel(401)) as running:
        yield running


def test_the_document_tells_of_every_route_and_of_no_other(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()

    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (method, route.path.replace(":path", ""))
        for route in server.app.routes
        if isinstance(route, Route)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert told == served
    assert len(told) >= 14
    request = document["components"]["schemas"]["ResponseRequest"]["properties"]
    assert {"input", "previous_response_id", "truncation", "seed"} <= set(request)
    assert not {"max_tokens", "background", "messages"} & set(request), "what is refused is not told of"


def test_embeddings_are_refused_by_name(server: RunningServer) -> None:
    answer = server.post("/v1/embeddings", input="a text")

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    assert "embedding model" in answer.json()["error"]["message"]


def test_made_up_requests_have_documented_answers(server: RunningServer, tmp_path: Path) -> None:
    run_schemathesis("api", server.url, 4, tmp_path)
    server.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_many_made_up_requests_have_documented_answers(server: RunningServer, tmp_path: Path) -> None:
    run_schemathesis("api", server.url, 150, tmp_path)
    server.wait_idle()
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
