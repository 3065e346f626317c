"""Tokens: what a file may say, and that it is read again when it changes."""

import hashlib
import os
from pathlib import Path

import pytest
from builders import FakeClock

from kvwatch.admin.tokens import Role, TokenFile
from kvwatch.errors import ConfigError

TOKEN = "0123456789abcdef-token"
OTHER = "fedcba9876543210-token"


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))  # two writes within one tick of the clock
    return str(path)


def test_a_token_has_its_name_and_its_roles(tmp_path: Path) -> None:
    tokens = TokenFile(
        write(tmp_path / "t", f"# people\n\n alice prompts,operate {TOKEN}\nbob read {OTHER}\n"), FakeClock()
    )

    alice, bob = tokens.find(TOKEN), tokens.find(OTHER)

    assert alice is not None
    assert bob is not None
    assert (alice.token.name, alice.token.roles) == ("alice", frozenset(Role))
    assert (bob.token.name, bob.token.roles) == ("bob", frozenset({Role.READ}))
    assert not alice.is_expired
    assert tokens.find(TOKEN + "x") is None
    assert tokens.find(TOKEN[:-1]) is None
    assert tokens.find("") is None
    assert tokens.find("\udc80" + TOKEN) is None


def test_a_token_may_be_given_as_its_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens = TokenFile(write(tmp_path / "t", f"alice operate sha256:{digest}\n"), FakeClock())

    assert tokens.find(TOKEN) is not None
    assert tokens.find(f"sha256:{digest}") is None, "who reads the file cannot get in with what it says"


def test_a_token_expires_at_its_time(tmp_path: Path) -> None:
    clock = FakeClock()  # 2023-11-14T22:13:21Z
    tokens = TokenFile(write(tmp_path / "t", f"a read {TOKEN} 2023-11-14T22:13:22Z\n"), clock)

    before = tokens.find(TOKEN)
    clock.advance(1)
    after = tokens.find(TOKEN)

    assert before is not None
    assert after is not None
    assert (before.is_expired, after.is_expired) == (False, True)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tokens = TokenFile(write(path, f"a read {TOKEN}\n"), FakeClock())

    write(path, f"a read {OTHER}\n")

    assert tokens.find(TOKEN) is None
    assert tokens.find(OTHER) is not None


def test_a_pipe_in_place_of_the_file_lets_nobody_in_and_holds_up_nobody(tmp_path: Path) -> None:
    """Opening it would wait for a writer, on the thread that answers everybody."""
    path = tmp_path / "t"
    tokens = TokenFile(write(path, f"a read {TOKEN}\n"), FakeClock())
    path.unlink()
    os.mkfifo(path)

    assert tokens.find(TOKEN) is None
    with pytest.raises(ConfigError, match="no regular file"):
        TokenFile(str(path), FakeClock())


@pytest.mark.parametrize("harm", ["", "a read short\n", f"a chief {TOKEN}\n", "\udc80"])
def test_a_file_that_goes_bad_lets_nobody_in_until_it_is_mended(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "t"
    tokens = TokenFile(write(path, f"a read {TOKEN}\n"), FakeClock())

    path.write_bytes(harm.encode("utf-8", "surrogateescape"))
    assert tokens.find(TOKEN) is None
    path.unlink()
    assert tokens.find(TOKEN) is None
    write(path, f"a read {TOKEN}\n")
    assert tokens.find(TOKEN) is not None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("a read", "words"),
        (f"a read {TOKEN} 2027-01-01 more", "words"),
        (f"a-name/with read {TOKEN}", "name"),
        (f"a chief {TOKEN}", "role 'chief' is unknown"),
        ("a read short", "16 to 1024"),
        (f"a read {TOKEN} tomorrow", "'tomorrow' is no time"),
        ("a read sha256:12", "64 hexadecimal digits"),
        (f"a read {TOKEN}\na read {OTHER}", "name a twice"),
        (f"a read {TOKEN}\nb read {TOKEN}", "same token twice"),
        ("# nothing", "no token"),
    ],
)
def test_a_bad_line_is_named_without_its_token(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        TokenFile(write(tmp_path / "t", line + "\n"), FakeClock())

    assert TOKEN not in str(caught.value)
    assert OTHER not in str(caught.value)
    assert "--admin-token-file" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--admin-token-file.*cannot be read"):
        TokenFile(str(tmp_path / "none"), FakeClock())
