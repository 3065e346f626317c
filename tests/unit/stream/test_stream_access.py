"""Who may connect: tokens, addresses, certificates."""

import os
from pathlib import Path

import pytest
from certificates import make_certificate

from kvwatch.errors import ConfigError, ExporterError
from kvwatch.stream.access import StreamOptions, Tokens, make_credentials, reserve


def rewritten(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10_000_000))


def test_each_line_is_a_token_except_blank_ones_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# of the dashboard\n  alpha  \n\nbeta\n", encoding="utf-8")

    tokens = Tokens(str(path))

    assert [tokens.accepts(each) for each in ("alpha", "beta", "", "# of the dashboard", "alpha2", "\udcff")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip


def test_tokens_are_read_again_when_the_file_changes_and_nobody_is_let_in_when_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    rewritten(path, "old\n")
    tokens = Tokens(str(path))
    assert tokens.accepts("old")

    rewritten(path, "new and longer\n")
    assert (tokens.accepts("old"), tokens.accepts("new and longer")) == (False, True)

    path.unlink()
    assert not tokens.accepts("new and longer")

    rewritten(path, "old\n")
    assert tokens.accepts("old")

    rewritten(path, "\n")
    assert (tokens.accepts("old"), tokens.accepts("")) == (False, False)


def test_a_pipe_in_place_of_the_file_lets_nobody_in_and_holds_up_nobody(tmp_path: Path) -> None:
    """Opening it would wait for a writer, on the thread that answers everybody."""
    path = tmp_path / "tokens"
    path.write_text("alpha\n", encoding="utf-8")
    tokens = Tokens(str(path))
    path.unlink()
    os.mkfifo(path)

    assert not tokens.accepts("alpha")
    with pytest.raises(ConfigError, match="no regular file"):
        Tokens(str(path))


@pytest.mark.parametrize("content", [b"", b"# nothing\n\n", b"\xff\xfe"])
def test_a_file_without_tokens_is_an_error_of_the_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="--grpc-token-file"):
        Tokens(str(path))


def test_a_missing_file_is_an_error_of_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokens(str(tmp_path / "none"))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_other_machines_are_listened_to_only_with_a_token(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="anybody could follow all requests; give --grpc-token-file"):
        reserve(StreamOptions(listen=listen))

    reserve(StreamOptions(listen=listen, token_file=str(tmp_path))).close()


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "127.0.0.5:0", "[::1]:0"])
def test_loopback_needs_no_token(listen: str) -> None:
    with reserve(StreamOptions(listen=listen)) as bound:
        assert bound.getsockname()[1] > 0


def test_a_taken_port_is_an_error_that_names_the_flag() -> None:
    with reserve(StreamOptions(listen="127.0.0.1:0")) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(ExporterError, match="--grpc-listen: cannot listen"):
            reserve(StreamOptions(listen=f"127.0.0.1:{port}"))


def test_certificate_and_key_must_both_be_there_and_belong_together(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "a")
    _, other_key = make_certificate(tmp_path, "b")

    def options(certificate: str | None, key: str | None) -> StreamOptions:
        return StreamOptions(listen="127.0.0.1:0", certificate=certificate, key=key)

    assert make_credentials(options(None, None)) is None
    assert make_credentials(options(certificate, key)) is not None
    for wrong in (options(certificate, None), options(None, key)):
        with pytest.raises(ConfigError, match="belong together"):
            make_credentials(wrong)
    for wrong in (options(certificate, other_key), options(key, key), options(str(tmp_path / "none"), key)):
        with pytest.raises(ConfigError, match="--grpc-cert"):
            make_credentials(wrong)
