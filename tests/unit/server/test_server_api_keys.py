"""The file of API keys: what is in it, what is wrong with it, and that a change of it counts at once."""

import hashlib
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvwatch.errors import ConfigError
from kvwatch_engine.contracts.tenant import tenant_salt
from kvwatch_engine.server.api_keys import MAX_FILE_BYTES, MAX_KEYS, ApiKeys, Caller

KEY, OTHER = "k" * 32, "o" * 32


def write(path: Path, text: str) -> str:
    """Write a file that is certainly seen as another one than before."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
    return str(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_key_says_who_calls_for_which_tenant_and_with_which_salt(path: Path) -> None:
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    keys = ApiKeys(
        write(
            path,
            f'[keys.laptop]\nkey = "{KEY}"\ntenant = "blue"\n[keys.ci]\nsha256 = "{digest}"\n'
            '[tenants.blue]\nsalt = "deep"\n',
        )
    )
    assert keys.caller(KEY) == Caller("laptop", "blue", tenant_salt("blue", "deep"))
    assert keys.caller(OTHER) == Caller("ci", "ci", tenant_salt("ci"))
    for unknown in ("", "k", KEY[:-1], KEY + "k", digest, "\ud800", "ключ"):
        assert keys.caller(unknown) is None


def test_tenants_have_salts_of_their_own_unless_the_operator_gives_them_the_same() -> None:
    salts = [tenant_salt("a"), tenant_salt("b"), tenant_salt("a", "b"), tenant_salt("b", "a"), tenant_salt("")]
    assert len(set(salts)) == len(salts)
    assert tenant_salt("a", "tenant:b") != tenant_salt("b")
    assert tenant_salt("a", "x") == tenant_salt("b", "x")
    assert tenant_salt("a", "") == tenant_salt("") == ""


def test_the_salt_of_any_tenant_can_be_asked_for(path: Path) -> None:
    keys = ApiKeys(write(path, f'[keys.a]\nkey = "{KEY}"\n[tenants.b]\nsalt = ""\n'))
    assert (keys.salt_of("a"), keys.salt_of("b"), keys.salt_of("c")) == ("tenant:a", "", "tenant:c")


def test_an_expired_key_is_unknown(path: Path) -> None:
    now = datetime.now(UTC)
    text = "\n".join(
        f'[keys.{name}]\nkey = "{name * 16}"\nexpires = {moment}'
        for name, moment in [
            ("a", (now - timedelta(seconds=1)).isoformat()),
            ("b", (now + timedelta(hours=1)).isoformat()),
            ("c", (now - timedelta(days=1)).date().isoformat()),
            ("d", (now + timedelta(days=2)).date().isoformat()),
            ("e", (now + timedelta(hours=1)).replace(tzinfo=None).isoformat()),
        ]
    )
    keys = ApiKeys(write(path, text))
    assert [name for name in "abcde" if keys.caller(name * 16)] == ["b", "d", "e"]


def test_a_changed_file_counts_at_once(path: Path) -> None:
    keys = ApiKeys(write(path, f'[keys.a]\nkey = "{KEY}"\n'))
    write(path, f'[keys.b]\nkey = "{OTHER}"\ntenant = "green"\n')
    assert keys.caller(KEY) is None
    assert keys.caller(OTHER) == Caller("b", "green", "tenant:green")


@pytest.mark.parametrize("content", ["[keys.b]\nkey = 'short'\n", "keys = ", "", None])
def test_a_file_that_became_wrong_lets_nobody_in_until_it_is_right_again(path: Path, content: str | None) -> None:
    right = f'[keys.a]\nkey = "{KEY}"\n'
    keys = ApiKeys(write(path, right))
    if content is None:
        path.unlink()
    else:
        write(path, content)
    assert keys.caller(KEY) is None
    assert keys.caller(KEY) is None
    write(path, right)
    assert keys.caller(KEY) is not None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no key"),
        ("keys = 5", "is wrong"),
        ("[keys.a]\n", "either key or sha256"),
        (f'[keys.a]\nkey = "{KEY}"\nsha256 = "{"0" * 64}"\n', "either key or sha256"),
        ('[keys.a]\nkey = "short"\n', "has 5 characters"),
        (f'[keys.a]\nkey = "{"x" * 257}"\n', "has 257 characters"),
        ('[keys.a]\nkey = "sixteen chars ..."\n', "without spaces"),
        ('[keys.a]\nsha256 = "abc"\n', "64 hexadecimal digits"),
        (f'[keys.a]\nkey = "{KEY}"\nsalt = "x"\n', "unknown field"),
        (f'[keys.a]\nkey = "{KEY}"\nexpires = "soon"\n', "expires is no date"),
        (f'[keys.a]\nkey = "{KEY}"\n[keys.b]\nkey = "{KEY}"\n', "are the same key"),
        (f'[keys.{"n" * 129}]\nkey = "{KEY}"\n', "1 to 128"),
        (f'[keys.a]\nkey = "{KEY}"\ntenant = "new\\nline"\n', "printable"),
        (f'[keys.a]\nkey = "{KEY}"\n[tenants.a]\nsalt = "{"s" * 257}"\n', "has 257 characters"),
        ("[keys.a\n", "not valid TOML"),
        ("".join(f'[keys.k{n}]\nkey = "{n:032}"\n' for n in range(MAX_KEYS + 1)), f"the limit is {MAX_KEYS}"),
        ("#" * (MAX_FILE_BYTES + 1), "is larger than"),
    ],
)
def test_a_wrong_file_is_refused_at_the_start_and_no_message_shows_a_key(path: Path, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-file") as caught:
        ApiKeys(write(path, content))
    assert said in str(caught.value)
    assert KEY not in str(caught.value)
    assert "sixteen chars" not in str(caught.value)


def test_a_pipe_in_place_of_the_file_lets_nobody_in_and_holds_up_nobody(path: Path) -> None:
    """Opening it would wait for a writer, on the thread that answers everybody."""
    keys = ApiKeys(write(path, f'[keys.a]\nkey = "{KEY}"\n'))
    path.unlink()
    os.mkfifo(path)

    assert keys.caller(KEY) is None
    with pytest.raises(ConfigError, match="no regular file"):
        ApiKeys(str(path))


def test_a_file_that_is_not_text_or_not_there_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ApiKeys(str(path))
    os.unlink(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(str(path))
