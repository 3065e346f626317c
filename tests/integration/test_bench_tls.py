"""The load generator over TLS: whom it trusts, and what it says of whom it does not."""

from pathlib import Path

import pytest
from bench_runs import bench, run
from certificates import make_certificate, server_context
from hand_made_server import hand_made_server

from kvwatch.errors import ConfigError

FEW = ("--scenario", "max-tokens", "--num-requests", "6", "--concurrency", "2")


def test_a_server_whose_authority_is_given_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with hand_made_server(context=server_context(certificate, key)) as server:
        assert server.url.startswith("https://")
        status, report = bench(capsys, "--url", server.url, *FEW, "--ca-file", certificate, "--assert", "ok==6")
    assert status == 0
    assert report["errors"] == {}
    assert len(server.loads) == 6
    assert report["throughput"]["output_tokens"] == sum(int(str(each.body["max_tokens"])) for each in server.loads)


@pytest.mark.parametrize("is_other_given", [False, True])
def test_a_server_that_nobody_vouches_for_is_asked_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, is_other_given: bool
) -> None:
    certificate, key = make_certificate(tmp_path)
    other, _ = make_certificate(tmp_path, "other")
    trusted = ("--ca-file", other) if is_other_given else ()
    with hand_made_server(context=server_context(certificate, key)) as server:
        assert run(["--url", server.url, *FEW, *trusted]) == 3
    printed = capsys.readouterr().err
    assert "--ca-file" in printed
    assert printed.count("\n") == 1
    assert not server.gets
    assert not server.posts


@pytest.mark.parametrize("content", [None, "", "no certificate\n", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_file_without_certificates_is_a_usage_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "authorities.pem"
    if content is not None:
        file.write_text(content)
    with (
        hand_made_server() as server,
        pytest.raises(ConfigError, match=r"--ca-file: .*authorities\.pem cannot be used"),
    ):
        run(["--url", server.url, *FEW, "--ca-file", str(file)])
    assert not server.gets
