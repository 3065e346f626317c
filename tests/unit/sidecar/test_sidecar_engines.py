"""What a sidecar is told to watch: NAME=URL, options, files; what cannot be meant is refused with a remedy."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.cli import main
from kvwatch.errors import ConfigError
from kvwatch.sources.engines import EngineSpec, parse_engine, parse_engines


@pytest.mark.parametrize(
    ("text", "kind", "url"),
    [
        ("a=grpc://10.0.0.1:9402", "kvwatch", "grpc://10.0.0.1:9402"),
        ("a=grpcs://[::1]:9402", "kvwatch", "grpcs://[::1]:9402"),
        ("a.b-c=vllm+http://h:8000", "vllm", "http://h:8000"),
        ("a=vllm+https://h/behind/a/proxy/", "vllm", "https://h/behind/a/proxy"),
        ("a=sglang+http://h:30000", "sglang", "http://h:30000"),
    ],
)
def test_a_url_names_the_kind_of_engine_and_where_it_is(text: str, kind: str, url: str) -> None:
    spec = parse_engine(text)
    assert (spec.name, spec.kind, spec.url) == (text.partition("=")[0], kind, url)


def test_options_stand_in_the_query() -> None:
    spec = parse_engine(
        "a=vllm+http://h:1?kv_events=tcp://*:5557&replay=off&mode=bind&topic=kv&dp-ranks=4&token_ids=true&max_blocks=9"
    )
    assert spec == EngineSpec(
        name="a", kind="vllm", url="http://h:1", kv_events="tcp://*:5557", replay="off", mode="bind", topic="kv",
        dp_ranks=4, token_ids=True, max_blocks=9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpc://h:1", "does not begin with a name"),
        ("=grpc://h:1", "does not begin with a name"),
        ("a b=grpc://h:1", "does not begin with a name"),
        (f"{'x' * 65}=grpc://h:1", "does not begin with a name"),
        ("a=http://h:1", r"scheme http:// is unknown; did you mean"),
        ("a=grpc://h", "lacks host and port"),
        ("a=grpc://h:1/path", "lacks host and port"),
        ("a=vllm+http://", "lacks host and port"),
        ("a=vllm+http://h:99999", "is no URL"),
        ("a=vllm+http://u:secret@h:1", "holds a user or a password"),
        ("a=vllm+http://h:1?tokenfile=x", "option tokenfile is unknown; did you mean token_file"),
        ("a=vllm+http://h:1?topic=a&topic=b", "given twice"),
        ("a=vllm+http://h:1?mode=both", "none of auto, bind, connect"),
        ("a=vllm+http://h:1?dp_ranks=-1", "is no number"),
        ("a=vllm+http://h:1?token_ids=maybe", "neither true nor false"),
        ("a=vllm+http://h:1?replay=", "replay is empty"),
        ("a=vllm+http://h:1?x", "are no options"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_engine(text)
    assert "secret" not in str(caught.value)


@given(st.text(max_size=60))
def test_no_text_is_more_than_refused(text: str) -> None:
    for each in (text, f"a={text}", f"a=vllm+http://{text}", f"a=grpc://h:1?{text}"):
        with suppress(ConfigError):
            assert parse_engine(each).name in each


def test_files_are_read_at_the_start_and_again_when_they_are_used(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_engines([f"a=grpc://h:1?token_file={token}"])
    token.write_text("# none\n\n")
    with pytest.raises(ConfigError, match="holds no token"):
        parse_engines([f"a=grpc://h:1?token_file={token}"])
    token.write_text("# ours\n first \nsecond\n")
    (spec,) = parse_engines([f"a=grpc://h:1?token_file={token}"])
    assert spec.token() == "first"
    token.write_text("other\n")
    assert spec.token() == "other"


def test_two_engines_need_two_names() -> None:
    with pytest.raises(ConfigError, match="the name a is given twice"):
        parse_engines(["a=grpc://h:1", "b=grpc://h:1", "a=grpc://h:2"])


def test_the_engines_own_file_of_tokens_is_no_file_with_a_token(tmp_path: Path) -> None:
    """Else its whole line would be sent, and the engine would say that it does not know that token."""
    path = tmp_path / "tokens"
    for content, is_refused in (("alice operate 0123456789abcdef\n", True), ("# alice\n 0123456789abcdef \n", False)):
        path.write_text(content, encoding="utf-8")
        texts = [f"a=grpc://h:1?admin_token_file={path}"]
        if is_refused:
            with pytest.raises(ConfigError, match=r"admin_token_file: .* give a file with the token alone"):
                parse_engines(texts)
        else:
            assert parse_engines(texts)[0].admin_token() == "0123456789abcdef"


def test_the_command_line_says_in_one_line_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sidecar"]) == 2
    assert main(["sidecar", "--engine", "a=grcp://h:1"]) == 2
    assert main(["sidecar", "--engine", "a=grpc://h:1", "--vllm-aliases"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "no engine to watch is given" in errors[0]
    assert "did you mean grpc://" in errors[1]
    assert "--vllm-aliases" in errors[2]
