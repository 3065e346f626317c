"""Who may do what: every operation with every kind of token, method, path and sender has the status that it should."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_access import METHODS, ODD, PATHS, ROLES, SENT, expected, filled, odd_spellings
from admin_stage import AdminStage, admin_stage

from kvwatch.admin.settings import AdminOptions, check_options
from kvwatch.errors import ConfigError


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminStage]:
    with admin_stage(tmp_path_factory.mktemp("admin")) as running:
        yield running


@pytest.fixture(scope="module")
def remote_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminStage]:
    """One that other machines could reach."""
    with admin_stage(tmp_path_factory.mktemp("admin"), options={"listen": "0.0.0.0:0"}) as running:
        yield running


def ask(
    stage: AdminStage, method: str, path: str, sent: str | None = None, *headers: tuple[str, str]
) -> tuple[int, bytes]:
    """Send a request exactly as it is given; return status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", stage.port, timeout=60)
    given = dict(headers)
    connection.putrequest(method, path, skip_host="Host" in given, skip_accept_encoding=True)
    for name, value in headers:
        connection.putheader(name, value)
    if sent is not None:
        connection.putheader("Authorization", sent)
    connection.endheaders()
    with connection.getresponse() as answer:
        status, body = answer.status, answer.read()
    connection.close()
    return status, body


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("who", SENT)
def test_every_operation_demands_what_it_should(
    stage: AdminStage, remote_stage: AdminStage, path: str, who: str
) -> None:
    for method in METHODS:
        for where, is_open in ((stage, True), (remote_stage, False)):
            status, body = ask(where, method, filled(path), SENT[who])
            wanted = expected(path, method, who, is_reading_open=is_open)
            assert status in (wanted | ({409} if "{" in path and 200 in wanted else set())), (method, path, who, body)
            if status >= 400 and method != "HEAD":
                assert json.loads(body)["status"] == status


FOREIGN = (
    ("Host", "evil.example"), ("Host", "192.0.2.1:9401"), ("Origin", "http://evil.example"), ("Origin", "null"),
    ("Sec-Fetch-Site", "cross-site"),
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_whoever_comes_from_elsewhere_is_refused_on_every_path_whatever_the_token(stage: AdminStage, path: str) -> None:
    for who, sent in SENT.items():
        for method in METHODS:
            for header in FOREIGN:
                assert ask(stage, method, filled(path), sent, header)[0] == 403, (method, path, who, header)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("who", ["nobody", "unknown", "expired", "read", "operate"])
def test_no_path_is_there_under_another_spelling(stage: AdminStage, path: str, who: str) -> None:
    for spelling in odd_spellings(path):
        for method in ("GET", "POST", "PATCH"):
            is_let_in = who in ROLES or (who == "nobody" and method == "GET")
            assert ask(stage, method, spelling, SENT[who])[0] == (404 if is_let_in else 401), (method, spelling)


@pytest.mark.parametrize("path", ODD)
@pytest.mark.parametrize("who", ["nobody", "read", "operate", "unknown"])
def test_what_is_not_listed_is_not_there_however_it_is_written(
    stage: AdminStage, remote_stage: AdminStage, path: str, who: str
) -> None:
    for method in ("GET", "POST", "PATCH"):
        is_let_in = who in ROLES or (who == "nobody" and method == "GET")
        assert ask(stage, method, path or "/", SENT[who])[0] == (404 if is_let_in else 401)
        assert ask(remote_stage, method, path or "/", SENT[who])[0] == (404 if who in ROLES else 401)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:9401",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "192.0.2.1",
        "[2001:db8::1]:80",
        "",
        "localhost:evil",
        "::1",
        "user@localhost",
    ],
)
@pytest.mark.parametrize("who", ["nobody", "operate"])
def test_a_name_that_only_points_here_is_refused(stage: AdminStage, host: str, who: str) -> None:
    """A page on evil.example may have its name resolve to 127.0.0.1: the browser then sends the name."""
    assert ask(stage, "GET", "/admin/v1/pool", SENT[who], ("Host", host))[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:19401", "[::1]:80", "127.0.0.1"])
def test_names_of_this_machine_are_known_whatever_the_port(stage: AdminStage, host: str) -> None:
    """A forwarded port has another number than the one that is listened on."""
    assert ask(stage, "GET", "/admin/v1/pool", None, ("Host", host))[0] == 200


def test_further_names_are_known_when_they_were_given(tmp_path: Path) -> None:
    with admin_stage(tmp_path, options={"hosts": frozenset({"kvwatch.internal"})}) as stage:
        assert ask(stage, "GET", "/admin/v1/pool", None, ("Host", "KVWATCH.internal:80"))[0] == 200
        assert ask(stage, "GET", "/admin/v1/pool", None, ("Host", "other.internal"))[0] == 403


def test_two_hosts_are_none(stage: AdminStage) -> None:
    status, _ = ask(stage, "GET", "/admin/v1/pool", None, ("Host", "localhost"), ("Host", "localhost"))
    assert status in {400, 403}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Origin", "http://evil.example")], 403),
        ([("Origin", "null")], 403),
        ([("Origin", "https://localhost")], 403),
        ([("Origin", "http://localhost:1")], 403),
        ([("Origin", "http://localhost")], 200),
        ([("Origin", "http://localhost"), ("Origin", "http://evil.example")], 403),
        ([("Sec-Fetch-Site", "cross-site")], 403),
        ([("Sec-Fetch-Site", "same-site")], 403),
        ([("Sec-Fetch-Site", "same-origin")], 200),
    ],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(stage: AdminStage, headers: list[tuple[str, str]], status: int) -> None:
    for who in ("nobody", "operate"):
        found, _ = ask(stage, "GET", "/admin/v1/pool", SENT[who], ("Host", "localhost"), *headers)
        assert found == status


def test_two_tokens_are_none(stage: AdminStage) -> None:
    assert ask(stage, "GET", "/admin/v1/pool", SENT["read"], ("Authorization", str(SENT["operate"])))[0] == 401


def test_refusals_are_counted_and_tell_no_token(stage: AdminStage, capfd: pytest.CaptureFixture[str]) -> None:
    before = stage.value("admin_auth_failures", reason="unknown") or 0

    ask(stage, "GET", "/admin/v1/pool", SENT["unknown"])

    assert stage.value("admin_auth_failures", reason="unknown") == before + 1
    assert "who-is-this" not in "".join(capfd.readouterr())


def test_whoever_guesses_is_told_to_wait_but_shuts_nobody_out(tmp_path: Path) -> None:
    with admin_stage(tmp_path, options={"failures_per_minute": 1, "failures_at_once": 3}) as stage:
        found = [ask(stage, "GET", "/admin/v1/pool", SENT["unknown"])[0] for _ in range(5)]
        assert found == [401, 401, 401, 429, 429]
        assert ask(stage, "GET", "/admin/v1/pool", SENT["read"])[0] == 200
        assert ask(stage, "GET", "/admin/v1/pool")[0] == 200


def test_long_headers_are_refused(stage: AdminStage) -> None:
    assert ask(stage, "GET", "/admin/v1/pool", None, ("X-Long", 60_000 * "a"))[0] == 431


def test_without_a_token_file_nothing_can_be_changed(tmp_path: Path) -> None:
    with admin_stage(tmp_path, options={"token_file": None}) as stage:
        assert ask(stage, "GET", "/admin/v1/pool")[0] == 200
        for who in SENT:
            assert ask(stage, "POST", "/admin/v1/pool", SENT[who])[0] == 401
            assert ask(stage, "PATCH", "/admin/v1/config", SENT[who])[0] == 401


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_it_does_not_start_off_loopback_without_tokens(listen: str) -> None:
    with pytest.raises(ConfigError, match="--admin-token-file"):
        check_options(AdminOptions(listen=listen))
