"""API keys over HTTP: who gets in, whose tenant the telemetry names, and that tenants share no blocks."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from builders import NullModel, Recorder
from openai import AuthenticationError, OpenAI
from openai_server import MODEL, RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer, wait_until

from kvwatch.telemetry.events import RequestFinished, RequestQueued, RequestRejected
from kvwatch_engine.server.api_keys import ApiKeys

BLUE, BLUE_TOO, GREEN, SHARED, SHARED_TOO = (letter * 20 for letter in "abcde")
KEYS = f"""
[keys.laptop]
key = "{BLUE}"
tenant = "blue"
[keys.desktop]
key = "{BLUE_TOO}"
tenant = "blue"
[keys.green]
key = "{GREEN}"
[keys.one]
key = "{SHARED}"
[keys.two]
key = "{SHARED_TOO}"
[tenants.one]
salt = "both"
[tenants.two]
salt = "both"
"""
PROMPT = list(range(4, 24))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


@pytest.fixture
def server(folder: Path, key_file: Path) -> Iterator[RunningServer]:
    with arithmetic_server(folder, NullModel(401), api_keys=ApiKeys(str(key_file))) as running:
        yield running


def ask(server: RunningServer, key: str | None, **body: object) -> httpx.Response:
    headers = {"x-kvwatch-tenant": "somebody-else"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return httpx.post(
        f"{server.url}/v1/completions",
        json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **body},
        headers=headers,
        timeout=60,
    )


def num_cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1", "/nothing", "//health"]
)
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", BLUE)],
        [("authorization", f"Basic {BLUE}")],
        [("authorization", f"Bearer {BLUE}x")],
        [("authorization", "Bearer " + "x" * 5000)],
        [("authorization", f"Bearer {BLUE}"), ("authorization", f"Bearer {GREEN}")],
        [("x-api-key", BLUE)],
        [("authorization", "Bearer \xff\xfe")],
    ],
)
def test_nobody_gets_in_without_a_key_wherever_he_knocks(
    server: RunningServer, path: str, headers: list[tuple[str, str]]
) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{server.url}{path}", headers=raw, timeout=60)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert BLUE not in answer.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_probes_need_no_key(server: RunningServer, path: str) -> None:
    assert server.get(path).status_code == 200


def test_the_official_client_gets_in_with_a_key_and_its_own_error_without(server: RunningServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key=GREEN, max_retries=0, timeout=60) as client:
        assert client.completions.create(model=MODEL, prompt="hi", max_tokens=2).choices
        assert [model.id for model in client.models.list()] == [MODEL]
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0, timeout=60) as client,
        pytest.raises(AuthenticationError, match="unknown or expired"),
    ):
        client.models.list()


def test_telemetry_names_the_keys_tenant_and_not_what_a_header_says(server: RunningServer) -> None:
    recorder = Recorder(server.log)
    assert ask(server, BLUE).status_code == 200
    assert ask(server, None).status_code == 401
    server.wait_idle()
    wait_until(lambda: any(isinstance(event, RequestRejected) for event in recorder.drain()), 60)

    (queued,) = [event for event in recorder.events if isinstance(event, RequestQueued)]
    (finished,) = [event for event in recorder.events if isinstance(event, RequestFinished)]
    (rejected,) = [event for event in recorder.events if isinstance(event, RequestRejected)]
    assert (queued.tenant, finished.tenant) == ("blue", "blue")
    assert (rejected.reason, rejected.tenant) == ("unauthorized", "")


def test_blocks_are_shared_within_a_tenant_and_between_those_of_equal_salt_only(server: RunningServer) -> None:
    assert num_cached(ask(server, BLUE)) == 0
    assert num_cached(ask(server, BLUE_TOO)) == 16
    assert num_cached(ask(server, GREEN)) == 0
    assert num_cached(ask(server, SHARED)) == 0
    assert num_cached(ask(server, SHARED_TOO)) == 16


def test_a_requests_own_salt_parts_a_tenant_further_and_never_leads_to_another(server: RunningServer) -> None:
    """Whatever a client sends as salt, it stays within its own tenant."""
    assert num_cached(ask(server, BLUE)) == 0
    for salt in ("tenant:blue", "blue", "salt:both", "both"):
        assert num_cached(ask(server, GREEN, cache_salt=salt)) == 0
        assert num_cached(ask(server, GREEN, cache_salt=salt)) == 16
        assert num_cached(ask(server, BLUE, cache_salt=salt)) == 0


def test_a_key_that_is_taken_out_of_the_file_is_refused_at_once(server: RunningServer, key_file: Path) -> None:
    assert ask(server, GREEN).status_code == 200
    fresh = key_file.with_suffix(".new")
    fresh.write_text(f'[keys.laptop]\nkey = "{BLUE}"\n')
    fresh.replace(key_file)
    assert ask(server, GREEN).status_code == 401
    assert ask(server, BLUE).status_code == 200
