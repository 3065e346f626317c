"""What the load generator asks before the run, and what follows from it."""

import itertools
import socket
from pathlib import Path

import pytest
from bench_runs import bench
from hand_made_server import STREAM_HEAD, Request, answer_in_words, hand_made_server, piece, response, usage

from kvwatch.bench.preparation import ASSUMED_TOKENS_PER_WORD

VLLM = response("200 OK", b"vllm:num_preemptions_total 0\n")
FEW = ("--num-requests", "8", "--concurrency", "2")


def test_answers_that_differ_from_those_given_alone_are_mismatches(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = itertools.count()

    def forgetful(connection: socket.socket, request: Request) -> None:
        """Answer the salt `two` differently each time."""
        text = f" {next(numbers)}" if request.body.get("cache_salt") == "two" else " same"
        connection.sendall(STREAM_HEAD + piece(text, 0, "stop") + b"data: [DONE]\n\n")

    with hand_made_server(forgetful) as server:
        server.metrics = VLLM
        words = ("--scenario", "isolation", "--num-requests", "12", "--assert", "isolation_mismatches==0")
        status, report = bench(capsys, "--url", server.url, *words)

    assert status == 1
    found = report["isolation"]
    assert found["variations"] == ["model m", "salt one", "salt two"]
    assert found["compared"] == 12
    assert len(found["mismatches"]) == 4


def test_pictures_are_shown_in_chats_and_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def say(connection: socket.socket, _request: Request) -> None:
        connection.sendall(STREAM_HEAD + piece(" a", 0, "stop") + b"data: [DONE]\n\n")

    with hand_made_server(say) as server:
        status, report = bench(capsys, "--url", server.url, *FEW, "--scenario", "isolation", "--isolation-images")
    assert status == 0
    assert report["isolation"]["variations"] == ["model m", "image 0", "image 1"]
    chats = [request for request in server.loads if request.path == "/v1/chat/completions"]
    assert len({str(request.body["messages"]) for request in chats}) >= 2
    assert all("data:image/png;base64," in str(request.body["messages"]) for request in chats)
    assert {"/v1/completions", "/v1/chat/completions"} == {request.path for request in server.loads}


@pytest.mark.parametrize(
    ("words", "resets", "outcome"),
    [
        (("--scenario", "cold"), ["/reset_prefix_cache"], "done"),
        (("--scenario", "warm"), ["/reset_prefix_cache"], "done"),
        (("--scenario", "short"), [], "not needed"),
        (("--scenario", "cold", "--no-reset"), [], "not offered"),
    ],
)
def test_the_cache_is_reset_only_where_a_scenario_needs_it_and_the_user_allows_it(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], resets: list[str], outcome: str
) -> None:
    with hand_made_server() as server:
        server.metrics = VLLM
        status, report = bench(capsys, "--url", server.url, *FEW, *words)
    assert status == 0
    assert server.resets == resets
    assert report["load"]["reset"] == outcome


def test_warm_prompts_are_asked_once_before_and_cold_ones_carry_a_salt_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with hand_made_server() as server:
        server.metrics = VLLM
        bench(capsys, "--url", server.url, "--num-requests", "16", "--scenario", "warm,cold")
    prepared = [request.body["prompt"] for request in server.posts if request.body["max_tokens"] == 1]
    cold = [request for request in server.loads if "cache_salt" in request.body]
    warm = [request.body["prompt"] for request in server.loads if "cache_salt" not in request.body]
    assert len(warm) == len(cold) == 8
    assert set(warm) == set(prepared) & set(warm)
    assert all(prepared.count(prompt) == 1 for prompt in set(warm))
    assert len({request.body["cache_salt"] for request in cold}) == 8


def test_a_key_goes_with_every_request_and_into_no_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("hush-hush\n")
    with hand_made_server() as server:
        saved = tmp_path / "run.json"
        words = ("--scenario", "short", "--api-key-file", str(key), "--save", str(saved), "--save-texts")
        status, report = bench(capsys, "--url", server.url, *FEW, *words)
    assert status == 0
    assert all("authorization: bearer hush-hush" in request.head for request in server.posts)
    assert "hush" not in str(report) + saved.read_text()


def test_tokens_of_words_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """The server counts a token for each word, whatever its length."""
    with hand_made_server(answer_in_words) as server:
        _, report = bench(capsys, "--url", server.url, *FEW, "--scenario", "long")
    assert report["target"]["tokens_per_word"] == 1
    lengths = [
        len(str(request.body["prompt"]).split()) + int(str(request.body["max_tokens"])) for request in server.loads
    ]
    assert all(0.79 * 1024 <= length <= 0.9 * 1024 for length in lengths)


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_server_that_says_the_same_number_of_every_prompt_does_not_count_tokens(
    capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def say(connection: socket.socket, _request: Request) -> None:
        connection.sendall(STREAM_HEAD + piece(" a", 0, "stop") + usage(number, 1) + b"data: [DONE]\n\n")

    with hand_made_server(say) as server:
        server.prepare = say
        status, report = bench(capsys, "--url", server.url, *FEW, "--scenario", "short", "--assert", "ok==8")
    assert status == 0
    assert report["target"]["tokens_per_word"] == ASSUMED_TOKENS_PER_WORD
